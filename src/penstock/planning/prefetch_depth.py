"""Prefetch depth and batch splitting, adapted to measured times."""

from __future__ import annotations

SPLIT_FROM_S = 0.05
"""A batch that takes one worker at least this long is split over all workers."""
PART_S = 0.004
"""A part of a batch takes a worker at least this long for each worker. There are then at most 250
parts a second, and each costs worker and training process 0.3 ms. With 64 workers on 2 cores and
samples that wait for 18 ms and compute for 2 ms, 0.5 ms gave 0.88 of the rate."""
NAP_BELOW_S, NAP_S = 0.001, 0.0003
"""While fast batches are in flight, sleep briefly before checking for replies. Several replies are
then handled together, and workers are not interrupted for each one. With tiny samples on 2 cores:
1.2 times the rate with ``randomness="worker"``, no clear gain with ``"sample"``."""
DEPTH_TARGET_S = 0.02
"""Without a given prefetch_factor, each worker is leased about this much work."""
MIN_DEPTH, MAX_DEPTH = 2, 16
MAX_DEPTH_BYTES = 32 << 20
"""With more slots than this, a slot is out of the cache when it is reused. On 9.6 MB batches, depth
10 measured 0.7 times the rate of depth 2 (16-core x86-64)."""


class PrefetchDepth:
    """Decides the size of the next leases from measured times.

    Args:
        asked_depth: Batches in flight per worker. None: chosen from measured times.
        in_flight: Async samples that a worker has in flight. It gets at least the batches of these,
            and as many more, but at least two. 0 if the dataset is not async.
        max_bytes: Memory for batches. It limits a larger ``in_flight`` than the given one.
        can_split: True if several workers can fill one batch.
    """

    def __init__(
        self,
        asked_depth: int | None,
        num_workers: int,
        in_flight: int = 0,
        *,
        max_bytes: int = 0,
        can_split: bool = True,
    ) -> None:
        self._max_bytes = max_bytes
        self._asked_depth = asked_depth
        self._in_flight = in_flight
        self._can_split = can_split
        self._num_workers = num_workers
        self._sample_s = 0.0
        self._num_rows = self._num_batches = 0
        self._num_parts = 1
        """Parts of a batch. Not known if the depth was given."""
        self._depth = asked_depth if asked_depth is not None else MIN_DEPTH

    @property
    def depth(self) -> int:
        """Batches in flight per worker."""
        if not self._in_flight or not self._num_batches:
            return self._depth
        return max(self._depth, self._depth_for(self._in_flight))

    def _depth_for(self, in_flight: int) -> int:
        """Return the batches for async samples. Those that wait as long may all end at once."""
        num_batches = -(-in_flight // self.rows_per_batch)
        return num_batches + max(2, num_batches)

    def raise_in_flight(self, in_flight: int, batch_bytes: int) -> bool:
        """Allow for more async samples in flight. Returns False if they take too much memory.

        A batch needs its slot, and as much again in the worker for the samples that are loaded.
        """
        if in_flight > self._in_flight:
            num_batches = self._depth_for(in_flight) * self._num_workers
            if 2 * num_batches * batch_bytes > self._max_bytes:
                return False
            self._in_flight = in_flight
        return True

    def num_batches(self, num_workers: int) -> int:
        """Return the number of batches in flight in these workers together."""
        return batches_ahead(self.depth * num_workers, self._num_parts, num_workers)

    def open_batch(self, rows: int) -> None:
        """Record a batch of ``rows`` samples that is about to be leased."""
        self._num_rows += rows
        self._num_batches += 1

    @property
    def rows_per_batch(self) -> int:
        return max(1, self._num_rows // max(1, self._num_batches))

    @property
    def batch_s(self) -> float:
        """Time a worker needs for a batch. 0 before the first measurement."""
        return self._sample_s * self.rows_per_batch

    def note(self, busy_ns: int, rows: int) -> None:
        """Record that a worker took ``busy_ns`` for ``rows`` samples."""
        measured = busy_ns * 1e-9 / rows
        self._sample_s += (measured - self._sample_s) * (0.2 if self._sample_s else 1.0)

    def adapt(self, batch_bytes: int) -> None:
        """Choose the depth again, given the size of a batch."""
        if self._asked_depth is not None or not self._num_batches:
            return
        depth = min(MAX_DEPTH, max(MIN_DEPTH, int(DEPTH_TARGET_S / max(self.batch_s, 1e-6))))
        if batch_bytes:
            fitting = MAX_DEPTH_BYTES // (batch_bytes * self._num_workers)
            depth = max(MIN_DEPTH, min(depth, fitting))
        self._depth = depth
        if not self._in_flight:
            self._num_parts = self.num_parts(self.rows_per_batch)

    def num_parts(self, rows: int, *, is_first: bool = False) -> int:
        """Return the number of parts a batch is split into.

        The first batch is split so that it arrives early. Slow batches are split so that one slow
        sample does not delay the others.
        """
        batch_s = self._sample_s * rows
        if self._can_split and (batch_s >= SPLIT_FROM_S or (is_first and batch_s == 0.0)):
            return num_parts(batch_s, rows, self._num_workers)
        return 1

    def nap_s(self, num_open: int) -> float:
        """Return the time to sleep before checking for replies."""
        is_quick = 0 < self.batch_s < NAP_BELOW_S
        return NAP_S if is_quick and num_open > self._num_workers else 0.0


def num_parts(batch_s: float, rows: int, num_workers: int) -> int:
    """Return into how many parts a batch is split that takes ``batch_s`` (0: unknown).

    Example:
        >>> num_parts(0.3, 16, 2), num_parts(0.3, 16, 128), num_parts(0.3, 16, 0)
        (2, 1, 1)
    """
    most = int(batch_s / (PART_S * max(1, num_workers))) if batch_s else rows
    return max(1, min(num_workers, rows, most))


def batches_ahead(most: int, parts: int, num_workers: int) -> int:
    """Return how many batches are in flight, with a prefetch depth of ``most`` batches.

    Each worker has a part of each batch that is split. So fewer batches keep all of them busy, and
    a slot of memory is saved for each batch.

    Example:
        >>> batches_ahead(16, 1, 8), batches_ahead(16, 8, 8)
        (16, 9)
    """
    return most if parts == 1 else min(most, num_workers + 1)
