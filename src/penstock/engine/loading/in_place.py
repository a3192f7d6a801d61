"""Datasets that write samples into the slot themselves, without a copy on the way.

    worker: InPlaceFetcher.get(index) -> dataset.read_into(index, rows of the next sample)
            -> BatchWriter.add(sample), which finds the tensors where they belong

For a JPEG that becomes a crop of 224 pixels, the array in between and its copy were 80 of 1250
microseconds (2 x86-64 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Subset

from penstock.engine.loading.collate import BatchWriter
from penstock.order.split import PermutedSubset
from penstock.user_objects import offers

Rows = Sequence["np.ndarray | None"]


class InPlaceReader(Protocol):
    """A dataset that can write tensors of a sample straight into a slot.

    It draws and fails as it does in ``dataset[i]``, and samples may differ in form.
    """

    def __getitem__(self, index: Any) -> Any: ...

    def read_into(self, index: Any, rows: Rows) -> Any:
        """``self[index]``, of which any tensor may lie in its row.

        Args:
            rows: For each leaf of a sample, in the order in which they stand there, an array of
                the form that the batch's first sample had there. None: it is not to be written
                to. Empty: no form is known yet. A tensor over one of them, filled and returned as
                that leaf, is not copied. None of them may be kept.
        """


class InPlaceFetcher:
    """Loads samples into the rows that a writer has next. Pairs with :class:`BatchWriter`.

    Called from: a worker process, which adds each sample before it asks for the next one.
    """

    def __init__(self, read_into: Callable[[Any, Rows], Any], indices: list[Any]) -> None:
        self._read_into = read_into
        self._indices = indices
        self._writer: BatchWriter | None = None

    def begin(self, writer: BatchWriter) -> None:
        """Samples go to this writer from now on."""
        self._writer = writer

    def get(self, index: Any) -> Any:
        """What ``dataset[index]`` is."""
        for one in self._indices:
            index = one[index]
        return self._read_into(index, [] if self._writer is None else self._writer.next_rows())


def find_in_place_fetcher(dataset: Any) -> InPlaceFetcher | None:
    """The fetcher for a dataset that writes samples itself (also in a subset); None for others."""
    dataset, indices = unwrap_subsets(dataset)
    return InPlaceFetcher(dataset.read_into, indices) if offers(dataset, "read_into") else None


def unwrap_subsets(dataset: Any) -> tuple[Any, list[Any]]:
    """The dataset inside all subsets, and the index lists of these, outermost first."""
    indices = []
    while type(dataset) in (Subset, PermutedSubset):
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices
