"""Makes ``default_collate`` inside a user's ``collate_fn`` stack its tensors in the slot.

In a PyTorch worker, each of these tensors becomes a new shared-memory file. Here it is stacked
directly in the batch's slot (0.7 ms instead of 7.6 ms for a 9.6 MB batch, measured on a 2-core
arm64 machine).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from penstock.engine.loading.default_collate import STANDARD_COLLATORS
from penstock.engine.memory.shared_file import round_up

_TORCH_COLLATE_TENSOR = STANDARD_COLLATORS[torch.Tensor]


def _is_stackable(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if ``torch.stack`` can write it to given memory. torch handles the rest."""
    return (
        value.dtype is dtype
        and value.layout is torch.strided
        and value.is_cpu
        and not value.requires_grad
        and not value.is_nested
    )


class SlotAllocator:
    """Allocates memory from the start of one slot. Used with :func:`collating_into`."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer: np.ndarray | None = buffer
        self.capacity = buffer.nbytes
        self.used = 0

    def stack(self, batch: list[torch.Tensor]) -> torch.Tensor:
        first = batch[0]
        start = round_up(self.used, 64)
        num_bytes = first.numel() * first.element_size() * len(batch)
        fits = 0 < num_bytes <= self.capacity - start
        if not (fits and all(_is_stackable(value, first.dtype) for value in batch)):
            return torch.stack(batch, 0)
        count = first.numel() * len(batch)
        flat = torch.frombuffer(self.buffer, dtype=first.dtype, count=count, offset=start)
        self.used = start + num_bytes
        return torch.stack(batch, 0, out=flat.view(len(batch), *first.shape))


_present = threading.local()


def _collate_tensor(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if not all(isinstance(value, torch.Tensor) for value in batch):
        return torch.stack(batch, 0)  # raises the same error as without workers
    if first.layout is not torch.strided or first.is_nested:
        return _collate_as_inline(batch, collate_fn_map)
    allocator: SlotAllocator | None = getattr(_present, "allocator", None)
    is_plain = set(map(type, batch)) == {torch.Tensor}
    if is_plain and allocator is not None:
        return allocator.stack(batch)
    return torch.stack(batch, 0)


def _collate_as_inline(batch: list[torch.Tensor], collate_fn_map: Any) -> torch.Tensor:
    """Call torch's own collator as if outside a worker.

    In a worker, it creates a shared-memory file, which fails for some tensors.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        collated: torch.Tensor = _TORCH_COLLATE_TENSOR(batch, collate_fn_map=collate_fn_map)
        return collated
    finally:
        torch_worker._worker_info = info


def install_slot_collate() -> None:
    """Make default_collate in this worker write to the slot. Called once per worker process."""
    if torch_collate.default_collate_fn_map[torch.Tensor] is _TORCH_COLLATE_TENSOR:
        torch_collate.default_collate_fn_map[torch.Tensor] = _collate_tensor
        STANDARD_COLLATORS[torch.Tensor] = _collate_tensor


@contextmanager
def collating_into(allocator: SlotAllocator) -> Iterator[None]:
    """Within this context, default_collate allocates its tensors from ``allocator``."""
    _present.allocator = allocator
    try:
        yield
    finally:
        _present.allocator = None
