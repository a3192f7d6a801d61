"""Gathers batches of in-memory datasets without a loop over samples.

Finds the tensors of a ``TensorDataset`` (also inside ``Subset``) and copies the rows of a batch to
a slot in one call. A dataset that implements :class:`RowReader` copies the rows itself. No user
code runs, so no randomness is set.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import TensorDataset

from penstock.engine.loading.default_collate import is_default_collate
from penstock.engine.loading.in_place import unwrap_subsets
from penstock.engine.memory.batch_layout import Layout, LayoutError, read_layout, view_batch
from penstock.user_objects import offers, probe

if TYPE_CHECKING:
    from penstock.engine.memory.ring import Ring

TRY_OTHER_EVERY = 64
"""Number of copies after which both methods are timed again."""


class RowReader(Protocol):
    """A dataset that copies whole batches directly to a slot.

    Every sample must have the layout of ``dataset[0]`` and depend only on its index.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        """Copy the samples of ``index`` to ``out``. All indices are in range.

        ``out`` contains one byte array per leaf of a sample, in order, with one row per index.
        """


class Gatherer:
    """Gathers rows of fields of equal length, by index.

    Args:
        length: Length of the dataset inside all subsets.
        subsets: The index lists of the subsets, outermost first.
        layout: The layout of one sample.
    """

    def __init__(self, length: int, subsets: list[Any], layout: Layout) -> None:
        self._length = length
        self._subsets = subsets
        self.layout = layout

    def fill(self, index: list[int], slot: np.ndarray, rows: int, first_row: int) -> None:
        """Copy the rows of ``index`` to a batch of ``rows``, starting at ``first_row``.

        Raises:
            LayoutError: The indices are not plain integers, or there are none.
        """
        self._copy(self._resolve(index), slot, rows, first_row)

    def _copy(self, chosen: np.ndarray, slot: np.ndarray, rows: int, first_row: int) -> None:
        raise NotImplementedError

    def gather(self, index: list[int], ring: Ring) -> Any:
        """Return one batch in a slot of ``ring``, or in new memory if the ring is crowded."""
        _, num_bytes = self.layout.offsets(len(index))
        ring.fit(num_bytes)
        if ring.is_crowded():
            root = np.empty(num_bytes, dtype=np.uint8)
        else:
            root = ring.lend(ring.take(), num_bytes)
        self.fill(index, root, len(index), 0)
        return view_batch(self.layout, root, len(index), len(index), [])

    def _resolve(self, index: list[int]) -> np.ndarray:
        if not len(index):
            raise LayoutError  # torch's own collate raises the error for an empty batch
        for indices in self._subsets:
            many = getattr(indices, "at", None)  # a part of penstock.split
            index = many(index) if many is not None else [indices[place] for place in index]
        try:
            chosen = np.asarray(index)
        except ValueError:  # ragged
            raise LayoutError from None
        # torch uses uint8 tensors as masks.
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or chosen.dtype == np.uint8:
            raise LayoutError
        chosen = chosen.astype(np.int64, copy=False)
        # One check for most batches: as an unsigned integer, a negative index is very large.
        if int(chosen.view(np.uint64).max()) >= self._length:
            if chosen.min() < -self._length or chosen.max() >= self._length:
                raise IndexError(f"index {index} is out of range for {self._length} samples")
            chosen = np.where(chosen < 0, chosen + self._length, chosen)
        return chosen


class TensorGatherer(Gatherer):
    """Gathers rows of the CPU tensors of a dataset."""

    def __init__(self, tensors: list[torch.Tensor], subsets: list[Any], layout: Layout) -> None:
        super().__init__(len(tensors[0]), subsets, layout)
        self._tables = [_widened(tensor) for tensor in tensors]
        self._copiers = [_Copier() for _ in tensors]

    def _copy(self, chosen: np.ndarray, slot: np.ndarray, rows: int, first_row: int) -> None:
        offsets, _ = self.layout.offsets(rows)
        for table, offset, copier in zip(self._tables, offsets, self._copiers, strict=True):
            width = table.shape[1]
            if not width:
                continue
            field = torch.frombuffer(slot, dtype=table.dtype, count=rows * width, offset=offset)
            field = field.view(rows, width)[first_row : first_row + len(chosen)]
            copier.copy(table, chosen, field)


