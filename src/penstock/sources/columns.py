"""How do rows of one field come out of many mapped files in one gather?

A batch is one ``np.take`` from the map into its place in the slot, with the GIL released. Shards
are separate files, and NumPy gathers from one array only. Where the files could be mapped at
distances of whole rows (:mod:`penstock.sources.mapped_span`), one array has the rows of all.
Elsewhere mappings begin on pages and their data at the same place behind that, so all lie on a
finer grid:

    address  ....[shard 1: row row row]......[shard 0: row row row]....
    grid     |--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|     chunk = gcd(row, page)

One array spans the grid; only chunks of rows are ever touched. With 12 KB rows, 3 chunks each, a
gather took 450 microseconds, from a single array 420, row by row 640 (256 rows, x86-64).
"""

from __future__ import annotations

import bisect
import math
import mmap
from typing import Any, Protocol

import numpy as np

from penstock.errors import Damaged
from penstock.sources.manifest import FieldSchema
from penstock.sources.row_gather import Table

_MIN_CHUNK = 256
"""Rows of many smaller chunks than this are copied one by one instead."""
_MAX_CHUNKS = 4


class Guard(Protocol):
    """Checks bytes of a file when they are first read."""

    is_done: bool

    def check(self, starts: np.ndarray, ends: np.ndarray) -> None: ...

    def check_range(self, start: int, end: int) -> None: ...


class Part:
    """One mapped array of a field: the rows of one shard."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        mapping: Any = None,
        offset: int = 0,
        guard: Guard | None = None,
    ) -> None:
        self.array = array
        self.mapping = mapping
        self.offset = offset
        self.guard = guard
        self.row_bytes = array.nbytes // len(array) if len(array) else 0
        flat = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
        self.rows = flat.reshape(len(array), self.row_bytes)

    def check(self, rows: np.ndarray) -> None:
        """Look at the bytes of rows that nobody has looked at. Raises: Damaged."""
        if self.guard is not None and len(rows) and not self.guard.is_done:
            starts = self.offset + rows * self.row_bytes
            self.guard.check(starts, starts + self.row_bytes)

    def check_rows(self, first: int, last: int) -> None:
        """The same for some rows side by side, up to ``last``: for one sample."""
        if self.guard is not None and not self.guard.is_done:
            start = self.offset + first * self.row_bytes
            self.guard.check_range(start, start + (last - first) * self.row_bytes)

    def advise(self, rows: np.ndarray) -> None:
        """Ask the system to read these rows from the disk now, all at once."""
        if self.mapping is None or not hasattr(mmap, "MADV_WILLNEED"):
            return
        page, size = mmap.PAGESIZE, self.row_bytes
        for row in np.sort(rows).tolist():
            start = self.offset + row * size
            first = start - start % page
            self.mapping.madvise(mmap.MADV_WILLNEED, first, start + size - first)


class ItemPart(Part):
    """The items of a ragged field: a range of them at a time."""

    def check_items(self, start: int, end: int) -> None:
        if self.guard is not None and not self.guard.is_done:
            size = self.array.itemsize
            self.guard.check_range(self.offset + start * size, self.offset + end * size)


class FixedColumn:
    """Rows of equal size in one or more parts."""

    draws_nothing = True

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        lengths = [len(part.array) for part in parts]
        self.first_rows = np.cumsum([0, *lengths])
        self.length = int(self.first_rows[-1])
        self.row_bytes = max((part.row_bytes for part in parts), default=0)
        self.is_advised = self._is_checked = False
        self._table: Table | None = None
        full = [part for part in parts if len(part.array)]
        if full and self.row_bytes:
            self._lay_grid(parts, full)

    def _lay_grid(self, parts: list[Part], full: list[Part]) -> None:
        addresses = {id(part): part.rows.ctypes.data for part in full}
        low = min(addresses.values())
        high = max(addresses[id(part)] + part.rows.nbytes for part in full)
        chunk = math.gcd(self.row_bytes, *(place - low for place in addresses.values()))
        self._num_chunks = self.row_bytes // chunk
        if chunk < _MIN_CHUNK and self._num_chunks > _MAX_CHUNKS:
            return
        self._origins = np.array(
            [(addresses.get(id(part), low) - low) // chunk for part in parts], np.int64
        )
        self._shifts = self._origins - self.first_rows[:-1]
        self._steps = np.arange(self._num_chunks)
        self._chunk = chunk
        arrays = [part.array for part in parts]
        self._table = Table(low, ((high - low) // chunk, chunk), arrays)

    def take(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy rows (all in range) into ``out``, an array of bytes with a row for each.

        Raises:
            Damaged: Bytes that were read for the first time are not those written.
        """
        if not self.row_bytes:
            return
        if len(self.parts) == 1 and self._table is not None:
            self._prepare(self.parts[0], rows)
            self._table.gather(rows, out)
            return
        shards = self.first_rows.searchsorted(rows, side="right") - 1
        if self._table is not None and self._num_chunks == 1 and self._is_checked:
            self._table.gather(rows + self._shifts[shards], out)
            return
        inner = rows - self.first_rows[shards]
        if self.is_advised or not self._is_checked:
            for shard in np.unique(shards).tolist():
                self._prepare(self.parts[shard], inner[shards == shard])
            guards = [part.guard for part in self.parts if part.guard is not None]
            self._is_checked = all(guard.is_done for guard in guards) and not self.is_advised
        if self._table is None:
            for place, (shard, row) in enumerate(zip(shards.tolist(), inner.tolist(), strict=True)):
                out[place] = self.parts[shard].rows[row]
            return
        chunks = self._origins[shards] + inner * self._num_chunks
        if self._num_chunks > 1:
            chunks = (chunks[:, None] + self._steps).ravel()
        self._table.gather(chunks, out.reshape(-1, self._chunk))

    def read_ahead(self) -> None:
        """From now on: ask for all rows of a batch at once, and for nothing around them."""
        self.is_advised = hasattr(mmap, "MADV_RANDOM")
        for part in self.parts if self.is_advised else ():
            if part.mapping is not None:
                part.mapping.madvise(mmap.MADV_RANDOM)

    def _prepare(self, part: Part, rows: np.ndarray) -> None:
        if self.is_advised:
            part.advise(rows)
        part.check(rows)

    def row(self, index: int) -> np.ndarray:
        """A copy of one row."""
        part, row = self._find(index)
        part.check_rows(row, row + 1)
        return np.array(part.array[row])

    def _find(self, index: int) -> tuple[Part, int]:
        shard = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        return self.parts[shard], index - int(self.first_rows[shard])


