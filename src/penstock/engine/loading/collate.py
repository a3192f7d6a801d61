"""Collates samples directly into the rows of a slot.

    BatchWriter.take(samples), finish()   -> layout, number of rows, strings and bytes

The parent views the slot as the batch that ``default_collate`` would have returned
(``view_batch`` in :mod:`penstock.engine.memory.batch_layout`).

Large samples are copied to their row as they arrive, while they are in the CPU cache. Small samples
are collected and stacked into the slot in one call. Data that a dataset wrote to its row itself
(:mod:`penstock.engine.loading.in_place`) is not copied. If the layout cannot hold a batch, torch's
own ``default_collate`` is used.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.engine.memory.batch_layout import (
    Layout,
    LayoutError,
    LeafSpec,
    compile_flatten,
    field_view,
    plain_tensor,
    read_layout,
    read_leaf,
    restore,
    split_columns,
)

STREAM_BYTES = 4096
"""Samples of at least this size are copied row by row as they arrive. The value is an estimate.
Small samples are cheaper in one ``torch.stack``. Large ones are copied from the CPU cache, and
their memory is reused: 64 arrays of 150 KB, collected and then stacked, took 3 times the CPU time
(Arm Neoverse N1), because glibc returns so much memory to the system and requests it again."""

_ROWS_AT_ONCE = 32
"""Tensors over this many rows are made together. Made one by one, each takes 20 microseconds more
(Arm Neoverse N1), because the work on an image has removed torch's code from the CPU cache."""

_DTYPE_AND_DEVICE = operator.attrgetter("dtype", "is_cpu")

CopyRow = Callable[[int, Any], "list[Any] | None"]
"""Copies the tensors and arrays of a sample to a row. Returns the sample's leaves, with None for
those that it copied. Returns None if the sample is a single tensor or array."""


