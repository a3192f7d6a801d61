"""Files in object storage as numbered blocks of a few MiB.

    file 0: |block 0|block 1|block 2|   file 1: |block 3|   file 2: |block 4|block 5|
    row:           |-----|
    block 0: |unit|unit|unit|unit|tail|

Blocks begin at multiples of ``BLOCK_BYTES`` in their file. Only the last block of a file is
shorter. A block consists of whole checksum units (:mod:`penstock.sources.checksums`), and of a
tail: the first bytes of the next block, so that a row that begins in a block ends in it too.
Objects of other formats (tars, Parquet) have the same blocks without tails.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import BadStore
from penstock.sources.array_files import HEADER_BYTES
from penstock.sources.checksums import BLOCK_BYTES as UNIT_BYTES
from penstock.sources.manifest import MANIFEST, FieldSchema, FileEntry, Manifest
from penstock.sources.remote.object_list import OBJECTS, ObjectList

BLOCK_BYTES = 4 << 20
"""Bytes of a block. Over 20 ms of latency, one request for 4 MiB at a time reaches 80% of 1 Gbit/s,
and a shuffle of 16 blocks needs 64 MiB."""


class BlockRange(NamedTuple):
    """Where a block lies."""

    file: int
    start: int
    end: int


class BlockLayout:
    """The blocks of a set. Made from its list of files, so all processes agree on the numbers.

    Args:
        files: The manifest of a packed set, or a list of objects.
        where: The URL of the set, for messages.
    """

    def __init__(self, files: Manifest | ObjectList, where: str) -> None:
        self.where = where
        self.entries: list[Any] = list(files.entries)
        self.numbers = {entry.name: number for number, entry in enumerate(self.entries)}
        sizes = np.array([entry.bytes for entry in self.entries], np.int64)
        self.first_blocks = np.cumsum([0, *(-(-sizes // BLOCK_BYTES))]).astype(np.int64)
        self.first_units = np.cumsum([0, *(-(-sizes // UNIT_BYTES))]).astype(np.int64)
        self.num_blocks = int(self.first_blocks[-1])
        self.num_units = int(self.first_units[-1])
        self.num_bytes = int(sizes.sum())
        lasts = self.first_blocks[1:] - 1
        self.block_bytes = np.full(self.num_blocks, BLOCK_BYTES, np.int64)
        """Bytes of each block, with its tail."""
        has_any = sizes > 0
        self.block_bytes[lasts[has_any]] = (sizes - (-(-sizes // BLOCK_BYTES) - 1) * BLOCK_BYTES)[
            has_any
        ]
        tails = _tail_sizes(files) if isinstance(files, Manifest) else np.zeros(len(sizes))
        self.file_tails = np.asarray(tails, np.int64)
        owners = np.repeat(np.arange(len(sizes)), np.diff(self.first_blocks))
        ends = (np.arange(self.num_blocks) - self.first_blocks[owners] + 1) * BLOCK_BYTES
        self.tail_bytes = np.clip(sizes[owners] - ends, 0, self.file_tails[owners])
        self.block_bytes += self.tail_bytes

    def range_of(self, block: int) -> BlockRange:
        """Return the file of a block and its range of bytes there, without the tail."""
        file = int(self.first_blocks.searchsorted(block, side="right")) - 1
        start = (block - int(self.first_blocks[file])) * BLOCK_BYTES
        num_bytes = int(self.block_bytes[block] - self.tail_bytes[block])
        return BlockRange(file, start, start + num_bytes)

    def units_of(self, block: int) -> tuple[int, int]:
        """Return the first checksum unit of a block, and the one after its last."""
        found = self.range_of(block)
        first = int(self.first_units[found.file])
        return first + found.start // UNIT_BYTES, first - (-found.end // UNIT_BYTES)

    def describe(self, block: int) -> str:
        """Return the object and the range of a block, for messages."""
        found = self.range_of(block)
        return f"{self.where}/{self.entries[found.file].name}, bytes {found.start} to {found.end}"

    def check_rows(self, entry: FileEntry, row_bytes: int, num_rows: int | None) -> int:
        """Return the number of rows of a file, or raise BadStore if its size is wrong."""
        data_bytes = entry.bytes - HEADER_BYTES
        found, rest = divmod(data_bytes, row_bytes) if row_bytes else (num_rows or 0, data_bytes)
        if data_bytes < 0 or rest or (num_rows is not None and found != num_rows):
            raise BadStore(
                f"{entry.name} has {entry.bytes} bytes; the manifest says "
                f"{num_rows if num_rows is not None else 'whole'} rows of {row_bytes} bytes",
                where=self.where,
                likely="the manifest was edited, or written by another program.",
                remedy="pack again",
                path=self.where,
            )
        return found


def read_layout(folder: str, where: str) -> BlockLayout:
    """Return the layout of the set whose list of files is in a folder of the cache."""
    for name, parse in ((MANIFEST, Manifest.from_json), (OBJECTS, ObjectList.from_json)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return BlockLayout(parse(file.read(), path), where)
    raise FileNotFoundError(os.path.join(folder, MANIFEST))


def item_dtypes(schema: FieldSchema) -> list[tuple[np.dtype, tuple[int, ...], int | None]]:
    """Return dtype, row shape, and extra rows (None: any number) of each file of a field."""
    if not schema.is_ragged:
        return [(schema.stored, schema.shape or (), 0)]
    whole = np.dtype("<i8")
    found: list[tuple[np.dtype, tuple[int, ...], int | None]] = [
        (schema.stored, (), None),
        (whole, (), 1),
    ]
    return [*found, (whole, (schema.ndim,), 0)] if schema.has_shapes else found


def _tail_sizes(manifest: Manifest) -> list[int]:
    """Return the bytes of the tails of each file: a row, or for rows of any size about one.

    Rows whose size divides that of the header never lie across an edge. Rows of more than a
    checksum unit would make tails too large, so those at an edge need both blocks.
    """
    schemas, found = {schema.name: schema for schema in manifest.fields}, []
    for shard in manifest.shards:
        for name, entries in shard.files.items():
            for entry, (dtype, shape, extra) in zip(
                entries, item_dtypes(schemas[name]), strict=True
            ):
                size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
                if extra is None:
                    size = -(-2 * entry.bytes // max(1, shard.rows) // 16) * 16
                elif size and HEADER_BYTES % size == 0:
                    size = 0
                found.append(size if size <= UNIT_BYTES else 0)
    return found


def blocks_between(
    starts: np.ndarray, ends: np.ndarray, tails: np.ndarray | int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of ranges of one file, and which range each block belongs to.

    Args:
        tails: Bytes of the tails of its blocks.

    Example:
        >>> both = blocks_between(np.array([0, 10]), np.array([5, BLOCK_BYTES + 1]))
        >>> [one.tolist() for one in both]
        [[0, 0, 1], [0, 1, 1]]
    """
    firsts = starts // BLOCK_BYTES
    lasts = np.maximum((ends - tails - 1) // BLOCK_BYTES, firsts)
    counts = np.where(ends > starts, lasts - firsts + 1, 0)
    owners = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return firsts[owners] + within, owners


def describe_bytes(num_bytes: float) -> str:
    """Return a size for people.

    Example:
        >>> describe_bytes(4 << 20), describe_bytes(3_500_000_000)
        ('4.19 MB', '3.5 GB')
    """
    unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
    return f"{num_bytes / unit:.3g} {name}"