class RaggedColumn:
    """Items of all samples, found by offsets: (data, offsets, shapes or None) for each shard."""

    draws_nothing = True

    def __init__(self, parts: list[tuple[ItemPart, Part, Part | None]]) -> None:
        self.parts = parts
        self.first_rows = np.cumsum([0, *(len(offsets.array) - 1 for _, offsets, _ in parts)])
        self._firsts: list[int] = self.first_rows.tolist()
        self.length = self._firsts[-1]

    def row(self, index: int) -> np.ndarray:
        """A copy of one sample's items, in its shape."""
        return np.array(self.view(index))

    def view(self, index: int) -> np.ndarray:
        """One sample's items, as they lie in the map."""
        shard = bisect.bisect_right(self._firsts, index) - 1
        data, offsets, shapes = self.parts[shard]
        row = index - self._firsts[shard]
        offsets.check_rows(row, row + 2)
        start, end = offsets.array[row : row + 2].tolist()
        if not 0 <= start <= end <= len(data.array):
            raise Damaged(
                f"sample {index} lies at {start} to {end} of {len(data.array)} items",
                likely="the offsets were made by something else than Penstock.",
            )
        if end > start:
            data.check_items(start, end)
        items = data.array[start:end]
        if shapes is None:
            return items
        shapes.check_rows(row, row + 1)
        shape = shapes.array[row].tolist()
        if min(shape, default=0) < 0 or math.prod(shape) != len(items):
            raise Damaged(f"sample {index} has {len(items)} items, and shape {shape}")
        shaped: np.ndarray = items.reshape(shape)
        return shaped


Column = FixedColumn | RaggedColumn


def value_of(schema: FieldSchema, row: np.ndarray) -> Any:
    """What a sample has in this field, as it was packed."""
    kind = schema.kind
    if kind == "text":
        return row.tobytes().decode("utf-8")
    if kind == "bytes" or schema.encoding == "file":
        return row.tobytes()
    if kind == "int":
        return int(row)
    if kind == "float":
        return float(row)
    if kind == "bool":
        return bool(row)
    if kind == "scalar" and schema.dtype != "bfloat16":
        return row[()]
    if kind == "array":
        return row
    return _tensor_of(row, is_bfloat=schema.dtype == "bfloat16")


def _tensor_of(row: np.ndarray, *, is_bfloat: bool) -> Any:
    import torch

    if is_bfloat:
        return torch.from_numpy(row.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(row)
