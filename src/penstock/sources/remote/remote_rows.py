"""Rows of a file in object storage, read through the cache of blocks.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.sources.array_files import HEADER_BYTES
from penstock.sources.columns import FixedColumn
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_gather import BlockGather
from penstock.sources.remote.block_layout import BLOCK_BYTES, blocks_between


class RemoteRows:
    """The rows of one file of a set. Has the methods of a ``ShardRows`` of a local file."""

    draws_nothing = True

    def __init__(
        self,
        files: BlockFiles,
        number: int,
        num_rows: int,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> None:
        self.files = files
        self.num_rows = num_rows
        self.row_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self.data_start = HEADER_BYTES
        self.first_block, end = files.layout.first_blocks[number : number + 2].tolist()
        self.num_blocks = end - self.first_block
        self.tail_bytes = int(files.layout.file_tails[number])
        self._dtype, self._shape = dtype, shape

    def prefetch(self, rows: np.ndarray) -> None:
        """Ask for the blocks of rows without waiting."""
        starts = HEADER_BYTES + rows * self.row_bytes
        blocks, _ = blocks_between(starts, starts + self.row_bytes, self.tail_bytes)
        self.files.request(self.first_block + np.unique(blocks))

    def advise_random(self) -> None:
        pass

    def check(self, rows: np.ndarray) -> None:
        pass  # blocks are verified when they arrive

    def read(self, first: int, last: int) -> np.ndarray:
        """Return consecutive rows, without a copy if they lie in one block."""
        start, end = HEADER_BYTES + first * self.row_bytes, HEADER_BYTES + last * self.row_bytes
        pieces = list(self._pieces(start, end))
        content = pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, _NOTHING])
        if content.ctypes.data % self._dtype.alignment:
            content = content.copy()
        return content.view(self._dtype).reshape(last - first, *self._shape)

    def _pieces(self, start: int, end: int) -> Iterator[np.ndarray]:
        while start < end:
            number, inner = divmod(start, BLOCK_BYTES)
            content = self.files.block(self.first_block + number)[inner:]
            if len(content) < end - start:  # the tail is in the next block too
                content = content[: BLOCK_BYTES - inner]
            content = content[: end - start]
            yield content
            start += len(content)

    def copy_rows(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Copy rows to places in ``out``, block by block. Used without a :class:`BlockGather`."""
        starts, size = HEADER_BYTES + rows * self.row_bytes, self.row_bytes
        blocks = starts // BLOCK_BYTES
        for block in np.unique(blocks).tolist():
            mine = np.flatnonzero(blocks == block)
            content = self.files.block(self.first_block + block)
            inner = starts[mine] - block * BLOCK_BYTES
            if inner.max() + size <= len(content):
                out[places[mine]] = np.lib.stride_tricks.sliding_window_view(content, size)[inner]
                continue
            for place, row in zip(places[mine].tolist(), rows[mine].tolist(), strict=True):
                out[place] = self.read(row, row + 1).reshape(-1).view(np.uint8)

    def make_gather(self, shards: Sequence[Any], first_rows: np.ndarray) -> BlockGather | None:
        """Return a gather over the rows of all files of a field. None if that is not possible."""
        if any(shard.files is not self.files for shard in shards) or not self.row_bytes:
            return None
        try:
            return BlockGather(
                self.files,
                np.array([shard.first_block for shard in shards]),
                np.array([shard.num_blocks for shard in shards]),
                first_rows,
                self.row_bytes,
                self.tail_bytes,
            )
        except OSError:
            return None


def blocks_of_rows(column: Any, rows: np.ndarray) -> Iterator[tuple[BlockFiles, np.ndarray, Any]]:
    """Yield (files, which row, block) for each block that rows of a column need."""
    first_rows = np.asarray(column.first_rows)
    numbers = first_rows.searchsorted(rows, side="right") - 1
    inner = rows - first_rows[numbers]
    if isinstance(column, FixedColumn):
        shards: list[Any] = column.shards
        yield from _fixed_blocks(shards, numbers, inner, inner + 1)
        return
    parts: list[list[Any]] = [list(some) for some in zip(*column.shards, strict=True)]
    data, offsets, shapes = parts
    yield from _fixed_blocks(offsets, numbers, inner, inner + 2)
    if shapes[0] is not None:
        yield from _fixed_blocks(shapes, numbers, inner, inner + 1)
    starts, ends = np.empty_like(inner), np.empty_like(inner)
    for number in np.unique(numbers).tolist():
        mine = numbers == number
        low, high = int(inner[mine].min()), int(inner[mine].max())
        found = offsets[number].read(low, high + 2)
        starts[mine], ends[mine] = found[inner[mine] - low], found[inner[mine] - low + 1]
    yield from _fixed_blocks(data, numbers, starts, ends)


def _fixed_blocks(
    shards: list[RemoteRows], numbers: np.ndarray, firsts: np.ndarray, lasts: np.ndarray
) -> Iterator[tuple[BlockFiles, np.ndarray, Any]]:
    if not shards or not shards[0].row_bytes:
        return
    row_bytes = max(shard.row_bytes for shard in shards)
    sets = {id(shard.files): shard.files for shard in shards}
    first_blocks = np.array([shard.first_block for shard in shards], np.int64)
    header, tails = shards[0].data_start, np.array([shard.tail_bytes for shard in shards])[numbers]
    blocks, owners = blocks_between(header + firsts * row_bytes, header + lasts * row_bytes, tails)
    blocks = blocks + first_blocks[numbers[owners]]
    if len(sets) == 1:
        yield shards[0].files, owners, blocks
        return
    of_set = np.array([list(sets).index(id(shard.files)) for shard in shards])
    for place, files in enumerate(sets.values()):
        mine = of_set[numbers[owners]] == place
        yield files, owners[mine], blocks[mine]


_NOTHING = np.empty(0, np.uint8)
assert BLOCK_BYTES % 16 == 0, "an item must not lie in two blocks"
