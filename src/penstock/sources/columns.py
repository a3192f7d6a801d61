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
from collections.abc import Sequence
from typing import Any, Protocol

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
        self.array, self.data_start, self._file = mapped
        self.checker = checker
        self.row_bytes = self.array.nbytes // len(self.array) if len(self.array) else 0
        self.num_rows = len(self.array)
        flat = self.array.reshape(-1).view(np.uint8) if self.array.size else np.empty(0, np.uint8)
        self.rows = flat.reshape(len(self.array), self.row_bytes)

    def check(self, rows: np.ndarray) -> None:
        """Verify the checksums of the blocks of ``rows``, or raise Damaged."""
        if self.checker is not None and len(rows) and not self.checker.is_done:
            self.checker.check_rows(self.data_start + rows * self.row_bytes, self.row_bytes)

    def read(self, first: int, last: int) -> np.ndarray:
        """Return consecutive rows without a copy. Their blocks are verified."""
        checker = self.checker
        if checker is not None and not checker.is_done:
            start = self.data_start + first * self.row_bytes
            checker.check_range(start, start + (last - first) * self.row_bytes)
        return self.array[first:last]

    def copy_rows(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Copy rows to places in ``out``, one by one."""
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            out[place] = self.rows[row]

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
            start = self.data_start + row * size
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
        owner: Kept alive with the rows.
    """

    def __init__(self, address: int, shape: tuple[int, int], owner: Any) -> None:
        # Not read-only, because torch warns about read-only memory. It is never written.
        self.rows = array_at(address, shape, owner)
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


class StoredRows(Protocol):
    """Rows of one file that is not mapped whole, such as one in object storage."""

    num_rows: int
    row_bytes: int
    data_start: int

    def prefetch(self, rows: np.ndarray) -> None: ...

    def check(self, rows: np.ndarray) -> None: ...

    def advise_random(self) -> None: ...

    def read(self, first: int, last: int) -> np.ndarray: ...

    def copy_rows(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None: ...


AnyRows = ShardRows | StoredRows


class FixedColumn:
    """Rows of equal size in one or more shards."""

    draws_nothing = True

    def __init__(self, shards: Sequence[AnyRows]) -> None:
        self.shards = list(shards)
        self.first_rows = np.cumsum([0, *(shard.num_rows for shard in shards)])
        self.length = int(self.first_rows[-1])
        self.row_bytes = max((shard.row_bytes for shard in shards), default=0)
        mapped = [shard for shard in self.shards if isinstance(shard, ShardRows)]
        self._is_prefetched, self._is_checked = len(mapped) < len(self.shards), False
        self._table: RowTable | None = None
        self._gather: Any = None
        if self.length and self.row_bytes and not self._is_prefetched:
            self._lay_grid(mapped)
        elif self.length and not mapped:
            stored: Any = self.shards[0]
            self._gather = stored.make_gather(self.shards, self.first_rows)

    def _lay_grid(self, shards: list[ShardRows]) -> None:
        full = [shard.rows for shard in shards if len(shard.array)]
        low = min(rows.ctypes.data for rows in full)
        high = max(rows.ctypes.data + rows.nbytes for rows in full)
        chunk = math.gcd(self.row_bytes, *(rows.ctypes.data - low for rows in full))
        self._num_chunks = self.row_bytes // chunk
        if chunk < _MIN_CHUNK and self._num_chunks > _MAX_CHUNKS:
            return
        origins = [(shard.rows.ctypes.data - low) // chunk for shard in shards]
        self._shifts = np.array(origins, np.int64) - self.first_rows[:-1] * self._num_chunks
        self._chunk = chunk
        arrays = [shard.array for shard in shards]
        self._table = RowTable(low, ((high - low) // chunk, chunk), arrays)

    @property
    def mean_bytes(self) -> float:
        """Bytes of a row."""
        return float(self.row_bytes)

    def block_starts(self, block_bytes: int) -> np.ndarray:
        """Return the first row that begins in each block of the files."""
        found = [np.zeros(1, np.int64)]
        for shard, first in zip(self.shards, self.first_rows.tolist(), strict=False):
            end = shard.data_start + shard.num_rows * shard.row_bytes
            edges = np.arange(0, end, block_bytes) - shard.data_start
            rows = -(-np.maximum(edges, 0) // max(1, shard.row_bytes))
            found.append(first + np.minimum(rows, shard.num_rows))
        return np.unique(np.concatenate([*found, [self.length]]))

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows (all in range) into ``out``, an array of bytes with one row each.

        Raises:
            Damaged: Bytes that were read for the first time differ from those written.
        """
        if not self.row_bytes:
            return
        if self._gather is not None:
            self._gather.take(rows, out)
            return
        if len(self.shards) == 1 and self._table is not None:
            self._prepare([(self.shards[0], rows)])
            self._table.gather(rows, out)
            return
        numbers = self.first_rows.searchsorted(rows, side="right") - 1
        if self._is_prefetched or not self._is_checked:
            self._prepare(
                [
                    (self.shards[number], rows[numbers == number] - self.first_rows[number])
                    for number in np.unique(numbers).tolist()
                ]
            )
            checkers = [getattr(shard, "checker", None) for shard in self.shards]
            self._is_checked = all(one is None or one.is_done for one in checkers)
        if self._table is None:
            for number in np.unique(numbers).tolist():
                places = np.flatnonzero(numbers == number)
                inner = rows[places] - self.first_rows[number]
                self.shards[number].copy_rows(inner, places, out)
        elif self._num_chunks == 1:
            self._table.gather(rows + self._shifts[numbers], out)
        else:
            first = rows * self._num_chunks + self._shifts[numbers]
            chunks = (first[:, None] + np.arange(self._num_chunks)).ravel()
            self._table.gather(chunks, out.reshape(-1, self._chunk))

    def read_ahead(self) -> None:
        """Prefetch all rows of a batch together, and disable the kernel's read-ahead."""
        self._is_prefetched = self._is_prefetched or hasattr(mmap, "MADV_RANDOM")
        for shard in self.shards if self._is_prefetched else ():
            shard.advise_random()

    def _prepare(self, parts: list[tuple[AnyRows, np.ndarray]]) -> None:
        """Request the rows of all shards, then verify them."""
        if self._is_prefetched:
            for shard, rows in parts:
                shard.prefetch(rows)
        for shard, rows in parts:
            shard.check(rows)

    def row(self, index: int) -> np.ndarray:
        """Return a copy of one row."""
        return np.array(self.view(index))

    def view(self, index: int) -> np.ndarray:
        """Return one row without a copy."""
        number = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        row = index - int(self.first_rows[number])
        return np.asarray(self.shards[number].read(row, row + 1)[0])


class RaggedColumn:
    """Items of all samples, located by offsets: (data, offsets, shapes or None) per shard."""

    draws_nothing = True

    def __init__(self, shards: Sequence[tuple[AnyRows, AnyRows, AnyRows | None]]) -> None:
        self.shards = list(shards)
        lengths = (offsets.num_rows - 1 for _, offsets, _ in shards)
        self.first_rows: list[int] = np.cumsum([0, *lengths]).tolist()
        self.length = self.first_rows[-1]

    @property
    def mean_bytes(self) -> float:
        """Mean number of bytes of a sample's items."""
        num_bytes = sum(data.num_rows * data.row_bytes for data, _, _ in self.shards)
        return float(num_bytes / max(1, self.length))

    def block_starts(self, block_bytes: int) -> np.ndarray:
        """Return the first sample that begins in each block of the files. Reads all offsets."""
        found = [np.zeros(1, np.int64)]
        for _, offsets, _ in self.shards:
            if not isinstance(offsets, ShardRows):
                offsets.prefetch(np.arange(0, offsets.num_rows, 1 << 12))
        for (data, offsets, _), first in zip(self.shards, self.first_rows, strict=False):
            starts = data.data_start + offsets.read(0, offsets.num_rows)[:-1] * data.row_bytes
            edges = np.arange(0, data.data_start + data.num_rows * data.row_bytes, block_bytes)
            found.append(first + starts.searchsorted(edges))
        return np.unique(np.concatenate([*found, [self.length]]))

    def row(self, index: int) -> np.ndarray:
        """Return a copy of one sample's items, in its shape."""
        return np.array(self.view(index))

    def view(self, index: int) -> np.ndarray:
        """Return one sample's items without a copy."""
        number = bisect.bisect_right(self.first_rows, index) - 1
        data, offsets, shapes = self.shards[number]
        row = index - self.first_rows[number]
        start, end = offsets.read(row, row + 2).tolist()
        if not 0 <= start <= end <= data.num_rows:
            raise Damaged(
                f"sample {index} spans items {start} to {end} of {data.num_rows}",
                likely="the offsets were written by another program.",
            )
        items = data.read(start, end)
        if shapes is None:
            return items
        shape = shapes.read(row, row + 1)[0].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != len(items):
            raise Damaged(f"sample {index} has {len(items)} items, but shape {shape}")
        shaped: np.ndarray = items.reshape(shape)
        return shaped


Column = FixedColumn | RaggedColumn
