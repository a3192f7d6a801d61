"""Samplers whose order is a function of (seed, epoch), for any DataLoader.

    SeededOrder      every index once, shuffled or in sequence
    WeightedOrder    with replacement, each index as often as its weight says
    BlockOrder       every index once, shuffled so that the disk is read in blocks

``len``, iteration and ``order[i]`` are about this rank's samples, counted from the start position;
``index_at(position)`` is about the whole epoch. Nothing is drawn and nothing is remembered, so
iterating twice gives the same order twice; ``set_epoch`` turns to another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import BadArgument
from penstock.options import check_count, check_seed
from penstock.order.keys import (
    BLOCK_STREAM,
    ORDER_STREAM,
    WEIGHT_STREAM,
    make_key,
    mix64,
    splitmix64,
)
from penstock.order.permutation import (
    IdentityPermutation,
    Permutation,
    check_index,
    check_indices,
)
from penstock.order.ranks import RankShard, find_rank

if TYPE_CHECKING:
    from typing_extensions import Unpack

CHUNK = 4096
"""Indices computed at a time: 0.2 ms, and 160 KB while it lasts."""

Self = TypeVar("Self", bound="ShardedOrder")
SelfOrder = TypeVar("SelfOrder", bound="Order")


class ShardedOrder:
    """Common to orders of samples and of batches: seed, epoch, start, and this rank's part."""

    seed: int
    epoch: int
    _shard: RankShard

    @property
    def length(self) -> int:
        """Positions in the epoch, over all ranks."""
        return self._shard.length

    @property
    def start(self) -> int:
        """The position of the epoch, counted over all ranks, at which this order begins."""
        return self._shard.start

    def set_epoch(self, epoch: int) -> None:
        """Turn to another epoch. An iteration that has begun stays in its own."""
        self.epoch = check_count("epoch", epoch, most=(1 << 63) - 1)

    def starting_at(self: Self, position: int) -> Self:
        """The same order without the first ``position`` positions of the epoch, at no cost.

        The position counts over all ranks, so it may be resumed with another number of them.

        Example:
            >>> order = SeededOrder(10, seed=1)
            >>> list(order.starting_at(7)) == list(order)[7:]
            True
        """
        rest = copy.copy(self)
        rest._shard = replace(self._shard, start=check_count("position", position))
        return rest

    def _position(self, place: int) -> int:
        """The position in the epoch of this rank's ``place``-th element; -1 is the last one."""
        if place < 0:
            place += len(self)
        check_index(place, len(self))
        return self._shard.position(place)

    def __len__(self) -> int:
        return self._shard.num_local


class OrderOptions(TypedDict, total=False):
    """Options of every order; see :class:`SeededOrder`."""

    seed: int
    epoch: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    padding: bool


