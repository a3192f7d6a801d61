"""Data that is in memory already: a batch is one gather, not a loop over samples.

Finds tensors behind a ``TensorDataset`` (also through ``Subset``) and copies the rows of a batch into
reused memory in one call. No user code runs, so no randomness is set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from penstock.engine.memory import round_up
from penstock.engine.slots import Ring

_GRAIN = 64


class Gatherer:
    """Rows of equally long CPU tensors, by index."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], rows: Any) -> None:
        self._tensors = [tensor.contiguous() for tensor in tensors]
        self._rows = rows
        self._length = len(self._tensors[0])

    def _places(self, num_rows: int) -> tuple[list[int], int]:
        offsets, end = [], 0
        for tensor in self._tensors:
            offsets.append(end)
            row_bytes = tensor[0].numel() * tensor.element_size() if self._length else 0
            end = round_up(end + row_bytes * num_rows, _GRAIN)
        return offsets, end

    def _resolve(self, index: list[int]) -> torch.Tensor:
        for rows in self._rows:
            index = [rows[place] for place in index]
        chosen = torch.tensor(index, dtype=torch.int64)
        if len(index) and int(chosen.min()) < 0:
            chosen = torch.where(chosen < 0, chosen + self._length, chosen)
        return chosen

    def into(self, index: list[int], root: Any, offsets: list[int]) -> list[torch.Tensor]:
        """Gather the rows of ``index`` into ``root``; what default_collate would return."""
        chosen = self._resolve(index)
        batch = []
        for tensor, offset in zip(self._tensors, offsets, strict=True):
            shape = (len(index), *tensor.shape[1:])
            count = int(np.prod(shape))
            if count == 0:
                batch.append(tensor.index_select(0, chosen))
                continue
            flat = torch.frombuffer(root, dtype=tensor.dtype, count=count, offset=offset)
            batch.append(torch.index_select(tensor, 0, chosen, out=flat.view(shape)))
        return batch

    def into_ring(self, index: list[int], ring: Ring) -> list[torch.Tensor]:
        """One batch in a slot of ``ring``, or in memory of its own when the user holds many."""
        offsets, num_bytes = self._places(len(index))
        ring.fit(num_bytes)
        if ring.is_crowded() or num_bytes == 0:
            return self.into(index, np.empty(max(num_bytes, 1), dtype=np.uint8), offsets)
        return self.into(index, ring.lend(ring.take(), num_bytes), offsets)


def find_gatherer(dataset: Any) -> Gatherer | None:
    """The gatherer for a dataset that only slices tensors; None for any other."""
    rows = []
    while type(dataset) is Subset:
        rows.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not dataset.tensors:
        return None
    if not all(_is_plain(tensor) for tensor in dataset.tensors):
        return None
    return Gatherer(dataset.tensors, rows)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dim() >= 1
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
