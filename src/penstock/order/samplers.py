"""Orders that are functions of (seed, epoch), as samplers that any DataLoader takes.

    SeededOrder      every index once, shuffled or in sequence
    WeightedOrder    with replacement, each index as often as its weight says

All of them work alike: ``len``, iteration and ``order[i]`` speak of this rank's samples, counted
from the start position; ``index_at(position)`` speaks of the whole epoch. Nothing is drawn and
nothing is remembered, so iterating twice gives the same order twice: ``set_epoch`` turns to
another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import BadArgument
from penstock.options import check_count, check_seed
from penstock.order.keys import ORDER_STREAM, WEIGHT_STREAM, make_key, splitmix64
from penstock.order.permutation import IdentityPermutation, Permutation, checked_places
from penstock.order.ranks import RankShard

CHUNK = 4096
"""Indices computed at a time: 0.2 ms, and 160 KB while it lasts."""

Self = TypeVar("Self", bound="Order")


class Order:
    """What all orders share: epochs, ranks, a start position, and access to any place."""

    def __init__(self, length: int, *, seed: int, epoch: int, **shard: Any) -> None:
        self.seed = check_seed("seed", seed)
        self._shard = RankShard(length=check_count("length", length), **shard)
        self.set_epoch(epoch)

    # -- the whole epoch -------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Positions in the epoch, over all ranks."""
        return self._shard.length

    def set_epoch(self, epoch: int) -> None:
        """Turn to another epoch. An iteration that has begun stays in its own."""
        self.epoch = check_count("epoch", epoch, most=(1 << 63) - 1)

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The indices at many positions of the epoch."""
        raise NotImplementedError

    def index_at(self, position: int) -> int:
        """The index at ``position`` of the epoch, whichever rank has it."""
        return int(self.at(np.array([position], dtype=np.int64))[0])

    # -- this rank -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._shard.rank

    @property
    def world_size(self) -> int:
        return self._shard.world_size

    @property
    def drop_last(self) -> bool:
        return self._shard.drop_last

    @property
    def start(self) -> int:
        """The position of the epoch at which this order begins."""
        return self._shard.start

    def starting_at(self: Self, position: int) -> Self:
        """The same order without the first ``position`` samples of the epoch, at no cost.

        The position counts over all ranks, so it may be resumed with another number of them.

        Example:
            >>> order = SeededOrder(10, seed=1)
            >>> list(order.starting_at(7)) == list(order)[7:]
            True
        """
        rest = copy.copy(self)
        rest._shard = replace(self._shard, start=check_count("position", position))
        return rest

    def for_rank(self: Self, rank: int) -> Self:
        """The same order as another rank has it."""
        other = copy.copy(self)
        other._shard = replace(self._shard, rank=rank)
        return other

    def global_position(self, place: int) -> int:
        """The position in the epoch of this rank's ``place``-th sample; decides its randomness.

        Within a batch of this rank, positions are consecutive.
        """
        return self._shard.position(self._checked_place(place))

    def __len__(self) -> int:
        return self._shard.num_local

    def __getitem__(self, place: int) -> int:
        position = self._shard.position(self._checked_place(place))
        return self.index_at(position % self.length)

    def __iter__(self) -> Iterator[int]:
        frozen = copy.copy(self)  # set_epoch while we run must not change what is under way
        for first in range(0, len(frozen), CHUNK):
            last = min(first + CHUNK, len(frozen))
            yield from frozen._own_indices(first, last).tolist()

    def _own_indices(self, first: int, last: int) -> npt.NDArray[np.int64]:
        positions = self._shard.positions(first, last)
        if self._shard.padding:
            positions %= self.length
        return self.at(positions)

    def _checked_place(self, place: int) -> int:
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} of an order of {len(self)} samples")
        return place


class SeededOrder(Order):
    """Each index once: shuffled by (seed, epoch) without a list, or in sequence.

    A billion indices take no more memory than ten. Give it to any DataLoader as ``sampler=``.

    Args:
        length: How many samples the dataset has, or the dataset itself.
        seed: A whole number of 64 bits.
        shuffle: False for 0, 1, 2, ...
        batch_size: Matters with several ranks: see :mod:`penstock.order.ranks`. Without
            ``drop_last`` and more than one rank it changes nothing.
        rank, world_size: Give this rank's part only.
        drop_last: Leave out what does not fill a batch of every rank.
        padding: Repeat samples from the start until all ranks have equally many.

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
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: bool = False,
    ) -> None:
        self.shuffle = shuffle
        super().__init__(
            len(length) if hasattr(length, "__len__") else length,
            seed=seed,
            epoch=epoch,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            padding=padding,
        )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._permutation: Permutation | IdentityPermutation = IdentityPermutation(self.length)
        if self.shuffle:
            key = make_key(ORDER_STREAM, self.seed, self.epoch)
            self._permutation = Permutation(self.length, key)

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return self._permutation.at(positions)

    def index_at(self, position: int) -> int:
        return self._permutation.index_at(position)

    def position_of(self, index: int) -> int:
        """Where in the epoch ``index`` stands: the inverse of :meth:`index_at`."""
        return self._permutation.position_of(index)


class WeightedOrder(Order):
    """Indices drawn with replacement, each as often as its weight says.

    The draw at position p is the first index whose cumulative weight is above u * total. u are the
    top 53 bits of a hash of (seed, epoch, p); the cumulative weights are float64, added from left
    to right. Each step is rounded once, as IEEE 754 says, so every machine draws the same. Eight
    bytes are kept per weight.

    Args:
        weights: One for each index, not negative; they need not sum to one.
        num_samples: Positions in an epoch; None: as many as weights.
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
        seed: int = 0,
        epoch: int = 0,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: bool = False,
    ) -> None:
        self._cumulative = _accumulate(weights)
        super().__init__(
            len(self._cumulative) if num_samples is None else num_samples,
            seed=seed,
            epoch=epoch,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            padding=padding,
        )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._key = make_key(WEIGHT_STREAM, self.seed, self.epoch)

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = checked_places(positions, self.length)
        words = splitmix64(self._key, places.astype(np.uint64))
        heights = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._cumulative[-1]
        found: npt.NDArray[np.intp] = np.searchsorted(self._cumulative, heights, side="right")
        return found.astype(np.int64, copy=False)


def _accumulate(weights: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise BadArgument(
            f"weights has shape {values.shape}; one number for each sample is needed",
            remedy="WeightedOrder([1.0] * len(dataset))",
        )
    (bad,) = np.nonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise BadArgument(
            f"weights[{bad[0]}]={values[bad[0]]} is not a finite number from 0 up",
            remedy="a weight of 0 for samples that are never to be drawn",
        )
    with np.errstate(over="ignore"):
        cumulative: npt.NDArray[np.float64] = np.cumsum(values)
    if not 0 < cumulative[-1] < np.inf:
        raise BadArgument(
            f"the weights sum to {cumulative[-1]}", remedy="weights with a finite sum above 0"
        )
    return cumulative