class TooSmall(Exception):
    """The slot is too small for the batch."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class SampleRows(list["np.ndarray | None"]):
    """The memory of one sample: an array per leaf, and in ``tensors`` a tensor over each array."""

    tensors: list[torch.Tensor | None]


class _GivenRow:
    """The row that was returned last, and its tensors. A tensor that comes back is in place."""

    row = -1
    tensors: list[torch.Tensor | None]


class BatchWriter:
    """Writes the samples of one part to its rows of a slot.

    Used in a worker, one per part. The parent reads the batch with ``view_batch``.

    Args:
        buffer: The slot's writable memory.
        rows: Number of rows of the whole batch.
        first_row: The row of this part's first sample.
        keeps_channels_last: See :func:`~penstock.engine.memory.batch_layout.read_layout`.
    """

    def __init__(
        self, buffer: np.ndarray, rows: int, first_row: int, *, keeps_channels_last: bool = False
    ) -> None:
        self._buffer = buffer
        self._keeps_channels_last = keeps_channels_last
        self._rows = rows
        self._first_row = first_row
        self.layout: Layout | None = None
        self.refused: list[Any] = []
        self._fields: list[tuple[LeafSpec, Any]] = []
        self._copy_row: CopyRow | None = None
        """None for small samples."""
        self._taken: list[Any] = []
        self._tables: list[np.ndarray | None] = []
        self._given = _GivenRow()
        self._first_made = -1
        self._made: list[Any] = []

    def take(self, samples: Iterator[Any]) -> None:
        """Add samples until the iterator ends. Raises the exceptions of :meth:`add`."""
        for sample in samples:
            self.add(sample)
            del sample  # frees its memory for the next sample, while it is in the cache
            if self._copy_row is None:
                self._taken.extend(samples)  # small samples are checked in finish()
            else:
                self._take_large(samples, self._copy_row)

    def _take_large(self, samples: Iterator[Any], copy_row: CopyRow) -> None:
        """Do what :meth:`add` does for each sample. The layout is known."""
        taken = self._taken
        for sample in samples:
            try:
                taken.append(copy_row(len(taken), sample))
            except LayoutError:
                self.refused = [sample]
                raise
            del sample

    def add(self, sample: Any) -> None:
        """Add one sample.

        Raises:
            LayoutError: The sample differs in layout from the first one, or no layout can hold it.
                It is kept in ``refused``. Small samples are compared only in :meth:`finish`.
            TooSmall: The slot cannot hold the batch.
        """
        self.refused = [sample]
        if self.layout is None:
            self._begin(sample)
        copy_row = self._copy_row
        self._taken.append(sample if copy_row is None else copy_row(self.num_filled, sample))
        self.refused = []

    def next_rows(self) -> list[np.ndarray | None]:
        """Return the memory of the next sample, one array per leaf. None for non-tensor leaves.

        Empty if the layout is not known yet, if samples are small, or if the row was already
        returned. No two samples get the same row, even if the first one fails.
        """
        row, given = len(self._taken), self._given
        if self._copy_row is None or row == given.row:
            return []
        if not self._tables:
            self._tables = [
                field.numpy() if leaf.kind == "tensor" and leaf.dtype != "torch.bfloat16" else None
                for leaf, field in self._fields
            ]
        first = row - row % _ROWS_AT_ONCE
        if first != self._first_made:
            self._first_made = first
            self._made = [
                None if table is None else field[first : first + _ROWS_AT_ONCE].unbind(0)
                for table, (_, field) in zip(self._tables, self._fields, strict=True)
            ]
        rows = SampleRows(None if table is None else table[row] for table in self._tables)
        rows.tensors = [None if made is None else made[row - first] for made in self._made]
        given.row, given.tensors = row, rows.tensors
        return rows

    def _begin(self, sample: Any) -> None:
        layout = read_layout(sample, keeps_channels_last=self._keeps_channels_last)
        offsets, num_bytes = layout.offsets(self._rows)
        if num_bytes > self._buffer.nbytes:
            raise TooSmall(num_bytes)
        first = self._first_row
        for leaf, offset in zip(layout.leaves, offsets, strict=True):
            field = None
            if leaf.kind != "object":
                start = offset + first * leaf.item_bytes
                field = field_view(self._buffer, leaf, start, self._rows - first)
            self._fields.append((leaf, field))
        if layout.sample_bytes >= STREAM_BYTES:
            self._copy_row = _compile_copy_row(layout, self._fields, self._given)
        self.layout = layout

    @property
    def num_filled(self) -> int:
        return len(self._taken)

    def recover(self) -> list[Any]:
        """Return the samples added so far. Large ones are read back from the slot."""
        if self._copy_row is None or self.layout is None:
            return list(self._taken)
        samples = []
        for row, left in enumerate(self._taken):
            values = left or [None]
            for place, (leaf, field) in enumerate(self._fields):
                if leaf.is_array:
                    value = field[row].clone()
                    values[place] = value.numpy() if leaf.kind == "array" else value
            samples.append(restore(self.layout.tree, values))
        return samples

    def finish(self) -> list[list[Any]]:
        """Stack the pending values. Return one list of values per object leaf.

        Raises:
            LayoutError: The samples do not all have the same layout.
        """
        objects: list[list[Any]] = []
        if self.layout is None:
            return objects
        is_large = self._copy_row is not None
        if is_large and self.layout.tree is not None:
            columns: Any = zip(*self._taken, strict=True)
        else:
            columns = split_columns(self.layout.tree, self._taken)
        for (leaf, field), column in zip(self._fields, columns, strict=True):
            if field is None:
                if not set(map(type, column)) <= {str, bytes}:
                    raise LayoutError
                objects.append(list(column))
            elif not (is_large and leaf.is_array):
                _stack(leaf, column, field[: len(self._taken)])
        return objects


def _compile_copy_row(
    layout: Layout, fields: list[tuple[LeafSpec, Any]], given: _GivenRow
) -> CopyRow:
    writers = [
        (place, _row_writer(leaf, field, given, place))
        for place, (leaf, field) in enumerate(fields)
        if leaf.is_array
    ]
    if layout.tree is None:
        return writers[0][1]
    flatten = compile_flatten(layout.tree)

    def copy_leaves(row: int, sample: Any) -> list[Any]:
        values = flatten(sample)
        for place, write in writers:
            write(row, values[place])
            values[place] = None
        return values

    return copy_leaves


def _row_writer(
    leaf: LeafSpec, field: Any, given: _GivenRow, place: int
) -> Callable[[int, Any], None]:
    """Return a function that copies one value to its row."""
    if leaf.kind == "array":
        return _array_row_writer(field.numpy(), leaf)
    return _tensor_row_writer(field, leaf, given, place)


def _array_row_writer(table: np.ndarray, leaf: LeafSpec) -> Callable[[int, Any], None]:
    array, dtype, shape, strides = np.ndarray, table.dtype, leaf.shape, table.strides[1:]

    def write_array(row: int, value: Any) -> None:
        is_plain = (
            type(value) is array
            and value.dtype == dtype
            and value.shape == shape
            and value.strides == strides
        )
        if not is_plain and read_leaf(value) != leaf:  # slower, and allows other strides
            raise LayoutError
        table[row] = value

    return write_array


def _tensor_row_writer(
    field: torch.Tensor, leaf: LeafSpec, given: _GivenRow, place: int
) -> Callable[[int, Any], None]:
    shape, num_bytes = torch.Size(leaf.shape), leaf.item_bytes
    stride = field[0].stride() if leaf.is_channels_last else None
    dtype, strided, start = field.dtype, torch.strided, field.data_ptr()
    tensor, memmove, is_complex = torch.Tensor, ctypes.memmove, dtype.is_complex

    def write_tensor(row: int, value: Any) -> None:
        if given.row == row and value is given.tensors[place]:
            return
        if type(value) is not tensor:
            value = plain_tensor(value)
        if (
            value.dtype is not dtype
            or value.layout is not strided
            or value.is_nested
            or value.requires_grad
            or value.shape != shape
            or not value.is_cpu
        ):
            raise LayoutError
        source, target = value.data_ptr(), start + row * num_bytes
        # Lazy bits change the meaning of the bytes, and lazy zeros have no memory. Only torch's own
        # copy applies them. Only complex tensors can be conjugated.
        has_bits = source == 0 or value.is_neg() or (is_complex and value.is_conj())
        is_dense = value.is_contiguous() if stride is None else value.stride() == stride
        if has_bits or not is_dense:
            field[row].copy_(value)
        elif source != target:  # not already written there by the dataset
            # memmove does not read the destination first: 1.4 times as fast as torch when cold.
            memmove(target, source, num_bytes)

    return write_tensor


def _stack(leaf: LeafSpec, column: Sequence[Any], out: torch.Tensor) -> None:
    """Stack one field of small samples into ``out``."""
    kinds = set(map(type, column))
    if leaf.kind == "tensor":
        if kinds != {torch.Tensor}:
            column = [plain_tensor(value) for value in column]
        if set(map(_DTYPE_AND_DEVICE, column)) != {(out.dtype, True)}:
            raise LayoutError
        try:
            if out.numel():
                torch.stack(tuple(column), out=out)
            elif any(value.shape != out.shape[1:] for value in column):
                raise LayoutError
        except RuntimeError:  # shapes differ, or a tensor requires grad
            raise LayoutError from None
        return
    if leaf.kind == "array":
        if any(read_leaf(value) != leaf for value in column):
            raise LayoutError
        if out.numel():
            np.stack(column, out=out.numpy())
        return
    if len(kinds) != 1:
        raise LayoutError
    if leaf.kind == "scalar":
        out.numpy()[:] = column
        return
    try:
        out.copy_(torch.tensor(column, dtype=out.dtype))
    except (OverflowError, RuntimeError):
        raise LayoutError from None
