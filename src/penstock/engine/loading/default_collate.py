"""torch's ``default_collate``: recognizes it, and calls it with better errors and faster stacking.

Used by whoever loads, for batches that are not written to a slot.

Tested by ``tests/unit/engine/loading/test_collate.py``.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate

from penstock.errors import NoStopIteration

_MAX_STACKED_BYTES = 4096
"""Arrays below this size are stacked in one call."""
_PLAIN = (torch.Tensor, int, float)
"""Samples without arrays inside."""
_DTYPE_AND_LAYOUT = operator.attrgetter("dtype", "shape", "strides")

STANDARD_COLLATORS: dict[Any, Any] = dict(torch_collate.default_collate_fn_map)


def is_default_collate(collate_fn: Any) -> bool:
    """Return True for torch's default_collate without collators registered by the user."""
    return collate_fn is torch_collate.default_collate and not custom_collators()


def custom_collators() -> dict[Any, Any]:
    """Return the user's entries in torch's ``default_collate_fn_map``, for the workers."""
    return {
        kind: function
        for kind, function in torch_collate.default_collate_fn_map.items()
        if STANDARD_COLLATORS.get(kind) is not function
    }


def register_collators(collators: dict[Any, Any]) -> None:
    """Register the result of the parent's :func:`custom_collators` in a worker."""
    torch_collate.default_collate_fn_map.update(collators)


def default_collate(
    samples: Any, indices: list[Any], path: str = "", *, keeps_channels_last: bool = False
) -> Any:
    """Call torch's own collate. If it fails because samples differ, the error names them.

    Args:
        samples: A list, or an object of a different type that ``__getitems__`` returned.
        keeps_channels_last: See :func:`~penstock.engine.memory.batch_layout.read_layout`.
    """
    try:
        if keeps_channels_last:
            collators = {**_collators(), torch.Tensor: _stack_images}
            return torch_collate.collate(samples, collate_fn_map=collators)
        if type(samples) is list and samples and type(samples[0]) in _PLAIN:
            return torch_collate.default_collate(samples)  # type: ignore[no-untyped-call]
        return torch_collate.collate(samples, collate_fn_map=_collators())
    except StopIteration as error:
        raise NoStopIteration.error_for("default_collate") from error
    except (
        RuntimeError,
        TypeError,
        KeyError,
        ValueError,
        IndexError,
        OverflowError,
    ) as error:
        if not isinstance(samples, (list, tuple)):
            raise
        samples = list(samples)
        if all(map(dataclasses.is_dataclass, samples)):
            return _collate_dataclasses(samples, indices, path)
        kinds = _dataclasses_in(samples[0]) if samples else set()
        if kinds:
            return _collate_with_dataclasses(samples, kinds)
        from penstock.engine.loading.mismatch import find_mismatch

        named = find_mismatch(samples, indices, error, path)
        if named is None:
            raise
        raise named from error


def _collators() -> dict[Any, Any]:
    """Return torch's collators, with a faster one for NumPy arrays unless one was replaced."""
    collators: dict[Any, Any] = torch_collate.default_collate_fn_map
    for kind in (np.ndarray, torch.Tensor):
        if collators.get(kind) is not STANDARD_COLLATORS[kind]:
            return collators
    return {**collators, np.ndarray: _stack_arrays}


def _stack_arrays(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Stack small arrays in one call. torch makes a tensor of each one first."""
    first = batch[0]
    if (
        set(map(type, batch)) == {np.ndarray}
        and len(set(map(_DTYPE_AND_LAYOUT, batch))) == 1
        and first.dtype.kind in "biufc"
        and first.dtype.isnative
        and first.flags.c_contiguous
        and first.ndim
        and first.nbytes < _MAX_STACKED_BYTES
        and get_worker_info() is None  # torch puts the batches of its workers in shared memory
    ):
        stacked = np.concatenate(batch).reshape(len(batch), *first.shape)
        return torch.as_tensor(stacked).clone()  # cloned, because NumPy's memory cannot be resized
    return STANDARD_COLLATORS[np.ndarray](batch, collate_fn_map=collate_fn_map)


def _stack_images(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    """Stack tensors. The result is channels_last if all of them are."""
    from penstock.engine.memory.batch_layout import is_channels_last

    if all(map(is_channels_last, batch)):
        return torch.stack([image.permute(1, 2, 0) for image in batch]).permute(0, 3, 1, 2)
    stack = torch_collate.default_collate_fn_map[torch.Tensor]
    return stack(batch, collate_fn_map=collate_fn_map)


def _collate_dataclasses(samples: list[Any], indices: list[Any], path: str) -> Any:
    """Collate dataclasses field by field, which torch's own collate does not support."""
    from penstock.engine.memory.batch_layout import make_dataclass

    columns = {
        field.name: [getattr(sample, field.name) for sample in samples]
        for field in dataclasses.fields(samples[0])
    }
    fields = {
        name: default_collate(column, indices, f"{path}.{name}") for name, column in columns.items()
    }
    return make_dataclass(type(samples[0]), fields)


def _dataclasses_in(sample: Any) -> set[type]:
    """Return the dataclasses nested in the containers of a sample."""
    if isinstance(sample, dict):
        return set().union(*map(_dataclasses_in, sample.values()))
    if isinstance(sample, (list, tuple)):
        return set().union(*map(_dataclasses_in, sample))
    if not dataclasses.is_dataclass(sample):
        return set()
    inside = [getattr(sample, field.name) for field in dataclasses.fields(sample)]
    return {type(sample)}.union(*map(_dataclasses_in, inside))


def _collate_with_dataclasses(samples: list[Any], kinds: set[type]) -> Any:
    """Call torch's own collate with these dataclasses registered for the call."""
    from penstock.engine.memory.batch_layout import make_dataclass

    def collate_fields(records: list[Any], *, collate_fn_map: Any) -> Any:
        columns = {
            field.name: [getattr(record, field.name) for record in records]
            for field in dataclasses.fields(records[0])
        }
        fields = {
            name: torch_collate.collate(column, collate_fn_map=collate_fn_map)
            for name, column in columns.items()
        }
        return make_dataclass(type(records[0]), fields)

    known: dict[Any, Any] = dict(torch_collate.default_collate_fn_map)
    known.update(dict.fromkeys(kinds, collate_fields))
    return torch_collate.collate(samples, collate_fn_map=known)
