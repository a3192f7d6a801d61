"""Many files in one stretch of addresses, so that one gather reaches over all of them.

    reserve:  |---------------------------------------------------------|   addresses only
    map:      |[header|row row row]....|[header|row row]....|[header|row]   each file at a place
              whose distance from the first is a multiple of both a page and a row

NumPy then sees the rows of all files as rows of one array. No descriptor stays open, so a set of
many shards does not come near the limit. Linux only: elsewhere files are mapped one by one, and a
gather takes rows in smaller chunks (:mod:`penstock.sources.columns`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

_PROT_NONE, _PROT_READ = 0, 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value


class _Reserve:
    """A stretch of addresses, given back when the last array over it is gone."""

    def __init__(self, libc: Any, num_bytes: int) -> None:
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = libc.mmap(None, num_bytes, _PROT_NONE, flags, -1, 0)
        if self.address == _FAILED:
            raise OSError(ctypes.get_errno(), "no addresses")
        self.libc = libc
        end = weakref.finalize(self, libc.munmap, self.address, num_bytes)
        end.atexit = False

    def map_file(self, path: str, place: int, num_bytes: int) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                raise OSError(f"{path} has changed its size")
            at = self.address + place
            flags = _MAP_SHARED | _MAP_FIXED
            if self.libc.mmap(at, num_bytes, _PROT_READ, flags, descriptor, 0) == _FAILED:
                raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
        finally:
            os.close(descriptor)


class SpanFile:
    """One of the files: its bytes, and advice about them."""

    def __init__(self, reserve: _Reserve, place: int, num_bytes: int) -> None:
        self._reserve = reserve
        self._address = reserve.address + place
        self._num_bytes = num_bytes
        self.content = np.asarray(_Bytes(reserve, self._address, num_bytes))

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        """As ``mmap.madvise``; advice that is not taken is no error."""
        length = self._num_bytes - start if length is None else length
        self._reserve.libc.madvise(self._address + start, length, option)


class _Bytes:
    """What NumPy asks for memory that it shall see as an array; keeps the reserve."""

    def __init__(self, reserve: _Reserve, address: int, num_bytes: int) -> None:
        self.reserve = reserve
        self.__array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, True),
            "version": 3,
        }


def map_together(paths: list[str], row_bytes: int) -> list[SpanFile] | None:
    """Map files so that the same place in each is a whole number of rows apart.

    Returns:
        None where that cannot be done; the files are then to be mapped one by one.
    """
    if sys.platform != "linux" or not row_bytes:
        return None
    sizes = [os.path.getsize(path) for path in paths]
    step = math.lcm(row_bytes, mmap.PAGESIZE)
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // step) * step
    try:
        reserve = _Reserve(_libc(), end)
        for path, place, size in zip(paths, places, sizes, strict=True):
            reserve.map_file(path, place, size)
    except (OSError, AttributeError):  # a limit on addresses, or a C library without these
        return None
    return [SpanFile(reserve, *pair) for pair in zip(places, sizes, strict=True)]


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, whole = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, size, whole, whole, whole, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    libc.madvise.argtypes = (ctypes.c_void_p, size, whole)
    return libc
