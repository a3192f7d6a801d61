"""``penstock.split``: divides a dataset at random by a seed, without a list of indices.

The parts are the same on every machine. This is the only module of the package that imports torch
at import time, because a part is a torch dataset. No other module of the package imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from torch.utils.data import Subset

from penstock.errors import BadArgument
from penstock.options import check_seed
from penstock.order.keys import SPLIT_STREAM, make_key
from penstock.order.permutation import Permutation

_CHUNK = 4096


class PermutationSlice(Sequence[int]):
    """A slice of a permutation as a sequence of indices, computed when they are read."""

    def __init__(self, shuffle: Permutation, places: range) -> None:
        self._shuffle = shuffle
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> PermutationSlice: ...
    def __getitem__(self, place: int | slice) -> int | PermutationSlice:
        if isinstance(place, slice):
            return PermutationSlice(self._shuffle, self._places[place])
        return self._shuffle.index_at(self._places[place])

    def at(self, places: Any) -> np.ndarray:
        """Return the indices at several places. Negative places count from the end."""
        wanted = np.asarray(places, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"places {places} are out of range for {len(self)} samples")
        return self._shuffle.at(wanted * self._places.step + self._places.start)

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), _CHUNK):
            yield from self._shuffle.at(np.array(self._places[first : first + _CHUNK])).tolist()

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int) or not 0 <= index < self._shuffle.length:
            return False
        return self._shuffle.position_of(index) in self._places

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._shuffle.at(np.array(self._places, dtype=np.int64)).astype(dtype or np.int64)

    def __repr__(self) -> str:
        return f"PermutationSlice({len(self)} of {self._shuffle.length})"


class PermutedSubset(Subset[Any]):
    """A subset of a dataset: torch's ``Subset``, without a list of indices."""

    dataset: Any

    @property
    def __getitems__(self) -> Callable[[list[int]], list[Any]]:
        """Present only if the dataset has it, because loaders test for it to fetch batches."""
        get_many = self.dataset.__getitems__
        return lambda places: get_many([self.indices[place] for place in places])

    def __repr__(self) -> str:
        return f"PermutedSubset({len(self)} of {len(self.dataset)} samples)"


def split(dataset: Any, lengths: Sequence[Any], seed: int = 0) -> list[PermutedSubset]:
    """Divide a dataset at random. Every sample is in exactly one part.

    The assignment is a function of the seed, the dataset's length and ``lengths``. Memory use is
    constant for any length.

    Args:
        dataset: Anything with ``len()`` and ``dataset[i]``.
        lengths: Numbers of samples, or fractions that sum to 1. A fraction is rounded down. The
            samples left over are added to the parts one by one, starting with the first part, as in
            torch's random_split.
        seed: A 64-bit integer.

    Example:
        >>> import penstock
        >>> train, test = penstock.split([10, 11, 12, 13, 14], [0.8, 0.2], seed=1)
        >>> [*train], [*test]
        ([14, 13, 10, 11], [12])
    """
    shuffle = Permutation(len(dataset), make_key(SPLIT_STREAM, check_seed("seed", seed)))
    parts, first = [], 0
    for num_samples in _count(len(dataset), lengths):
        places = range(first, first + num_samples)
        parts.append(PermutedSubset(dataset, PermutationSlice(shuffle, places)))
        first += num_samples
    return parts


def _count(total: int, lengths: Sequence[Any]) -> list[int]:
    """Return the number of samples of each part."""
    if not all(isinstance(length, (int, float, np.number)) and length >= 0 for length in lengths):
        raise BadArgument(
            f"lengths={lengths!r} must be non-negative numbers",
            remedy="split(dataset, [0.8, 0.2])",
        )
    if math.isclose(math.fsum(lengths), 1):
        counts: list[int] = []
        for fraction in lengths:  # a sum slightly above 1 must not assign more than total
            counts.append(min(math.floor(total * fraction), total - sum(counts)))
        for place in range(total - sum(counts)):
            counts[place % len(counts)] += 1
        return counts
    if sum(lengths) != total or any(length != int(length) for length in lengths):
        raise BadArgument(
            f"lengths={lengths!r} must sum to 1 or to the {total} samples of the dataset",
            remedy=f"split(dataset, [0.8, 0.2]), or numbers that sum to {total}",
        )
    return [int(length) for length in lengths]
