"""Lists the memory mappings of this process (Linux only). The list is empty on other systems.

list_mappings(start, end)  the mappings in a range, with their file, permissions and flags
is_unwritten(start, end)   True if a range of a private mapping still equals its file

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
    first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(first * _PAGE_ENTRY_BYTES)
            raw = pages.read((last - first) * _PAGE_ENTRY_BYTES)
    except OSError:
        return False
    entries = np.frombuffer(raw or b"", dtype=np.uint64)
    if len(entries) != last - first:
        return False
    own = (entries & _PRESENT != 0) & (entries & _OF_A_FILE == 0)
    return not bool((own | (entries & _SWAPPED != 0)).any())


def address_of(buffer: Any) -> int:
    """Return the address of an object's buffer."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
