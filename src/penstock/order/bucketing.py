"""Batches of samples of similar length, as a function of (seed, epoch).

    samples sorted by length, longest first  | bucket 0 | bucket 1 | bucket 2 ...
    samples shuffled within each bucket      | batch batch ...
    order of all batches shuffled

A bucket holds ``bucket_batches`` batches of samples that are adjacent in the sorted order. A batch
therefore needs little padding, and its samples differ in each epoch. The bucket bounds and ``len``
do not depend on the epoch. Any batch can be computed directly. Only the sorted order is stored, at
8 bytes per sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import BadArgument
from penstock.options import check_count, check_seed
from penstock.order.base_order import ShardedOrder
from penstock.order.keys import BATCH_STREAM, BUCKET_STREAM, make_key, mix64
from penstock.order.permutation import Permutation
from penstock.order.ranks import RankShard
from penstock.order.samplers import hash_array

if TYPE_CHECKING:
    import numpy.typing as npt


class BucketedBatches(ShardedOrder):
    """A batch sampler (``batch_sampler=``) that groups samples of similar length.

    With several ranks, each rank takes every ``world_size``-th batch of the same order.

    Args:
        lengths: One integer for each sample.
        batch_size: Number of samples in a batch. Give either this or ``max_tokens``.
        max_tokens: Maximum size of a batch when all its samples are padded to the longest one.
        bucket_batches: Number of batches in a bucket. A larger bucket gives more variety and more
            padding.
        drop_last: Drop the one batch that is not full, which can be anywhere in the epoch, and the
            batches that do not make a complete step of all ranks.
        padding: Repeat batches from the start until all ranks have the same number of batches.

    Example:
        >>> batches = BucketedBatches([5, 1, 9, 2, 8, 1], batch_size=2, bucket_batches=1, seed=0)
        >>> list(batches)
        [[5, 1], [2, 4], [0, 3]]
        >>> batches[1]
        [2, 4]
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        bucket_batches: int = 100,
        seed: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: bool = False,
    ) -> None:
        check_count("bucket_batches", bucket_batches, 1)
        self.seed = check_seed("seed", seed)
        self.batch_size = batch_size
        values = _checked_lengths(lengths)
        limit = _checked_limit(values, batch_size, max_tokens)
        self._samples = np.argsort(-values, kind="stable").astype(np.int64, copy=False)
        self._cut(values[self._samples], limit, bucket_batches)
        num_batches = int(self._batches_before[-1])
        if drop_last and num_batches and len(self._rows(num_batches - 1)) < self._sizes[-1]:
            num_batches -= 1  # only the last bucket can have an incomplete batch
        self._shard = RankShard(
            length=num_batches,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            padding=padding,
        )
        self.set_epoch(epoch)

    def _cut(
        self, lengths: npt.NDArray[np.int64], limit: tuple[int, int | None], bucket_batches: int
    ) -> None:
        """Compute the start, batch size and number of batches of each bucket."""
        batch_size, max_tokens = limit
        firsts, sizes, batches_before, first = [], [], [0], 0
        while first < len(lengths):
            size = batch_size
            if max_tokens is not None:
                size = max_tokens // max(1, int(lengths[first]))
            last = first + size * bucket_batches
            if len(lengths) - last < size * bucket_batches // 2:
                last = len(lengths)  # a small last bucket would give the same batch every epoch
            firsts.append(first)
            sizes.append(size)
            batches_before.append(batches_before[-1] - (first - last) // size)
            first = last
        self._firsts = np.array([*firsts, len(lengths)], dtype=np.int64)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._batches_before = np.array(batches_before, dtype=np.int64)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        key = make_key(BATCH_STREAM, self.seed, self.epoch)
        self._order = Permutation(self.length, key)
        self._shuffles: dict[int, Permutation] = {}

    def _settings(self) -> dict[str, Any]:
        return {"samples": hash_array(self._samples), "buckets": hash_array(self._batches_before)}

    def batch_at(self, position: int) -> list[int]:
        """Return the indices of the batch at ``position`` of the epoch, on any rank."""
        rows = self._rows(self._order.index_at(position))
        bucket = int(np.searchsorted(self._firsts, rows.start, side="right")) - 1
        first = int(self._firsts[bucket])
        shuffle = self._shuffles.get(bucket)
        if shuffle is None:
            key = mix64(make_key(BUCKET_STREAM, self.seed, self.epoch) + bucket)
            shuffle = Permutation(int(self._firsts[bucket + 1]) - first, key)
            self._shuffles[bucket] = shuffle
        places = shuffle.at(np.arange(rows.start - first, rows.stop - first))
        found: list[int] = self._samples[places + first].tolist()
        return found

    def _rows(self, batch: int) -> range:
        """Return the rows of a batch, in the order of samples sorted and shuffled by bucket."""
        bucket = int(np.searchsorted(self._batches_before, batch, side="right")) - 1
        size = int(self._sizes[bucket])
        first = int(self._firsts[bucket]) + (batch - int(self._batches_before[bucket])) * size
        return range(first, min(first + size, int(self._firsts[bucket + 1])))

    def global_position(self, place: int) -> int:
        """Return a number for the first sample of this rank's ``place``-th batch.

        The following samples of the batch have the following numbers. The numbers determine the
        samples' randomness. Apart from padding, each is unique within an epoch.
        """
        return self._rows(self._order.index_at(self._position(place) % self.length)).start

    def __getitem__(self, place: int) -> list[int]:
        return self.batch_at(self._position(place) % self.length)

    def __iter__(self) -> Iterator[list[int]]:
        frozen = copy.copy(self)
        for place in range(len(frozen)):
            yield frozen[place]


def _checked_lengths(lengths: Any) -> npt.NDArray[np.int64]:
    values = np.asarray(lengths)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise BadArgument(
            f"lengths is an array of {values.dtype} with shape {values.shape}; "
            "it must hold one integer for each sample",
            remedy="BucketedBatches([len(text) for text in texts], batch_size=32)",
        )
    values = values.astype(np.int64)
    if values.size and values.min() < 0:
        bad = int(values.argmin())
        raise BadArgument(f"lengths[{bad}]={values[bad]} is negative")
    return values


def _checked_limit(
    lengths: npt.NDArray[np.int64], batch_size: int | None, max_tokens: int | None
) -> tuple[int, int | None]:
    if (batch_size is None) == (max_tokens is None):
        raise BadArgument(
            f"batch_size={batch_size} and max_tokens={max_tokens}: give exactly one of them",
            remedy="BucketedBatches(lengths, batch_size=32)",
        )
    if batch_size is not None:
        return check_count("batch_size", batch_size, 1), None
    max_tokens = check_count("max_tokens", max_tokens, 1)
    if lengths.size and lengths.max() > max_tokens:
        longest = int(lengths.argmax())
        raise BadArgument(
            f"lengths[{longest}]={lengths[longest]} is greater than max_tokens={max_tokens}",
            remedy=f"max_tokens={lengths[longest]}",
        )
    return 0, max_tokens
