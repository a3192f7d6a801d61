"""Gathers rows of one field from many mapped files in one call.

A batch is one ``np.take`` from the memory map into the slot, with the GIL released. Shards are
separate files, but NumPy gathers from one array only. If the distances between the mapped files are
multiples of the row size (:mod:`penstock.sources.array_files`), one array contains the rows of all
of them. Otherwise each mapping begins on a page, and its data begins at the same offset within the
page. All rows are then aligned to a finer grid:

    address  ....[shard 1: row row row]......[shard 0: row row row]....
    grid     |--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|     chunk = gcd(row, page)

One array spans the grid, and only chunks that belong to rows are ever read. For 256 rows of 12 KB
in 3 chunks each, a gather took 450 microseconds on x86-64. From a single array it took 420, and row
by row 640.

Called in any process that loads samples, by the datasets of :mod:`penstock.sources.packed`.

Tested by ``tests/unit/sources/test_packed.py``.
"""

from __future__ import annotations

import bisect
import math
import mmap
import sys
import time
from typing import Any

import numpy as np

from penstock.errors import Damaged
from penstock.sources.array_files import MappedArray, array_at
from penstock.sources.checksums import BlockChecker

_MIN_CHUNK = 256
"""With smaller chunks than this, and more than ``_MAX_CHUNKS``, rows are copied one by one."""
_MAX_CHUNKS = 4
TRY_OTHER_EVERY = 64
"""Gathers between two timings of both methods. Less frequent while threads are much slower."""
_MAX_WAIT = 4096
_MIN_THREAD_BYTES = 1 << 20
"""A smaller gather finishes before a second thread has woken up."""


class ShardRows:
    """The rows of one array file of a field, verified on first read."""

    def __init__(self, mapped: MappedArray, checker: BlockChecker | None = None) -> None:
        self.array, self._offset, self._file = mapped
        self.checker = checker
        self.row_bytes = self.array.nbytes // len(self.array) if len(self.array) else 0
        flat = self.array.reshape(-1).view(np.uint8) if self.array.size else np.empty(0, np.uint8)
        self.rows = flat.reshape(len(self.array), self.row_bytes)

    def check(self, rows: np.ndarray) -> None:
        """Verify the checksums of the blocks of ``rows``, or raise Damaged."""
        if self.checker is not None and len(rows) and not self.checker.is_done:
            self.checker.check_rows(self._offset + rows * self.row_bytes, self.row_bytes)

    def check_range(self, first: int, last: int) -> None:
        """Verify the blocks of consecutive rows up to ``last``, for one sample."""
        if self.checker is not None and not self.checker.is_done:
            start = self._offset + first * self.row_bytes
            self.checker.check_range(start, start + (last - first) * self.row_bytes)

    def advise_random(self) -> None:
        """Disable the kernel's read-ahead."""
        if self._file is not None:
            self._file.madvise(mmap.MADV_RANDOM)

    def prefetch(self, rows: np.ndarray) -> None:
        """Ask the kernel to read all these rows from the disk now."""
        if self._file is None:
            return
        page, size = mmap.PAGESIZE, self.row_bytes
        for row in np.sort(rows).tolist():
            start = self._offset + row * size
            first = start - start % page
            self._file.madvise(mmap.MADV_WILLNEED, first, start + size - first)


class RowTable:
    """Rows of equal size at fixed distances in memory.

    NumPy copies the rows in this thread, or torch copies them in its threads. On an idle machine
    threads nearly halve the time. On a busy machine they wait for each other and take many times as
    long. So both methods are timed periodically.

    Args:
        address: Address of the first row.
        shape: Number of rows, and bytes per row.
        arrays: Arrays to keep alive.
    """

    def __init__(self, address: int, shape: tuple[int, int], arrays: list[np.ndarray]) -> None:
        # Not read-only, because torch warns about read-only memory. It is never written.
        self.rows = array_at(address, shape, arrays)
        self._is_wide = shape[1] % 8 == 0 and address % 8 == 0
        self._tensor: Any = None
        self._times_s = [0.0, 0.0]
        self._num_gathers = 0
        self._next_trial = TRY_OTHER_EVERY

    def gather(self, chosen: np.ndarray, out: np.ndarray) -> None:
        """Copy rows (all in range) into ``out``, in order."""
        if out.nbytes < _MIN_THREAD_BYTES or not self._has_threads():
            np.take(self.rows, chosen, axis=0, out=out, mode="clip")
            return
        use_torch = self._times_s[1] < self._times_s[0]
        if self._num_gathers < 2:  # time both methods, one after the other
            use_torch = self._num_gathers == 1
        self._num_gathers += 1
        if self._num_gathers >= self._next_trial:
            self._num_gathers = 0
            is_far = self._times_s[1] > 2 * self._times_s[0]
            self._next_trial = min(2 * self._next_trial, _MAX_WAIT) if is_far else TRY_OTHER_EVERY
        start_s = time.perf_counter()
        if use_torch:
            self._gather_by_torch(chosen, out)
        else:
            np.take(self.rows, chosen, axis=0, out=out, mode="clip")
        self._times_s[use_torch] = time.perf_counter() - start_s

    def _has_threads(self) -> bool:
        torch = sys.modules.get("torch")
        return self._is_wide and torch is not None and torch.get_num_threads() > 1

    def _gather_by_torch(self, chosen: np.ndarray, out: np.ndarray) -> None:
        import torch

        if self._tensor is None:
            self._tensor = torch.from_numpy(self.rows.view(np.int64))
        target = torch.from_numpy(out.view(np.int64))
        torch.index_select(self._tensor, 0, torch.from_numpy(chosen), out=target)