class Order(ShardedOrder):
    """Base class of samplers: an order of sample indices."""

    def __init__(
        self,
        length: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: bool = False,
    ) -> None:
        self.seed = check_seed("seed", seed)
        self._shard = RankShard(
            length=check_count("length", length),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            padding=padding,
        )
        self.set_epoch(epoch)

    @property
    def rank(self) -> int:
        return self._shard.rank

    @property
    def world_size(self) -> int:
        return self._shard.world_size

    @property
    def drop_last(self) -> bool:
        return self._shard.drop_last

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The indices at many positions of the epoch."""
        raise NotImplementedError

    def index_at(self, position: int) -> int:
        """The index at ``position`` of the epoch, whichever rank has it."""
        return int(self.at(np.array([position], dtype=np.int64))[0])

    def for_rank(self: SelfOrder, rank: int) -> SelfOrder:
        """The same order as another rank has it."""
        other = copy.copy(self)
        other._shard = replace(self._shard, rank=rank)
        return other

    def global_position(self, place: int) -> int:
        """The position in the epoch of this rank's ``place``-th sample; decides its randomness.

        Within a batch of this rank, positions are consecutive.
        """
        return self._position(place)

    def __getitem__(self, place: int) -> int:
        return self.index_at(self._position(place) % self.length)

    def __iter__(self) -> Iterator[int]:
        frozen = copy.copy(self)  # set_epoch must not change an iteration that has begun
        for first in range(0, len(frozen), CHUNK):
            positions = frozen._shard.positions(first, min(first + CHUNK, len(frozen)))
            if frozen._shard.padding:
                positions %= frozen.length
            yield from frozen.at(positions).tolist()


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
        **options: Unpack[OrderOptions],
    ) -> None:
        self._cumulative = _accumulate(weights)
        super().__init__(len(self._cumulative) if num_samples is None else num_samples, **options)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._key = make_key(WEIGHT_STREAM, self.seed, self.epoch)

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = check_indices(positions, self.length)
        words = splitmix64(self._key, places.astype(np.uint64))
        heights = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._cumulative[-1]
        found: npt.NDArray[np.intp] = np.searchsorted(self._cumulative, heights, side="right")
        return found.astype(np.int64, copy=False)


class BlockOrder(Order):
    """Each index once, in a random order that reads the disk in blocks of neighbours.

    ::

        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13      blocks of block_size samples
        block 2, block 0   |   block 3, block 1    in random order, num_mixed of them at a time
        9 2 11 0 8 3 1 10  |   5 12 4 13 7 6       the samples of those, shuffled

    A disk (or a network) reads whole blocks, and num_mixed of them are in memory at a time. No
    buffer is filled: any position is computed alone.

    Args:
        length: How many samples the dataset has, or the dataset itself.
        block_size: Neighbours that are read together.
        num_mixed: Blocks whose samples are shuffled among each other.
        seed, epoch, batch_size, rank, world_size, drop_last, padding: As in
            :class:`penstock.SeededOrder`.

    Example:
        >>> order = BlockOrder(14, block_size=4, num_mixed=2, seed=0)
        >>> sorted(order) == list(range(14))
        True
        >>> sorted({index // 4 for index in list(order)[:6]})  # from two blocks only
        [0, 2]
    """

    def __init__(
        self,
        length: Any,
        *,
        block_size: int = 256,
        num_mixed: int = 16,
        **options: Unpack[OrderOptions],
    ) -> None:
        self.block_size = check_count("block_size", block_size, 1)
        self.num_mixed = check_count("num_mixed", num_mixed, 1)
        super().__init__(_count(length), **options)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._key = make_key(BLOCK_STREAM, self.seed, self.epoch)
        num_blocks = -(-self.length // self.block_size)
        self._blocks = Permutation(num_blocks, self._key)
        # Only the last block can be short; from its group on, all begin earlier by what it lacks.
        self._lack = num_blocks * self.block_size - self.length
        place = self._blocks.position_of(num_blocks - 1) if num_blocks else 0
        self._short_group, self._short_place = divmod(place, self.num_mixed)
        self._group_shuffle: dict[int, Permutation] = {}

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = check_indices(positions, self.length).astype(np.int64).reshape(-1)
        group_rows = self.block_size * self.num_mixed
        groups = places // group_rows
        # The short group ends earlier than its number says, and later ones begin earlier.
        is_later = places >= (groups + 1) * group_rows - np.where(
            groups >= self._short_group, self._lack, 0
        )
        groups = groups + is_later
        starts = groups * group_rows - np.where(groups > self._short_group, self._lack, 0)
        found = np.empty(len(places), np.int64)
        for group in np.unique(groups).tolist():
            mine = groups == group
            found[mine] = self._in_group(group, places[mine] - starts[mine])
        return found.reshape(np.shape(positions))

    def _in_group(self, group: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        first = group * self.num_mixed
        is_short = group == self._short_group
        shuffle = self._group_shuffle.get(group)
        if shuffle is None:
            rows = min(self.num_mixed, self._blocks.length - first) * self.block_size
            rows -= self._lack if is_short else 0
            shuffle = Permutation(rows, mix64(self._key ^ mix64(group + 1)))
            self._group_shuffle = {group: shuffle}  # only the last group's is kept
        inner = shuffle.at(places)
        if is_short:  # the rows behind the short block are nearer by what it lacks
            end = (self._short_place + 1) * self.block_size - self._lack
            inner = np.where(inner >= end, inner + self._lack, inner)
        blocks = self._blocks.at(first + inner // self.block_size)
        return blocks * self.block_size + inner % self.block_size


def _count(length: Any) -> Any:
    return len(length) if hasattr(length, "__len__") else length


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


def make_order(
    dataset: Any,
    *,
    seed: int | None,
    shuffle: bool,
    batch_size: int | None,
    drop_last: bool,
    ranks: tuple[bool, int | None, int | None],
    padding: bool,
) -> SeededOrder | None:
    """The order of ours, where a seed or a rank asks for one.

    Args:
        ranks: The loader's ``shard``, ``rank`` and ``world_size``.
    """
    rank, world_size = find_rank(*ranks)
    if seed is None and world_size == 1:
        return None
    if seed is None and shuffle:
        raise BadArgument(
            "ranks that shuffle need the same seed, or samples are lost and doubled",
            remedy="DataLoader(..., seed=0, shard=True)",
        )
    return SeededOrder(
        dataset,
        seed=seed or 0,
        shuffle=shuffle,
        batch_size=batch_size or 1,
        rank=rank,
        world_size=world_size,
        drop_last=drop_last and world_size > 1,
        padding=padding,
    )