class RowGatherer(Gatherer):
    """Gathers rows with the dataset's own ``read_rows``."""

    def __init__(self, reader: RowReader, subsets: list[Any], layout: Layout) -> None:
        super().__init__(len(reader), subsets, layout)
        self._read_rows = reader.read_rows

    def _copy(self, chosen: np.ndarray, slot: np.ndarray, rows: int, first_row: int) -> None:
        out, last_row = [], first_row + len(chosen)
        for leaf, offset in zip(self.layout.leaves, self.layout.offsets(rows)[0], strict=True):
            size = leaf.item_bytes
            field = slot[offset : offset + rows * size].reshape(rows, size)
            out.append(field[first_row:last_row])
        self._read_rows(chosen, out)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a table of the widest integers that fit a row, for fast copies."""
    tensor = tensor.contiguous()
    row_items = tensor[0].numel()
    row_bytes = row_items * tensor.element_size()
    if not row_bytes:
        return torch.empty((len(tensor), 0), dtype=torch.uint8)
    widths = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
    dtype = next(
        dtype
        for dtype, width in widths
        if row_bytes % width == 0 and tensor.data_ptr() % width == 0
    )
    return tensor.view(len(tensor), row_items).view(dtype)


class _Copier:
    """Copies rows with torch's threads or with NumPy in this thread, whichever is faster.

    Threads halve the time on an idle machine. If other processes use the cores, the threads wait
    for each other and can take about 15 times as long. Both methods are timed repeatedly.
    """

    def __init__(self) -> None:
        self._times_s = [0.0, 0.0]
        self._num_copies = 0

    def copy(self, tensor: torch.Tensor, chosen: np.ndarray, out: torch.Tensor) -> None:
        use_numpy = self._times_s[1] < self._times_s[0]
        if self._num_copies % TRY_OTHER_EVERY < 2:
            use_numpy = self._num_copies % 2 == 0
        self._num_copies += 1
        start = time.perf_counter()
        if use_numpy:
            np.take(tensor.numpy(), chosen, axis=0, out=out.numpy(), mode="clip")
        else:
            torch.index_select(tensor, 0, torch.from_numpy(chosen), out=out)
        self._times_s[use_numpy] = time.perf_counter() - start


def is_sliced(dataset: Any, batch_sampler: Any, collate_fn: Any) -> bool:
    """Return True if batches are gathered in one call. Cheap: checks only types."""
    dataset, _ = unwrap_subsets(dataset)
    is_plain = _is_tensor_dataset(dataset) and len(dataset) > 0
    return is_plain and batch_sampler is not None and is_default_collate(collate_fn)


def _is_tensor_dataset(dataset: Any) -> bool:
    """Return True for a TensorDataset whose ``__getitem__`` is torch's own."""
    if type(dataset) is not TensorDataset or not dataset.tensors:
        return False
    is_own = TensorDataset.__getitem__.__module__ == TensorDataset.__module__
    return is_own and not callable(probe(dataset, "__getitems__"))


def find_gatherer(dataset: Any) -> Gatherer | None:
    """Return the gatherer for a dataset of tensors or rows, or None for other datasets."""
    dataset, subsets = unwrap_subsets(dataset)
    reads_rows = offers(dataset, "read_rows")
    if not (_is_tensor_dataset(dataset) or reads_rows) or not len(dataset):
        return None
    try:
        layout = read_layout(dataset[0])
    except Exception:  # no layout, or an error: normal loading reports it
        return None
    if reads_rows:
        return None if layout.has_objects else RowGatherer(dataset, subsets, layout)
    if any(type(tensor) is not torch.Tensor for tensor in dataset.tensors):
        return None
    return TensorGatherer(list(dataset.tensors), subsets, layout)
