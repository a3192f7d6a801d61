"""Divides the positions of an epoch among the ranks of a distributed run.

A global batch is ``world_size * batch_size`` consecutive positions. Rank r takes the r-th part:

    positions   0 1 2 3 | 4 5 6 7 | 8 9      batch_size 2, world_size 2, 10 samples
    rank 0      0 1       4 5       8
    rank 1          2 3       6 7     9

The parts of all ranks together, in order, are the epoch's order. A different number of ranks with
the same global batch size gives the same global batches.

By default the incomplete global batch at the end is divided evenly. No sample is lost or repeated,
but a rank can have one sample fewer than the others. If fewer samples than ranks are left, some
ranks have no last batch, and gradient averaging then waits forever. In that case use ``drop_last``
or ``padding``. ``drop_last`` drops the incomplete global batch. ``padding`` fills it with samples
from the start of the order, up to the next multiple of ``world_size``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import BadArgument
from penstock.options import check_count

if TYPE_CHECKING:
    import numpy.typing as npt


class RankShard:
    """One rank's part of ``length`` positions, without the first ``start`` positions.

    Example:
        >>> one, other = (RankShard(length=10, batch_size=2, rank=r, world_size=2) for r in (0, 1))
        >>> one.positions(0, one.num_local).tolist(), other.positions(0, other.num_local).tolist()
        ([0, 1, 4, 5, 8], [2, 3, 6, 7, 9])
    """

    def __init__(
        self,
        *,
        length: int,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: bool = False,
        start: int = 0,
    ) -> None:
        check_count("length", length)
        check_count("batch_size", batch_size, 1)
        check_count("world_size", world_size, 1)
        check_count("rank", rank, 0, world_size - 1)
        check_count("position", start, 0, length)
        if drop_last and padding:
            raise BadArgument(
                "drop_last=True and padding=True cannot be combined",
                remedy="drop_last=True to drop the incomplete batch at the end, or padding=True to "
                "repeat some samples",
            )
        self.length = length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.padding = padding
        self.start = start

    def replace(self, **changes: Any) -> RankShard:
        """Return the same part with some values changed."""
        return RankShard(**{**vars(self), **changes})

    @property
    def num_local(self) -> int:
        """Number of positions of this rank."""
        num_whole, (first, last) = self._num_whole, self._tail
        return num_whole * self.batch_size + last - first

    def positions(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the epoch positions of the rank's samples ``first`` to ``last`` (exclusive).

        A position past the length is padding. Its sample is the one at ``position % length``.
        """
        own = np.arange(first, last, dtype=np.int64)
        if self.world_size == 1:
            return own + self.start
        size, num_in_whole = self.batch_size, self._num_whole * self.batch_size
        found = own + own // size * (self.world_size - 1) * size + (self.start + self.rank * size)
        if last > num_in_whole:
            # Convert a place in the rank's tail to a position in the order.
            shift = self.start + num_in_whole * (self.world_size - 1) + self._tail[0]
            np.copyto(found, own + shift, where=own >= num_in_whole)
        return found

    def position(self, own: int) -> int:
        """Return the epoch position of the rank's ``own``-th sample."""
        return int(self.positions(own, own + 1)[0])

    @property
    def _num_whole(self) -> int:
        return (self.length - self.start) // (self.batch_size * self.world_size)

    @property
    def _tail(self) -> tuple[int, int]:
        """This rank's range of the incomplete global batch at the end."""
        num_left = (self.length - self.start) % (self.batch_size * self.world_size)
        if self.drop_last:
            return 0, 0
        if self.padding:
            num_left = -(-num_left // self.world_size) * self.world_size
        size = self.world_size
        return num_left * self.rank // size, num_left * (self.rank + 1) // size


_ORDER_MAKERS = {"BlockOrder": "dataset.block_order", "MixtureOrder": "mixture.order"}


def refuse_ranks(sampler: Any) -> BadArgument:
    """Return the error for ranks of a loader that has a sampler, or an iterable dataset (None)."""
    kind, remedy = type(sampler).__name__, "DataLoader(..., shard=True) without sampler"
    if hasattr(sampler, "world_size"):  # one of ours, which divides itself
        remedy = (
            f"sampler={_ORDER_MAKERS.get(kind, kind)}(..., rank=torch.distributed.get_rank(), "
            "world_size=torch.distributed.get_world_size()), without shard=True"
        )
    elif sampler is None:
        remedy = "divide the samples in the dataset's __iter__, by torch.distributed.get_rank()"
    return BadArgument(
        "shard, rank and world_size cannot be combined with a sampler or an iterable dataset",
        remedy=remedy,
    )


def find_rank(shard: bool, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size) of this process, from a loader's options.

    Raises:
        BadArgument: Only one of the two is given, or ``shard`` is set and torch.distributed is not
            initialized.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise BadArgument(
            f"rank={rank} and world_size={world_size} must be given together",
            remedy="DataLoader(..., rank=0, world_size=2), or shard=True under torch.distributed",
        )
    if not shard:
        return 0, 1
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    raise BadArgument(
        "shard=True, but torch.distributed is not initialized, so the rank is unknown",
        remedy="call torch.distributed.init_process_group() first, or pass rank=..., "
        "world_size=...",
    )
