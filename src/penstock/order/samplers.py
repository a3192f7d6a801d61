"""Samplers whose order is a function of (seed, epoch), for any DataLoader.

    SeededOrder      every index once, shuffled or in sequence
    WeightedOrder    with replacement, each index in proportion to its weight
    BlockOrder       every index once, shuffled so that the disk is read in blocks

``len``, iteration and ``order[i]`` refer to this rank's samples, counted from the start position.
``index_at(position)`` refers to the whole epoch. Samplers have no random state, so iterating twice
gives the same order twice. ``set_epoch`` selects a different order.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import BadArgument, warn_user
from penstock.options import check_count
from penstock.order.base_order import Order
from penstock.order.keys import (
    BLOCK_STREAM,
    ORDER_STREAM,
    WEIGHT_STREAM,
    make_key,
    mix64,
    splitmix64,
)
from penstock.order.permutation import IdentityPermutation, Permutation, check_indices
from penstock.order.ranks import find_rank

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    from penstock.order.base_order import OrderOptions


class SeededOrder(Order):
    """Every index once: shuffled by (seed, epoch) without a list, or in sequence.

    Memory use does not depend on the length. Pass it to any DataLoader as ``sampler=``.

    Args:
        length: Number of samples in the dataset, or the dataset itself.
        seed: A 64-bit integer.
        shuffle: False for 0, 1, 2, ...
        batch_size: Samples in a batch of one rank. It matters only with several ranks or with
            ``drop_last``; see :mod:`penstock.order.ranks`.
        rank, world_size: Return only this rank's part.
        drop_last: Drop the samples that do not fill a batch of every rank.
        padding: Repeat samples from the start until all ranks have the same number of samples.

    Example:
        >>> order = SeededOrder(8, seed=0)
        >>> list(order)
        [0, 7, 3, 4, 2, 5, 6, 1]
        >>> order.position_of(4)
        3
        >>> halves = [list(SeededOrder(8, seed=0, rank=r, world_size=2)) for r in (0, 1)]
        >>> halves
        [[0, 3, 2, 6], [7, 4, 5, 1]]
    """

    def __init__(
        self,
        length: Any,
        *,
        shuffle: bool = True,
        **options: Unpack[OrderOptions],
    ) -> None:
        self.shuffle = shuffle
        super().__init__(_count(length), **options)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._permutation: Permutation | IdentityPermutation = IdentityPermutation(self.length)
        if self.shuffle:
            key = make_key(ORDER_STREAM, self.seed, self.epoch)
            self._permutation = Permutation(self.length, key)

    def _settings(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle}

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return self._permutation.at(positions)

    def index_at(self, position: int) -> int:
        return self._permutation.index_at(position)

    def position_of(self, index: int) -> int:
        """Return the epoch position of ``index``. The inverse of :meth:`index_at`."""
        return self._permutation.position_of(index)


class WeightedOrder(Order):
    """Indices drawn with replacement, in proportion to their weights.

    The draw at position p is the first index whose cumulative weight is above u * total. u is the
    top 53 bits of a hash of (seed, epoch, p). The cumulative weights are float64, summed from left
    to right. Each step is rounded once, as IEEE 754 specifies, so every machine draws the same
    indices. Memory use is eight bytes per weight.

    Args:
        weights: One non-negative number for each index. They need not sum to one.
        num_samples: Number of positions in an epoch. None: the number of weights.
        seed, epoch, batch_size, rank, world_size, drop_last, padding: As in :class:`SeededOrder`.

    Example:
        >>> order = WeightedOrder([1.0, 0.0, 3.0], num_samples=8, seed=0)
        >>> list(order)
        [0, 2, 0, 2, 2, 2, 2, 2]
        >>> order[2] == order.index_at(2) == 0
        True
    """

    def __init__(
        self,
        weights: npt.ArrayLike,
        *,
        num_samples: int | None = None,
        **options: Unpack[OrderOptions],
    ) -> None:
        self._cumulative = _accumulate(weights)
        super().__init__(len(self._cumulative) if num_samples is None else num_samples, **options)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._key = make_key(WEIGHT_STREAM, self.seed, self.epoch)

    def _settings(self) -> dict[str, Any]:
        return {"weights": hash_array(self._cumulative)}

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = check_indices(positions, self.length)
        words = splitmix64(self._key, places.astype(np.uint64))
        heights = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._cumulative[-1]
        found: npt.NDArray[np.intp] = np.searchsorted(self._cumulative, heights, side="right")
        return found.astype(np.int64, copy=False)


class BlockOrder(Order):
    """Every index once, in a random order that reads the disk in blocks of adjacent samples.

    ::

        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13      blocks of block_size samples
        block 2, block 0   |   block 3, block 1    blocks in random order, in groups of num_mixed
        9 2 11 0 8 3 1 10  |   5 12 4 13 7 6       samples shuffled within each group

    A disk or network reads whole blocks, and num_mixed of them are in memory at a time. There is no
    shuffle buffer to fill, because any position is computed directly.

    Args:
        length: Number of samples in the dataset, or the dataset itself.
        block_size: Number of adjacent samples that are read together.
        num_mixed: Number of blocks whose samples are shuffled together.
        block_starts: For blocks of different sizes: the index of the first sample of each block,
            followed by the number of samples. Used instead of ``block_size``.
        seed, epoch, batch_size, rank, world_size, drop_last, padding: As in
            :class:`penstock.SeededOrder`.

    Example:
        >>> order = BlockOrder(14, block_size=4, num_mixed=2, seed=0)
        >>> sorted(order) == list(range(14))
        True
        >>> sorted({index // 4 for index in list(order)[:6]})  # from two blocks only
        [0, 2]
        >>> list(BlockOrder(6, block_starts=[0, 1, 4, 6], num_mixed=1, seed=0))
        [0, 4, 5, 3, 1, 2]
    """

    def __init__(
        self,
        length: Any,
        *,
        block_size: int = 256,
        num_mixed: int = 16,
        block_starts: npt.ArrayLike | None = None,
        **options: Unpack[OrderOptions],
    ) -> None:
        self.block_size = check_count("block_size", block_size, 1)
        self.num_mixed = check_count("num_mixed", num_mixed, 1)
        length = _count(length)
        self._block_starts = None
        if block_starts is not None:
            self._block_starts = check_block_starts(block_starts)
            if self._block_starts[-1] != length:
                raise BadArgument(
                    f"block_starts ends with {self._block_starts[-1]}, but there are {length} "
                    "samples",
                    remedy="BlockOrder(dataset, block_starts=dataset.block_starts)",
                )
        super().__init__(length, **options)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._key = make_key(BLOCK_STREAM, self.seed, self.epoch)
        self._group_shuffle: dict[int, Permutation] = {}
        if self._block_starts is not None:
            num_blocks = len(self._block_starts) - 1
            self._blocks = Permutation(num_blocks, self._key)
            self._shuffled = self._blocks.at(np.arange(num_blocks))
            sizes = np.diff(self._block_starts)[self._shuffled]
            self._first_places = np.concatenate(([0], np.cumsum(sizes)))
            return
        num_blocks = -(-self.length // self.block_size)
        self._blocks = Permutation(num_blocks, self._key)
        # Only the last block can be short. Groups after its group begin _lack positions earlier.
        self._lack = num_blocks * self.block_size - self.length
        place = self._blocks.position_of(num_blocks - 1) if num_blocks else 0
        self._short_group, self._short_place = divmod(place, self.num_mixed)

    def _settings(self) -> dict[str, Any]:
        if self._block_starts is None:
            return {"block_size": self.block_size, "num_mixed": self.num_mixed}
        return {"block_starts": hash_array(self._block_starts), "num_mixed": self.num_mixed}

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = check_indices(positions, self.length).astype(np.int64).reshape(-1)
        is_even = self._block_starts is None
        groups = self._even_groups(places) if is_even else self._uneven_groups(places)
        found = np.empty(len(places), np.int64)
        for group in np.unique(groups).tolist():
            mine = groups == group
            in_group = self._in_group if is_even else self._in_uneven_group
            found[mine] = in_group(group, places[mine])
        return found.reshape(np.shape(positions))

    def _even_groups(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        group_rows = self.block_size * self.num_mixed
        groups = places // group_rows
        # The short group ends _lack positions earlier, and the groups after it begin earlier.
        is_later = places >= (groups + 1) * group_rows - np.where(
            groups >= self._short_group, self._lack, 0
        )
        return groups + is_later

    def _in_group(self, group: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        first = group * self.num_mixed
        is_short = group == self._short_group
        start = first * self.block_size - (self._lack if group > self._short_group else 0)
        rows = min(self.num_mixed, self._blocks.length - first) * self.block_size
        rows -= self._lack if is_short else 0
        inner = self._shuffle(group, rows).at(places - start)
        if is_short:  # rows behind the short block move up by the number of missing rows
            end = (self._short_place + 1) * self.block_size - self._lack
            inner = np.where(inner >= end, inner + self._lack, inner)
        blocks = self._blocks.at(first + inner // self.block_size)
        return blocks * self.block_size + inner % self.block_size

    def _uneven_groups(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        starts = self._first_places[: -1 : self.num_mixed]
        return np.asarray(starts.searchsorted(places, side="right") - 1, np.int64)

    def _in_uneven_group(self, group: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert self._block_starts is not None
        first = group * self.num_mixed
        start = self._first_places[first]
        end = self._first_places[min(first + self.num_mixed, self._blocks.length)]
        inner = start + self._shuffle(group, int(end - start)).at(places - start)
        turns = self._first_places.searchsorted(inner, side="right") - 1
        found: npt.NDArray[np.int64] = self._block_starts[self._shuffled[turns]]
        found += inner - self._first_places[turns]
        return found

    def _shuffle(self, group: int, rows: int) -> Permutation:
        """Return the shuffle of a group's rows. Only that of the latest group is kept."""
        shuffle = self._group_shuffle.get(group)
        if shuffle is None:
            shuffle = Permutation(rows, mix64(self._key ^ mix64(group + 1)))
            self._group_shuffle = {group: shuffle}
        return shuffle


def check_block_starts(block_starts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return block starts as an array. Raises if they do not begin with 0 and ascend."""
    found = np.asarray(block_starts)
    is_valid = found.ndim == 1 and found.size > 0 and found.dtype.kind in "iu"
    if not is_valid or found[0] != 0 or (np.diff(found.astype(np.int64)) <= 0).any():
        raise BadArgument(
            "block_starts must be integers that begin with 0 and ascend; blocks have at least one "
            "sample",
            remedy="np.cumsum([0, *num_samples_of_each_block])",
        )
    return np.array(found, np.int64)


def hash_array(values: npt.NDArray[Any]) -> str:
    """Return a short hash of an array's values, for fingerprints.

    Example:
        >>> hash_array(np.arange(3, dtype=np.int64))
        'ab25350e3e65efeb'
    """
    from hashlib import sha256

    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return sha256(little.tobytes()).hexdigest()[:16]


def _count(length: Any) -> Any:
    return len(length) if hasattr(length, "__len__") else length


def _accumulate(weights: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise BadArgument(
            f"weights has shape {values.shape}; it must hold one number for each sample",
            remedy="WeightedOrder([1.0] * len(dataset))",
        )
    (bad,) = np.nonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise BadArgument(
            f"weights[{bad[0]}]={values[bad[0]]} must be a finite, non-negative number",
            remedy="a weight of 0 for samples that should never be drawn",
        )
    with np.errstate(over="ignore"):
        cumulative: npt.NDArray[np.float64] = np.cumsum(values)
    if not 0 < cumulative[-1] < np.inf:
        raise BadArgument(
            f"the weights sum to {cumulative[-1]}", remedy="weights with a finite, positive sum"
        )
    return cumulative


def make_order(
    dataset: Any, options: Any, shuffle: bool, batch_size: int | None, drop_last: bool
) -> Order | None:
    """Return the order of a loader. None if it has neither a mixture, a seed nor several ranks.

    Args:
        options: Has the attributes ``seed``, ``shard``, ``rank``, ``world_size``, ``padding`` and
            ``on_error``.
    """
    seed, padding = options.seed, options.padding
    rank, world_size = find_rank(options.shard, options.rank, options.world_size)
    mixture = sys.modules.get("penstock.order.mixture")  # imported by penstock.mix
    is_mixture = mixture is not None and isinstance(dataset, mixture.Mixture)
    if is_mixture and dataset.has_limits and options.on_error == "raise":
        warn_user(
            "max_bad of the mixture has no effect, because on_error='raise' stops at the first bad "
            "sample. Try: DataLoader(mixture, ..., on_error='skip')"
        )
    if seed is None and world_size == 1 and not (is_mixture and shuffle):
        return dataset.order(batch_size=batch_size or 1) if is_mixture else None
    if seed is None and shuffle and is_mixture:
        raise BadArgument(
            "shuffle=True needs a seed for a mixture",
            remedy="DataLoader(mixture, shuffle=True, seed=0)",
        )
    if seed is None and shuffle:
        raise BadArgument(
            "shuffling with several ranks needs the same seed on every rank, or samples are lost "
            "or repeated",
            remedy="DataLoader(..., seed=0, shard=True)",
        )
    make = dataset.order if is_mixture else functools.partial(SeededOrder, dataset)
    order: Order = make(
        seed=seed or 0,
        shuffle=shuffle,
        batch_size=batch_size or 1,
        rank=rank,
        world_size=world_size,
        drop_last=drop_last and world_size > 1,
        padding=padding,
    )
    return order
