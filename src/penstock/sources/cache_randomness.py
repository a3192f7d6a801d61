"""Randomness of cached samples, which depends only on the cache's seed and the index.

A cached sample freezes the random numbers that it drew. The worker, epoch and position at which it
is computed depend on restarts and on what is already cached. So the generators (the global ones and
those of the dataset) are set from the index before a sample is computed, and restored afterwards. A
read of a cache then gives the same sample and leaves all generators unchanged, whether the sample
was cached or not. Later draws are the same in both cases.

    a dataset that has drawn nothing so far   compute, check that no generator has moved
    a dataset that draws                      save, set, compute, restore the generators
    threads that load at the same time        compute; if a generator has moved, the loader loads
                                              the run again, one thread at a time

Caches can be nested, and a sample can read several caches.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from penstock.order.dataset_generators import DatasetGenerators
from penstock.order.event_loop import sample_getter
from penstock.order.rng import active
from penstock.order.sample_randomness import SampleRandomness


class CacheRandomness:
    """Computes the samples of one cache.

    Args:
        dataset: The dataset whose samples are computed.
        key: From :func:`make_cache_key`.
        has_drawn: True if a sample is known to have drawn. None if none was observed yet.

    Used in any process and thread that reads the cache. It holds no state of the process, so a
    pickled copy computes the same samples.

    Example:
        >>> import random
        >>> class Noise:
        ...     def __getitem__(self, index):
        ...         return random.random()
        >>> randomness = CacheRandomness(Noise(), key=0)
        >>> random.seed(1); expected = random.random(); random.seed(1)
        >>> first = randomness.compute(5, 5)
        >>> (random.random() == expected, first == randomness.compute(5, 5))
        (True, True)
    """

    # No __dict__, and not searched for generators, because nothing in here is the user's.
    __slots__ = ("__weakref__", "_dataset", "_get", "_has_drawn", "_idle", "_key")
    draws_nothing = True

    def __init__(self, dataset: Any, key: int, has_drawn: bool | None = None) -> None:
        self._dataset, self._key, self._has_drawn = dataset, key, has_drawn
        self._get = sample_getter(dataset)
        self._idle = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheRandomness, (self._dataset, self._key, self._has_drawn)

    def compute(self, index: Any, row: int) -> Any:
        """Return ``dataset[index]`` with the random numbers of ``row``. Moves no generator.

        Raises:
            UnexpectedDraw: It drew while other threads were loading. The loader loads the run
                again.
        """
        # One stack per thread, because a dataset may read its own cache while computing a sample.
        idle: list[SampleRandomness] = vars(self._idle).setdefault("stack", [])
        randomness = idle.pop() if idle else self._make_randomness()
        try:
            if active.rng is not None and active.rng.is_shared:
                return self._compute_shared(randomness, index, row)
            return randomness.call_many_preserved(self._get, [index], row)[0]
        finally:
            self._has_drawn = bool(self._has_drawn) or randomness.has_drawn
            randomness.skip_observation()
            idle.append(randomness)

    def _compute_shared(self, randomness: SampleRandomness, index: Any, row: int) -> Any:
        randomness.begin_unseeded(is_shared=True)
        try:
            return next(randomness.unseeded_samples(self._get, [(row, index)]))
        finally:
            randomness.end_unseeded()

    def _make_randomness(self) -> SampleRandomness:
        # The first sample of a new cache sees the dataset's generators as the user set them.
        is_new = self._has_drawn is None
        own = DatasetGenerators(self._dataset)
        randomness = SampleRandomness(self._key, dataset_generators=own, keeps_first=is_new)
        if self._has_drawn is False:
            randomness.skip_observation()
        return randomness


def make_cache_key(seed: int, name: str, length: int) -> int:
    """Return a 64-bit key for a cache. It depends on the dataset's class name and length.

    Args:
        seed: The user's seed.
        name: Name of the dataset's class.
    """
    text = f"{seed}\n{name}\n{length}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
