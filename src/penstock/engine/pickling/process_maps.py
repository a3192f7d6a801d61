"""What lies at an address of this process? Linux tells in /proc; elsewhere nobody does.

list_mappings(start, end)         the mappings that cover a range, with their file, rights and flags
ProcessMaps().at(address)      the same for one address, from a list that is read once
is_unwritten(start, end)  has nobody written to this range of a private mapping of a file?
"""

from __future__ import annotations

import mmap
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) (\S+) (\d+) *(.*)\n")
_ENTRY_BYTES = 8
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


@dataclass(frozen=True, kw_only=True)
class MemoryMapping:
    """One mapping. ``file`` is device and inode, as this list writes them: for comparing only."""

    start: int
    end: int
    rights: str
    offset: int
    file: tuple[str, str]
    name: str
    flags: frozenset[str] = frozenset()

    def offset_of(self, address: int) -> int:
        """Where in its file a byte of this mapping comes from."""
        return self.offset + address - self.start


def list_mappings(start: int, end: int, *, with_flags: bool = False) -> list[MemoryMapping]:
    """The mappings between two addresses, in order; empty where the system does not tell.

    Args:
        with_flags: Also what ``madvise``, ``mlock`` and drivers did to them; slower.
    """
    if sys.platform != "linux":
        return []
    try:
        with open("/proc/self/smaps" if with_flags else "/proc/self/maps") as lines:
            return [area for area in _parse(lines) if area.start < end and area.end > start]
    except OSError:
        return []


def _parse(lines: Any) -> Iterator[MemoryMapping]:
    head, flags = None, frozenset[str]()
    for line in lines:
        match = _HEAD.fullmatch(line)
        if match:
            if head is not None:
                yield _mapping(head, flags)
            head, flags = match, frozenset()
        elif line.startswith("VmFlags:"):
            flags = frozenset(line.split()[1:])
    if head is not None:
        yield _mapping(head, flags)


def _mapping(head: re.Match[str], flags: frozenset[str]) -> MemoryMapping:
    start, end, rights, offset, device, inode, name = head.groups()
    return MemoryMapping(
        start=int(start, 16),
        end=int(end, 16),
        rights=rights,
        offset=int(offset, 16),
        file=(device, inode),
        name=name,
        flags=flags,
    )


class ProcessMaps:
    """All mappings, listed once on first need: for many questions about what does not change."""

    def __init__(self) -> None:
        self._mappings: list[MemoryMapping] | None = None
        self._starts: list[int] = []

    def at(self, address: int) -> MemoryMapping | None:
        """The mapping at an address, if the system tells."""
        if self._mappings is None:
            self._mappings = list_mappings(0, sys.maxsize)
            self._starts = [area.start for area in self._mappings]
        place = bisect_right(self._starts, address) - 1
        if place < 0 or self._mappings[place].end <= address:
            return None
        return self._mappings[place]


def covers(found: list[MemoryMapping], start: int, end: int) -> bool:
    """Do these mappings cover the range without a hole?"""
    for area in found:
        if area.start > start:
            return False
        start = max(start, area.end)
    return start >= end


def is_unwritten(start: int, end: int) -> bool:
    """Is every page here as its file has it? False also when the system does not tell.

    A page of a private mapping that was written to is no longer the file's but this process's own.
    """
    first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(first * _ENTRY_BYTES)
            raw = pages.read((last - first) * _ENTRY_BYTES)
    except OSError:
        return False
    entries = np.frombuffer(raw or b"", dtype=np.uint64)
    if len(entries) != last - first:
        return False
    own = (entries & _PRESENT != 0) & (entries & _OF_A_FILE == 0)
    return not bool((own | (entries & _SWAPPED != 0)).any())


def address_of(buffer: Any) -> int:
    """Where the memory of an object with a buffer begins."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
