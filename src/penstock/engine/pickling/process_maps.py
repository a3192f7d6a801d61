"""Lists the memory mappings of this process (Linux only). The list is empty on other systems.

list_mappings(start, end)  the mappings in a range, with their file, permissions and flags
is_unwritten(start, end)   True if a range of a private mapping still equals its file
own_bytes(start, end)      the memory in a range that belongs to this process, not to a file

Tested by ``tests/integration/engine/pickling/test_shared_arrays.py``.
"""

from __future__ import annotations

import mmap
import re
from typing import Any

import numpy as np

from penstock.named_tuple import NamedTuple

_ENTRY = r"(?m)^([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) (\S+) (\d+) *(.*)\n((?:[A-Z].*\n)*)"
"""One mapping. In smaps, it is followed by lines that start with a capital letter."""
_FLAGS = r"(?m)^VmFlags: (.*)"
_PAGE_ENTRY_BYTES = 8
_MAX_ENTRIES = 1 << 18
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


class MemoryMapping(NamedTuple):
    """One mapping. ``file`` is device and inode as text, only for comparison."""

    start: int
    end: int
    rights: str
    offset: int
    file: tuple[str, str]
    name: str
    flags: frozenset[str] = frozenset()

    def offset_of(self, address: int) -> int:
        """Return the file offset of an address in this mapping."""
        return self.offset + address - self.start


def list_mappings(start: int, end: int, *, with_flags: bool = False) -> list[MemoryMapping]:
    """Return the mappings between two addresses, in order. Empty if they cannot be read.

    Args:
        with_flags: Also read the flags set by ``madvise``, ``mlock`` and drivers. Slower.
    """
    try:
        with open("/proc/self/smaps" if with_flags else "/proc/self/maps") as file:
            text = file.read()
    except OSError:
        return []
    found = []
    for low, high, rights, offset, device, inode, name, details in re.findall(_ENTRY, text):
        first, last = int(low, 16), int(high, 16)
        if first < end and last > start:
            flags = frozenset(" ".join(re.findall(_FLAGS, details)).split())
            file_id = (device, inode)
            found.append(MemoryMapping(first, last, rights, int(offset, 16), file_id, name, flags))
    return found


def covers(mappings: list[MemoryMapping], start: int, end: int) -> bool:
    """Return True if the mappings cover the range without gaps."""
    for mapping in mappings:
        if mapping.start > start:
            return False
        start = max(start, mapping.end)
    return start >= end


def is_unwritten(start: int, end: int) -> bool:
    """Return True if every page in the range still equals its file. False if unknown.

    A write to a page of a private mapping replaces the file's page with a page of this process.
    """
    entries = _page_entries(start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))
    if entries is None:
        return False
    return not bool((_are_own(entries) | (entries & _SWAPPED != 0)).any())


def own_bytes(start: int, end: int) -> int:
    """Return the size of the whole pages in a range that RssAnon counts. 0 if unknown."""
    first, last = -(-start // mmap.PAGESIZE), end // mmap.PAGESIZE
    num_pages = 0
    for begin in range(first, last, _MAX_ENTRIES):
        entries = _page_entries(begin, min(last, begin + _MAX_ENTRIES))
        if entries is None:
            return 0
        num_pages += int(_are_own(entries).sum())
    return num_pages * mmap.PAGESIZE


def _are_own(entries: np.ndarray) -> np.ndarray:
    are_own: np.ndarray = (entries & _PRESENT != 0) & (entries & _OF_A_FILE == 0)
    return are_own


def _page_entries(first: int, last: int) -> np.ndarray | None:
    """Return the entries of a range of pages in the page table, or None if they are unknown."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(first * _PAGE_ENTRY_BYTES)
            raw = pages.read((last - first) * _PAGE_ENTRY_BYTES)
    except OSError:
        return None
    entries = np.frombuffer(raw or b"", dtype=np.uint64)
    return entries if len(entries) == last - first else None


def address_of(buffer: Any) -> int:
    """Return the address of an object's buffer."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
