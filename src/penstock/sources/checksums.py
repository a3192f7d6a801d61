"""Block checksums of packed files: the CRC-32 of each block is verified on first read.

The record of verified blocks is shared by all workers and epochs:

    parent: a memfd with a byte per block  <-- /proc/PID/fd/N --  workers write the same bytes

On Linux workers open the parent's memory under that name. It vanishes with the parent, so nothing
is left behind. On other systems each process keeps its own record.

Tested by ``tests/unit/sources/test_packed.py``.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
import zlib
from typing import Any

import numpy as np

from penstock.errors import Damaged
from penstock.sources.array_files import map_array
from penstock.sources.manifest import FileEntry

BLOCK_BYTES = 1 << 20
"""Bytes per checksum. The first read of a single row checks this many bytes."""
_TOKEN_BYTES = 16


def block_checksums(content: Any) -> np.ndarray:
    """Return the CRC-32 of each block of a file's bytes.

    Example:
        >>> block_checksums(b"123456789").tolist() == [0xCBF43926]
        True
    """
    view = memoryview(content).cast("B")
    starts = range(0, len(view), BLOCK_BYTES)
    return np.array([zlib.crc32(view[at : at + BLOCK_BYTES]) for at in starts], dtype="<u4")


def file_checksum(blocks: np.ndarray) -> int:
    """Return one checksum for all blocks: the CRC-32 of their little-endian checksums."""
    return zlib.crc32(np.ascontiguousarray(blocks, dtype="<u4").tobytes())


def make_damage(folder: str, entry: FileEntry, what: str) -> Damaged:
    """Return the error for bytes that differ from those written."""
    return Damaged(
        f"{entry.name} is damaged: {what}",
        where=folder,
        likely="bytes changed on the disk or during a copy, or files were swapped.",
        remedy="copy the file again from its source, or pack again",
        path=folder,
        file=entry.name,
    )


class CheckedBlocks:
    """One byte per block of a packed set, set to 1 when its checksum was verified.

    Args:
        shared: The ``shared`` attribute of an instance in another process, to use its memory.
    """

    def __init__(self, num_blocks: int, shared: tuple[str, bytes] | None = None) -> None:
        self.blocks = np.zeros(num_blocks, np.uint8)
        self.shared: tuple[str, bytes] | None = None
        if shared is not None and self._attach(*shared):
            return
        try:
            descriptor = os.memfd_create("penstock-checked")
        except (AttributeError, OSError):  # not available on this system, or forbidden
            return
        weakref.finalize(self, os.close, descriptor).atexit = False
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.write(descriptor, token + bytes(num_blocks))
        self._attach(f"/proc/{os.getpid()}/fd/{descriptor}", token)

    def _attach(self, path: str, token: bytes) -> bool:
        """Map the memory at ``path``. Returns False if it is gone or its token differs."""
        num_bytes = _TOKEN_BYTES + len(self.blocks)
        try:
            with open(path, "r+b", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != num_bytes or file.read(len(token)) != token:
                    return False
                mapping = mmap.mmap(file.fileno(), num_bytes)
        except OSError:
            return False
        self.blocks = np.frombuffer(mapping, np.uint8, offset=_TOKEN_BYTES)
        self.shared = path, token
        return True


class BlockChecker:
    """Verifies the checksums of a file's blocks before their first use.

    Does not refer to a :class:`~penstock.sources.packed_folder.PackedFolder`. Without a reference
    cycle, files are unmapped as soon as the packed set is deleted.

    Args:
        content: All bytes of the file.
        checked: The part of :class:`CheckedBlocks` for this file's blocks.
    """

    def __init__(self, folder: str, entry: FileEntry, content: Any, checked: np.ndarray) -> None:
        self._folder = folder
        self._entry = entry
        self._content = content
        self._checked = checked
        self._checksums: np.ndarray | None = None
        self.is_done = False

    def check_rows(self, starts: np.ndarray, num_bytes: int) -> None:
        """Check all blocks that rows of ``num_bytes`` at ``starts`` touch, or raise Damaged."""
        if self._checked.all():
            self.is_done = True
            return
        firsts, lasts = starts // BLOCK_BYTES, (starts + num_bytes - 1) // BLOCK_BYTES
        between = np.arange(int((lasts - firsts).max()) + 1)
        blocks = np.unique(np.minimum(firsts[:, None] + between, lasts[:, None]))
        for block in blocks[self._checked[blocks] == 0].tolist():
            self._check_block(block)

    def check_range(self, start: int, end: int) -> None:
        """Check all blocks of one range of bytes, or raise Damaged."""
        if start == end:
            return
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if not self._checked[block]:
                self._check_block(block)
        self.is_done = len(self._checked) == 1  # such as a file of offsets

    def _check_block(self, block: int) -> None:
        if self._checksums is None:
            self._checksums = self._read_checksums()
        start = block * BLOCK_BYTES
        view = memoryview(self._content)[start : start + BLOCK_BYTES]
        if zlib.crc32(view) != int(self._checksums[block]):
            what = f"bytes {start} to {start + len(view)} differ from those written"
            raise make_damage(self._folder, self._entry, what)
        self._checked[block] = 1

    def _read_checksums(self) -> np.ndarray:
        """Return the checksums of the file's blocks, verified against the manifest."""
        if self._entry.bytes <= BLOCK_BYTES:  # a single block has no file of checksums
            found = block_checksums(self._content)
            what = f"bytes 0 to {len(self._content)} differ from those written"
        else:
            found = map_array(os.path.join(self._folder, self._entry.blocks_name)).array
            what = "its block checksums do not match the manifest"
        if file_checksum(found) != self._entry.check:
            raise make_damage(self._folder, self._entry, what)
        return found
