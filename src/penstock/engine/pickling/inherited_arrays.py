"""Finds arrays of the dataset that the fork server holds already and that need no copy (Linux).

A fork server that is a fork of this process has the arrays that existed at that time, at the same
addresses. So have its workers. The pages are shared until a process writes to them.

    parent: find_arrays(dataset); fork; ServerMemory(pid, ranges).find(views)
    worker: unpickling.unpickle_objects uses the memory at these addresses

An array that changed since the fork is copied. The bytes of both processes are compared each time
that workers are started, which takes about as long as copying them.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from penstock.engine.pickling.process_maps import address_of, covers, list_mappings, own_bytes
from penstock.named_tuple import NamedTuple

MIN_BYTES = 1 << 20
"""Smaller arrays are copied."""
_CHUNK_BYTES = 1 << 20
_MAX_ITEMS = 100
"""Maximum number of items of a list or tuple to look at. More than this are samples."""


class InheritedArrays(NamedTuple):
    """Arrays of a dataset in private memory, which a fork of this process shares."""

    owner: Any = None
    """The object that has them as attributes."""
    arrays: tuple[Any, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    """Their addresses and sizes."""
    own_bytes: int = 0
    """The memory of this process that they use."""


def find_arrays(dataset: Any) -> InheritedArrays:
    """Find large tensors and arrays among the attributes of a dataset. Runs no user code."""
    subset = getattr(sys.modules.get("torch.utils.data"), "Subset", None)
    while type(dataset) is subset:
        dataset = dataset.dataset
    try:
        weakref.ref(dataset)  # its end must be noticed
        values = list(vars(dataset).values())
    except Exception:  # it has none, or no attributes, or user code computes them
        return InheritedArrays()
    items = chain(*(value[:_MAX_ITEMS] for value in values if type(value) in (list, tuple)))
    found: dict[tuple[int, int], Any] = {}
    for value in chain(values, items):
        span = _range_of(value)
        if span is not None:
            found[span] = value
    mappings = list_mappings(0, sys.maxsize) if found else []
    for address, num_bytes in list(found):
        low, high = address, address + num_bytes
        under = [one for one in mappings if one.start < high and one.end > low]
        is_private = all(one.rights == "rw-p" and one.name in ("", "[heap]") for one in under)
        if not covers(under, low, high) or not is_private:
            del found[address, num_bytes]
    size = sum(own_bytes(address, address + num_bytes) for address, num_bytes in found)
    return InheritedArrays(dataset, tuple(found.values()), tuple(found), size)


def _range_of(value: Any) -> tuple[int, int] | None:
    """Return address and size of the memory that is pickled for an array. None: it is copied."""
    torch: Any = sys.modules.get("torch")
    if type(value) is np.ndarray:
        if not value.flags.forc or value.dtype.hasobject:
            return None
        address, num_bytes = int(value.ctypes.data), int(value.nbytes)
    elif torch is not None and type(value) is torch.Tensor:
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if value.is_quantized or not value.is_contiguous() or value.is_shared():
            return None
        address, num_bytes = value.data_ptr(), value.numel() * value.element_size()
    else:
        return None
    return (address, num_bytes) if num_bytes >= MIN_BYTES else None


class ServerMemory:
    """The arrays that a fork server inherited from this process.

    Args:
        pid: The fork server.
        ranges: See :class:`InheritedArrays`.
    """

    def __init__(self, pid: int, ranges: Iterable[tuple[int, int]]) -> None:
        self._pid = pid
        self._ranges = frozenset(ranges)
        self.is_outdated = False
        """True if this process has changed an array since the fork."""

    def find(self, views: Sequence[memoryview]) -> dict[int, int]:
        """Return the positions of buffers that the fork server holds, and their addresses.

        None of them if one has changed, because the fork server is then replaced.
        """
        found = {}
        for place, view in enumerate(views):
            if view.nbytes < MIN_BYTES:
                continue
            address = address_of(view)
            if (address, view.nbytes) not in self._ranges:
                continue
            try:
                self.is_outdated = not self._has_equal(view, address)
            except OSError:  # it has ended, or a security policy forbids it
                return {}
            if self.is_outdated:
                return {}
            found[place] = address
        return found

    def _has_equal(self, view: memoryview, address: int) -> bool:
        """Compare a buffer with the memory of the fork server at the same address."""
        ours = np.frombuffer(view, dtype=np.uint8)
        buffer = bytearray(min(len(ours), _CHUNK_BYTES))
        theirs = np.frombuffer(buffer, dtype=np.uint8)
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            for start in range(0, len(ours), _CHUNK_BYTES):
                piece = ours[start : start + _CHUNK_BYTES]
                into = memoryview(buffer)[: len(piece)]
                if os.preadv(memory.fileno(), [into], address + start) != len(piece):
                    raise OSError("a part of the memory is not mapped there")
                if not np.array_equal(theirs[: len(piece)], piece):
                    return False
        return True
