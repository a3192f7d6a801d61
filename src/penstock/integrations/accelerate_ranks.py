"""Computes this rank's batches of a loader that accelerate prepared, from any position on.

    SkipBatchSampler -> BatchSamplerShard -> the loader's own batch sampler -> its order
    skips batches       selects this rank's

The first two belong to accelerate and may be missing. They decide which indices a rank gets. The
position of a sample in the epoch determines its randomness and depends on the number of ranks. A
global batch covers consecutive positions, and each rank has its part of them.

Tested by ``tests/compat/test_accelerate.py``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler

from penstock.order.base_order import Order
from penstock.order.epoch_state import EpochIndices, EpochState


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The samplers between a prepared loader and its own batches.

    Args:
        own: The loader's own batch sampler, torch's or the user's.
        sharing: accelerate's sampler, which selects this rank's part. None with a single rank.
        num_skipped: Number of this rank's batches to skip at the start of an epoch.
    """

    own: Any
    sharing: Any = None
    num_skipped: int = 0

    @property
    def world_size(self) -> int:
        return 1 if self.sharing is None else int(self.sharing.num_processes)

    @property
    def rank(self) -> int:
        return 0 if self.sharing is None else int(self.sharing.process_index)

    @property
    def rows(self) -> int | None:
        """Number of samples of this rank in a batch, or None if it varies."""
        size = getattr(self.own, "batch_size", None)
        if not isinstance(size, int):
            return None
        is_split = self.sharing is not None and self.sharing.split_batches
        return size // self.world_size if is_split else size

    @property
    def order(self) -> Order | None:
        sampler = self.own.sampler if type(self.own) is BatchSampler else None
        return sampler if isinstance(sampler, Order) else None


def unwrap(batch_sampler: Any, library: Any) -> Chain:
    """Split a batch sampler made by accelerate into its parts.

    Args:
        library: The module ``accelerate.data_loader``.
    """
    sharing, num_skipped = None, 0
    while True:
        if isinstance(batch_sampler, library.SkipBatchSampler):
            num_skipped += batch_sampler.skip_batches
        elif isinstance(batch_sampler, library.BatchSamplerShard) and sharing is None:
            sharing = batch_sampler
        else:
            return Chain(own=batch_sampler, sharing=sharing, num_skipped=num_skipped)
        batch_sampler = batch_sampler.batch_sampler


class RankWalk(EpochIndices):
    """This rank's batches of indices, from the start position of the epoch.

    Args:
        outermost: The batch sampler that the user sees. Its length is the loader's length.
    """

    def __init__(self, outermost: Any, chain: Chain, epoch_state: EpochState) -> None:
        batches = chain.own if chain.sharing is None else chain.sharing
        super().__init__(batches, epoch_state, chain.rows, is_batched=True)
        self._outermost = outermost
        self._chain = chain
        self._global_batch = (chain.rows or 1) * chain.world_size

    @property
    def order(self) -> Order | None:
        return self._chain.order

    @property
    def drawing(self) -> Any:
        return EpochIndices(self._chain.own, self._epoch_state, self._rows, is_batched=True).drawing

    def __len__(self) -> int:
        return len(self._outermost)

    def __iter__(self) -> Iterator[Any]:
        order, start = self.order, self._epoch_state.start
        if order is None:
            return self._without(self._drawn(), start // self._global_batch)
        if self._chain.sharing is None:
            return super().__iter__()
        return self._shared_out(copy.copy(order), start)

    def _shared_out(self, order: Order, start: int) -> Iterator[Any]:
        """Yield this rank's batches from ``start`` on, without iterating over earlier ones.

        accelerate completes the last batch with samples from the first batches of the epoch, which
        it collects on the way. So it is given those batches first, then those from ``start`` on.
        """
        sharing = copy.copy(self._chain.sharing)
        sharing.batch_sampler = _Resumed(self._chain, order, start)
        batches = iter(sharing)
        if start:
            next(batches, None)
        yield from batches

    def positions(self) -> Callable[[int], int]:
        order, rows, chain = self.order, self._rows, self._chain
        if rows is None or (order is not None and order.world_size > 1):
            return super().positions()
        start, first, step = self._epoch_state.start, chain.rank * rows, self._global_batch
        return lambda place: start + place // rows * step + first + place % rows


class _Resumed:
    """The first batches of the epoch (of all ranks), followed by the batches from ``start`` on."""

    def __init__(self, chain: Chain, order: Order, start: int) -> None:
        self.batch_size: int = chain.own.batch_size
        self._drop_last: bool = chain.own.drop_last
        self._order = order
        self._start = start
        self._num_first = 0
        if start:
            self._num_first = (chain.rows or 1) * chain.world_size // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        first = BatchSampler(self._order, self.batch_size, self._drop_last)
        rest = self._order.starting_at(self._start)
        return itertools.chain(
            itertools.islice(first, self._num_first),
            BatchSampler(rest, self.batch_size, self._drop_last),
        )
