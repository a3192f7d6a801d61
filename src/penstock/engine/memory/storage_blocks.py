"""Tensors and storages of a payload: memory that they share is sent once, and shared again.

    worker: BlockCollector.reduce(tensor) for each one, then settle() -> blocks of memory, places
    parent: rebuilding(blocks, places) while the stream is unpickled -> tensors over the blocks

PyTorch's workers move whole storages to shared memory and rebuild every tensor over them. Here a
block is the part of a storage that the tensors of one payload use: ten rows of a large tensor send
ten rows. Tensors keep their strides, and those that overlapped overlap again.
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
"""Blocks begin at a multiple of this in their storage, so that views of any dtype fit."""
_MAX_SPREAD = 4
"""A tensor that lies alone in more than this many times its own size is packed: the memory between
its elements is not sent, and its strides are lost."""


class StorageBlock(NamedTuple):
    """Memory of the worker that is sent."""

    address: int
    num_bytes: int


class TensorPlace(NamedTuple):
    """Where a tensor begins: a block, and a number of bytes in it."""

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
    """Takes the tensors and storages of one payload while it is pickled, and keeps them alive.

    Called from: the worker, one for each payload.
    """

    kinds = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)

    def __init__(self) -> None:
        self._extents: list[_Extent] = []
        self._packed: list[torch.Tensor] = []

    def clear(self) -> None:
        self._extents.clear()

    def reduce(self, obj: Any) -> Any:
        """How it is pickled; None where only its own pickling understands it."""
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
        """The blocks to send, and the place of each tensor in them."""
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
        """Numbers of extents that overlap or touch, sorted by their start."""
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
        """The elements alone, where they lie far apart and nothing else shares their memory."""
        if not isinstance(extent.owner, torch.Tensor):
            return None
        num_bytes = extent.owner.numel() * extent.owner.element_size()
        if block.num_bytes <= _MAX_SPREAD * num_bytes + _GRAIN:
            return None
        self._packed.append(extent.owner.contiguous())
        return StorageBlock(self._packed[-1].data_ptr(), num_bytes)


# -- in the parent ---------------------------------------------------------------------------------


class _Rebuilding(threading.local):
    """The blocks and places of the payload that this thread unpickles."""

    blocks: Sequence[Any] = ()
    places: Sequence[TensorPlace] = ()
    storages: dict[int, Any]


_present = _Rebuilding()


@contextmanager
def rebuilding(blocks: Sequence[Any], places: Sequence[TensorPlace]) -> Iterator[None]:
    """While this lasts, tensors that are unpickled lie in ``blocks``: writable buffers."""
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
        tensor = tensor.set_(storage).view(shape)  # the block is this tensor
    else:
        tensor.set_(storage, place.start // tensor.element_size(), shape, strides)
    return finish_tensor(tensor, kind, state)


def _typed_storage(untyped: Any, dtype: torch.dtype) -> Any:
    # Without the warning that such storages are to be removed; torch 1.13 has none.
    quiet: Any = {"_internal": True} if hasattr(torch.Tensor, "untyped_storage") else {}
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, **quiet)  # type: ignore[no-untyped-call]
