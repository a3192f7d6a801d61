"""Base classes of Penstock's orders, which the loader recognizes without importing the orders.

Tested by ``tests/unit/order/test_samplers.py``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.options import check_count, check_seed

if TYPE_CHECKING:
    from typing import Protocol, TypedDict

    import numpy.typing as npt

    from penstock.order.ranks import RankShard

    class OrderOptions(TypedDict, total=False):
        """Options of every order; see :class:`SeededOrder`."""

        seed: int
        epoch: int
        batch_size: int
        rank: int
        world_size: int
        drop_last: bool
        padding: bool

    class EpochProgress(Protocol):
        """How far an epoch has come: an :class:`~penstock.order.epoch_state.EpochState`."""

        start: int
        num_batches: int


CHUNK = 4096
"""Number of indices computed at a time. Takes 0.2 ms and 160 KB of temporary memory."""

Self = TypeVar("Self", bound="ShardedOrder")
SelfOrder = TypeVar("SelfOrder", bound="Order")


class ShardedOrder:
    """Base class of orders of samples and of batches: seed, epoch, start, and this rank's part."""

    seed: int
    epoch: int
    _shard: RankShard

    @property
    def length(self) -> int:
        """Number of positions in the epoch, over all ranks."""
        return self._shard.length

    @property
    def start(self) -> int:
        """The epoch position, counted over all ranks, at which this order begins."""
        return self._shard.start

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What determines the order, apart from the epoch, as plain values.

        A saved state keeps it. A state from a different order is refused, because resuming from it
        would lose some samples and repeat others.

        Example:
            >>> from penstock import SeededOrder
            >>> SeededOrder(10, seed=1).fingerprint
            {'sampler': 'SeededOrder', 'seed': 1, 'shuffle': True}
        """
        return {"sampler": type(self).__name__, "seed": self.seed, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        """Return the entries of the fingerprint that this kind of order adds or changes."""
        return {}

    def set_epoch(self, epoch: int) -> None:
        """Switch to a different epoch. Iterations in progress are not affected."""
        self.epoch = check_count("epoch", epoch, most=(1 << 63) - 1)

    def starting_at(self: Self, position: int) -> Self:
        """Return the same order without the first ``position`` positions of the epoch.

        Nothing is computed for the skipped positions. The position counts over all ranks, so a run
        can resume with a different number of ranks.

        Example:
            >>> from penstock import SeededOrder
            >>> order = SeededOrder(10, seed=1)
            >>> list(order.starting_at(7)) == list(order)[7:]
            True
        """
        rest = copy.copy(self)
        rest._shard = self._shard.replace(start=check_count("position", position))
        return rest

    def _position(self, place: int) -> int:
        """Return the epoch position of this rank's ``place``-th element; -1 is the last one."""
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"{place} is out of range for length {len(self)}")
        return self._shard.position(place)

    def __len__(self) -> int:
        return self._shard.num_local


class Order(ShardedOrder):
    """Base class of samplers: an order of sample indices.

    Attributes:
        mixture: The dataset, if it is a :class:`penstock.Mixture`.
    """

    mixture: Any = None

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
        from penstock.order.ranks import RankShard

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
        """Return the indices at several positions of the epoch."""
        raise NotImplementedError

    def index_at(self, position: int) -> int:
        """Return the index at ``position`` of the epoch, on any rank."""
        return int(self.at(np.array([position], dtype=np.int64))[0])

    def counter(self, state: EpochProgress) -> Callable[[], dict[str, int]] | None:
        """Return a function that counts the delivered samples of each source of a mixture."""
        return None

    def for_rank(self: SelfOrder, rank: int) -> SelfOrder:
        """Return the same order for a different rank."""
        other = copy.copy(self)
        other._shard = self._shard.replace(rank=rank)
        return other

    def global_position(self, place: int) -> int:
        """Return the epoch position of this rank's ``place``-th sample.

        The position determines the sample's randomness. Within a batch of this rank, positions are
        consecutive.
        """
        return self._position(place)

    def __getitem__(self, place: int) -> int:
        return self.index_at(self._position(place) % self.length)

    def indices(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return this rank's indices from its place ``first`` up to ``last`` or the end."""
        positions = self._shard.positions(first, min(last, len(self)))
        if self._shard.padding:
            positions %= self.length
        return self.at(positions)

    def __iter__(self) -> Iterator[int]:
        frozen = copy.copy(self)  # set_epoch must not change an iteration in progress
        for first in range(0, len(frozen), CHUNK):
            yield from frozen.indices(first, first + CHUNK).tolist()
