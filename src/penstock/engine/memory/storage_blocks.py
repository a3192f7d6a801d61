"""Sends the tensors and storages of a payload. Memory that tensors share is sent once.

    worker: BlockCollector.reduce(tensor) for each one, then settle() -> blocks of memory, places
    parent: rebuilding(blocks, places) while the stream is unpickled -> tensors over the blocks

PyTorch's workers move whole storages to shared memory and rebuild every tensor over them. Here, a
block is the part of a storage that the tensors of one payload use. For ten rows of a large tensor,
only ten rows are sent. Tensors keep their strides, and overlapping tensors still overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch

from penstock.engine.memory.batch_layout import is_plain_tensor
from penstock.engine.memory.tensor_reducers import (
    finish_tensor,
    has_own_pickling,
    reduce_special,
)

_GRAIN = 16
"""Alignment of a block in its storage, so that it can be viewed as any dtype."""
_MAX_SPREAD = 4
"""A tensor that spans more than this many times its own size is packed, if no other tensor shares
the block. The memory between its elements is not sent, and its strides are lost."""


class StorageBlock(NamedTuple):
    """A range of worker memory to send."""

    address: int
    num_bytes: int


class TensorPlace(NamedTuple):
    """The position of a tensor: a block and a byte offset in it."""

    block: int
    start: int
    is_packed: bool = False


class _Extent(NamedTuple):
    """The bytes that one tensor or storage uses, counted from the start of its storage."""

    storage: int
    start: int
    end: int
    owner: Any

    @property
    def floor(self) -> int:
        return self.start - self.start % _GRAIN


class BlockCollector:
    """Collects the tensors and storages of one payload during pickling and keeps them alive.

    Used in the worker, one per payload.
    """

    kinds = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)

    def __init__(self) -> None:
        self._extents: list[_Extent] = []
        self._packed: list[torch.Tensor] = []

    def clear(self) -> None:
        self._extents.clear()

    def reduce(self, obj: Any) -> Any:
        """Reduce a tensor or storage. Return None if only its own reducer can pickle it."""
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, torch.UntypedStorage):
            return self._reduce_storage(obj)
        untyped = getattr(obj, "_untyped_storage", None)
        if untyped is None:
            untyped = obj._storage  # torch 1.13
        return _typed_storage, (untyped, obj.dtype)

    def _reduce_tensor(self, tensor: Any) -> Any:
        if has_own_pickling(tensor):
            return None
        if not is_plain_tensor(tensor) or type(tensor) is torch.nn.Parameter:
            return reduce_special(tensor)
        kind = None if type(tensor) is torch.Tensor else type(tensor)
        state = dict(vars(tensor)) or None
        plain = tensor if kind is None else tensor.as_subclass(torch.Tensor)
        shape, strides, item_bytes = tuple(plain.shape), plain.stride(), plain.element_size()
        number = -1
        if plain.numel():
            start = plain.storage_offset() * item_bytes
            last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            end = start + (last + 1) * item_bytes
            number = self._add(_Extent(plain.data_ptr() - start, start, end, plain))
        return _tensor, (number, plain.dtype, shape, strides, kind, state)

    def _reduce_storage(self, storage: Any) -> Any:
        if storage.device.type != "cpu":
            return None
        if not storage.nbytes():
            return torch.UntypedStorage, (0,)
        extent = _Extent(storage.data_ptr(), 0, storage.nbytes(), storage)
        return _storage, (self._add(extent),)

    def _add(self, extent: _Extent) -> int:
        self._extents.append(extent)
        return len(self._extents) - 1

    def settle(self) -> tuple[list[StorageBlock], tuple[TensorPlace, ...]]:
        """Return the blocks to send, and the place of each tensor in them."""
        blocks: list[StorageBlock] = []
        places: dict[int, TensorPlace] = {}
        for group in self._groups():
            extents = [self._extents[number] for number in group]
            address = extents[0].storage + extents[0].floor
            block = StorageBlock(address, max(one.end for one in extents) - extents[0].floor)
            packed = self._pack(extents[0], block) if len(group) == 1 else None
            for number, one in zip(group, extents, strict=True):
                start = 0 if packed else one.start - extents[0].floor
                places[number] = TensorPlace(len(blocks), start, packed is not None)
            blocks.append(packed or block)
        return blocks, tuple(places[number] for number in range(len(places)))

    def _groups(self) -> Iterator[list[int]]:
        """Yield groups of overlapping or adjacent extents, as numbers sorted by start."""
        extents = self._extents
        numbers = sorted(range(len(extents)), key=lambda one: extents[one][:2])
        for _, members in groupby(numbers, key=lambda one: extents[one].storage):
            group: list[int] = []
            end = 0
            for number in members:
                if group and extents[number].floor > end:
                    yield group
                    group = []
                group.append(number)
                end = max(end, extents[number].end)
            yield group

    def _pack(self, extent: _Extent, block: StorageBlock) -> StorageBlock | None:
        """Copy the elements to a compact block. Return None if they are already close together."""
        if not isinstance(extent.owner, torch.Tensor):
            return None
        num_bytes = extent.owner.numel() * extent.owner.element_size()
        if block.num_bytes <= _MAX_SPREAD * num_bytes + _GRAIN:
            return None
        self._packed.append(extent.owner.contiguous())
        return StorageBlock(self._packed[-1].data_ptr(), num_bytes)


# -- in the parent ---------------------------------------------------------------------------------


class _Rebuilding(threading.local):
    """The blocks and places of the payload that this thread is unpickling."""

    blocks: Sequence[Any] = ()
    places: Sequence[TensorPlace] = ()
    storages: dict[int, Any]


_present = _Rebuilding()


@contextmanager
def rebuilding(blocks: Sequence[Any], places: Sequence[TensorPlace]) -> Iterator[None]:
    """Within this context, unpickled tensors are views of ``blocks``, which are writable."""
    outer = dict(vars(_present))
    _present.blocks, _present.places, _present.storages = blocks, places, {}
    try:
        yield
    finally:
        vars(_present).clear()
        vars(_present).update(outer)


def _storage(number: int) -> Any:
    block = _present.places[number].block
    found = _present.storages.get(block)
    if found is None:
        memory: Any = torch.frombuffer(_present.blocks[block], dtype=torch.uint8)
        has_untyped = hasattr(memory, "untyped_storage")
        found = memory.untyped_storage() if has_untyped else memory.storage().untyped()
        _present.storages[block] = found
    return found


def _tensor(
    number: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kind: Any,
    state: dict[str, Any] | None,
) -> Any:
    if number < 0:
        empty = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        return finish_tensor(empty, kind, state)
    place, storage = _present.places[number], _storage(number)
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    if place.is_packed:
        tensor = tensor.set_(storage).view(shape)  # the block holds only this tensor
    else:
        tensor.set_(storage, place.start // tensor.element_size(), shape, strides)
    return finish_tensor(tensor, kind, state)


def _typed_storage(untyped: Any, dtype: torch.dtype) -> Any:
    # Suppress the deprecation warning of typed storages. torch 1.13 does not have it.
    quiet: Any = {"_internal": True} if hasattr(torch.Tensor, "untyped_storage") else {}
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, **quiet)  # type: ignore[no-untyped-call]
