"""Datasets that write samples directly to the slot, without an intermediate copy.

    worker: InPlaceFetcher.get(index) -> dataset.read_into(index, rows of the next sample)
            -> BatchWriter.take(samples), which finds the tensors already in place

For a JPEG decoded to a crop of 224 pixels, the intermediate array and its copy took 80 of 1250
microseconds (2 x86-64 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Subset

from penstock.engine.loading.collate import BatchWriter
from penstock.user_objects import offers

Rows = Sequence["np.ndarray | None"]


class InPlaceReader(Protocol):
    """A dataset that can write the tensors of a sample directly to a slot.

    Random draws, errors and values are the same as in ``dataset[i]``. Samples can differ in layout.
    """

    def __getitem__(self, index: Any) -> Any: ...

    def read_into(self, index: Any, rows: Rows) -> Any:
        """Return ``self[index]``. Any of its tensors can be a view of its row.

        Args:
            rows: One array per leaf of a sample, in order, with the shape and dtype of that leaf in
                the batch's first sample. None for a leaf that must not be written. Empty if the
                layout is not known yet. A tensor over one of the arrays, filled and returned as
                that leaf, is not copied. The dataset must not keep any of the arrays.
        """


class InPlaceFetcher:
    """Loads samples into the next rows of a :class:`BatchWriter`.

    Used in a worker process, which adds each sample to the writer before it loads the next one.
    """

    def __init__(self, read_into: Callable[[Any, Rows], Any], indices: list[Any]) -> None:
        self._read_into = read_into
        self._indices = indices
        self._writer: BatchWriter | None = None

    def begin(self, writer: BatchWriter) -> None:
        """Set the writer that provides the rows."""
        self._writer = writer

    def get(self, index: Any) -> Any:
        """Return ``dataset[index]``."""
        for one in self._indices:
            index = one[index]
        return self._read_into(index, [] if self._writer is None else self._writer.next_rows())


def find_in_place_fetcher(dataset: Any) -> InPlaceFetcher | None:
    """Return the fetcher for a dataset with ``read_into`` (also in a subset), or None."""
    dataset, indices = unwrap_subsets(dataset)
    return InPlaceFetcher(dataset.read_into, indices) if offers(dataset, "read_into") else None


def find_channels_last_getter(dataset: Any) -> Callable[[Any], Any] | None:
    """Return a function that loads one sample with channels_last images, or None.

    A dataset of Penstock (also in a subset) has such images if its ``keeps_channels_last`` returns
    True. ``read_into`` returns them, and ``dataset[i]`` returns contiguous ones. Used only with
    default_collate. All other datasets get its contiguous batches.
    """
    inner, _ = unwrap_subsets(dataset)
    if not offers(inner, "keeps_channels_last") or inner.keeps_channels_last() is not True:
        return None
    fetcher = find_in_place_fetcher(dataset)
    return None if fetcher is None else fetcher.get


def unwrap_subsets(dataset: Any) -> tuple[Any, list[Any]]:
    """Return the dataset inside all subsets, and the subsets' index lists, outermost first."""
    indices = []
    while _is_plain_subset(dataset):
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices


def _is_plain_subset(dataset: Any) -> bool:
    """Return True for torch's Subset and for a part of ``penstock.split``, not for subclasses."""
    if type(dataset) is Subset or not isinstance(dataset, Subset):
        return type(dataset) is Subset
    from penstock.order.split import PermutedSubset

    return type(dataset) is PermutedSubset
