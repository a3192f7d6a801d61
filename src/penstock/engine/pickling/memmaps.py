"""Sends memory-mapped arrays by file name, so that each worker maps the file itself.

NumPy pickles the bytes of a ``np.memmap``, so a hundred gigabytes on disk would become a hundred
gigabytes of memory. Here, the file name and the offset are sent instead. The worker's mapping is
always private, so writes in a worker change only its own view. An array is sent by value if its
file was deleted or replaced, or if the array contains writes that are not in the file.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from bisect import bisect_right
from typing import Any

import numpy as np

from penstock.engine.pickling.process_maps import (
    MemoryMapping,
    address_of,
    is_unwritten,
    list_mappings,
)

_MIN_BYTES = 1 << 16
"""Smaller arrays are cheaper to pickle than to map."""


class MemmapReducer:
    """Reduces the mapped arrays of one pickle.

    Args:
        notes: Receives a line for each array that is sent by value.
    """

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def reduce(self, array: Any) -> tuple[Any, ...] | None:
        """Return a reduce value that maps the array, or None if it must be sent by value."""
        root = _memmap_behind(array)
        if root is None or array.nbytes < _MIN_BYTES or array.dtype.hasobject:
            return None
        low, high = _bounds(array)
        begin = address_of(root._mmap)
        reason = self._why_by_value(root, low, high, begin)
        if reason:
            self._notes.append(f"an array of {root.filename} is sent by value: {reason}")
            return None
        offset = root.offset - root.offset % mmap.ALLOCATIONGRANULARITY + low - begin
        place = int(array.ctypes.data) - low
        form = (array.dtype, array.shape, array.strides, bool(array.flags.writeable))
        return _map_again, (type(array), str(root.filename), offset, high - low, place, form)

    def _why_by_value(self, root: Any, low: int, high: int, begin: int) -> str:
        if not begin <= low <= high <= begin + len(root._mmap):
            return "it is not inside the mapping"
        try:
            if not _is_still_there(root.filename, self._mapping_at(begin)):
                return "a different file has that name"
        except (OSError, ValueError) as error:
            return f"the file cannot be mapped again ({error})"
        if root.mode == "c" and not is_unwritten(low, high):
            return (
                "its mode is 'c', and it contains (or may contain) writes that are not in the file"
            )
        return ""

    @functools.cached_property
    def _mappings(self) -> list[MemoryMapping]:
        return list_mappings(0, sys.maxsize)  # read once: a dataset may map thousands of files

    def _mapping_at(self, address: int) -> MemoryMapping | None:
        place = bisect_right(self._mappings, address, key=lambda mapping: mapping.start) - 1
        if place < 0 or self._mappings[place].end <= address:
            return None
        return self._mappings[place]


def _map_again(
    kind: Any, filename: str, offset: int, num_bytes: int, place: int, form: tuple[Any, ...]
) -> Any:
    """Rebuild the array over a private mapping. Called by a worker."""
    if os.path.getsize(filename) < offset + num_bytes:
        raise OSError(f"{filename} is now shorter than the array that was mapped from it")
    raw = np.memmap(filename, np.uint8, "c", offset, (num_bytes,))
    dtype, shape, strides, is_writeable = form
    array: Any = np.ndarray.__new__(kind, shape, dtype, raw, place, strides)
    for name in ("_mmap", "filename", "mode", "offset") if kind is np.memmap else ():
        setattr(array, name, getattr(raw, name))
    array.flags.writeable = is_writeable
    return array


def _memmap_behind(array: Any) -> Any:
    """Return the memmap that this array is or views, or None."""
    if type(array) is not np.ndarray and type(array) is not np.memmap:
        return None
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None:
            return array if array.filename is not None else None
        array = array.base
    return None


def _bounds(array: Any) -> tuple[int, int]:
    """Return the address of the first byte and the end address, for any strides."""
    low = high = int(array.ctypes.data)
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (length - 1) * stride)
        high += max(0, (length - 1) * stride)
    return low, high + array.itemsize


def _is_still_there(filename: Any, mapping: MemoryMapping | None) -> bool:
    """Return True if the name still refers to the mapped file, or if that is unknown."""
    found = os.stat(filename)
    if mapping is None:
        return True
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    if mapping.file == (device, str(found.st_ino)):
        return True
    # On overlayfs and btrfs, these numbers differ from stat. Compare with a new mapping instead.
    with open(filename, "rb") as file:
        fresh = mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ)
    place = address_of(fresh)
    return [each.file for each in list_mappings(place, place + 1)] == [mapping.file]