class FixedColumn:
    """Rows of equal size in one or more shards."""

    draws_nothing = True

    def __init__(self, shards: list[ShardRows]) -> None:
        self.shards = shards
        self.first_rows = np.cumsum([0, *(len(shard.array) for shard in shards)])
        self.length = int(self.first_rows[-1])
        self.row_bytes = max((shard.row_bytes for shard in shards), default=0)
        self._is_prefetched = self._is_checked = False
        self._table: RowTable | None = None
        if self.length and self.row_bytes:
            self._lay_grid()

    def _lay_grid(self) -> None:
        full = [shard.rows for shard in self.shards if len(shard.array)]
        low = min(rows.ctypes.data for rows in full)
        high = max(rows.ctypes.data + rows.nbytes for rows in full)
        chunk = math.gcd(self.row_bytes, *(rows.ctypes.data - low for rows in full))
        self._num_chunks = self.row_bytes // chunk
        if chunk < _MIN_CHUNK and self._num_chunks > _MAX_CHUNKS:
            return
        origins = [(shard.rows.ctypes.data - low) // chunk for shard in self.shards]
        self._shifts = np.array(origins, np.int64) - self.first_rows[:-1] * self._num_chunks
        self._chunk = chunk
        arrays = [shard.array for shard in self.shards]
        self._table = RowTable(low, ((high - low) // chunk, chunk), arrays)

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows (all in range) into ``out``, an array of bytes with one row each.

        Raises:
            Damaged: Bytes that were read for the first time differ from those written.
        """
        if not self.row_bytes:
            return
        if len(self.shards) == 1 and self._table is not None:
            self._prepare(self.shards[0], rows)
            self._table.gather(rows, out)
            return
        numbers = self.first_rows.searchsorted(rows, side="right") - 1
        if self._is_prefetched or not self._is_checked:
            for number in np.unique(numbers).tolist():
                inner = rows[numbers == number] - self.first_rows[number]
                self._prepare(self.shards[number], inner)
            checkers = [shard.checker for shard in self.shards]
            self._is_checked = all(one is None or one.is_done for one in checkers)
        if self._table is None:
            inner = rows - self.first_rows[numbers]
            pairs = zip(numbers.tolist(), inner.tolist(), strict=True)
            for place, (number, row) in enumerate(pairs):
                out[place] = self.shards[number].rows[row]
        elif self._num_chunks == 1:
            self._table.gather(rows + self._shifts[numbers], out)
        else:
            first = rows * self._num_chunks + self._shifts[numbers]
            chunks = (first[:, None] + np.arange(self._num_chunks)).ravel()
            self._table.gather(chunks, out.reshape(-1, self._chunk))

    def read_ahead(self) -> None:
        """Prefetch all rows of a batch together, and disable the kernel's read-ahead."""
        self._is_prefetched = hasattr(mmap, "MADV_RANDOM")
        for shard in self.shards if self._is_prefetched else ():
            shard.advise_random()

    def _prepare(self, shard: ShardRows, rows: np.ndarray) -> None:
        if self._is_prefetched:
            shard.prefetch(rows)
        shard.check(rows)

    def row(self, index: int) -> np.ndarray:
        """Return a copy of one row."""
        return np.array(self.view(index))

    def view(self, index: int) -> np.ndarray:
        """Return one row without a copy."""
        number = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        shard, row = self.shards[number], index - int(self.first_rows[number])
        shard.check_range(row, row + 1)
        return np.asarray(shard.array[row])


class RaggedColumn:
    """Items of all samples, located by offsets: (data, offsets, shapes or None) per shard."""

    draws_nothing = True

    def __init__(self, shards: list[tuple[ShardRows, ShardRows, ShardRows | None]]) -> None:
        self.shards = shards
        lengths = (len(offsets.array) - 1 for _, offsets, _ in shards)
        self._first_rows: list[int] = np.cumsum([0, *lengths]).tolist()
        self.length = self._first_rows[-1]

    def row(self, index: int) -> np.ndarray:
        """Return a copy of one sample's items, in its shape."""
        return np.array(self.view(index))

    def view(self, index: int) -> np.ndarray:
        """Return one sample's items without a copy."""
        number = bisect.bisect_right(self._first_rows, index) - 1
        data, offsets, shapes = self.shards[number]
        row = index - self._first_rows[number]
        offsets.check_range(row, row + 2)
        start, end = offsets.array[row : row + 2].tolist()
        if not 0 <= start <= end <= len(data.array):
            raise Damaged(
                f"sample {index} spans items {start} to {end} of {len(data.array)}",
                likely="the offsets were written by another program.",
            )
        data.check_range(start, end)
        items = data.array[start:end]
        if shapes is None:
            return items
        shapes.check_range(row, row + 1)
        shape = shapes.array[row].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != len(items):
            raise Damaged(f"sample {index} has {len(items)} items, but shape {shape}")
        shaped: np.ndarray = items.reshape(shape)
        return shaped


Column = FixedColumn | RaggedColumn
