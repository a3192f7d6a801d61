"""Randomness of cached samples: a function of the cache's seed and the index alone.

A sample that draws is frozen in a cache. Which worker computes it, in which epoch and at which
position depends on restarts and on what the cache holds already. So while it is computed, the
generators (the global ones, and those of the dataset) are set from the index, and put back after
it. A read of a cache then gives the same sample and moves no generator, whether the sample was
there or not, and what is drawn after it is the same either way.

    a dataset that drew nothing so far   compute, check that no generator has moved
    one that draws                       save the generators, set them, compute, put them back
    threads that load at the same time   compute; if a generator has moved, the loader loads the
                                         run again, one thread at a time

Caches may lie inside each other, and a sample may read several.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from typing import Any

from penstock.order.dataset_generators import DatasetGenerators
from penstock.order.rng import active
from penstock.order.sample_randomness import SampleRandomness


class CacheRandomness:
    """Computes the samples of one cache.

    Args:
        dataset: Whose samples are computed.
        key: From :func:`make_cache_key`.
        has_drawn: A sample is known to have drawn; None: none was observed yet.

    Called from: any process and thread that reads the cache. Nothing here is bound to the process:
    a pickled copy computes the same.

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

    # No __dict__, and not searched for generators: what is kept here is not the user's.
    __slots__ = ("__weakref__", "_dataset", "_get", "_has_drawn", "_idle", "_key")
    draws_nothing = True

    def __init__(self, dataset: Any, key: int, has_drawn: bool | None = None) -> None:
        self._dataset, self._key, self._has_drawn = dataset, key, has_drawn
        self._get = functools.partial(operator.getitem, dataset)
        self._idle = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheRandomness, (self._dataset, self._key, self._has_drawn)

    def compute(self, index: Any, row: int) -> Any:
        """``dataset[index]``, drawing what belongs to ``row``. Moves no generator.

        Raises:
            UnexpectedDraw: It drew while other threads load. The loader loads the run again.
        """
        # A stack for each thread: a dataset may read its own cache while it computes a sample.
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
        # The first sample of a new cache finds the dataset's generators as the user left them.
        is_new = self._has_drawn is None
        own = DatasetGenerators(self._dataset)
        randomness = SampleRandomness(self._key, dataset_generators=own, keeps_first=is_new)
        if self._has_drawn is False:
            randomness.skip_observation()
        return randomness


def make_cache_key(seed: int, name: str, length: int) -> int:
    """64 bits for a cache. Caches of other classes, or of other lengths, have other numbers.

    Args:
        seed: The user's.
        name: Of the dataset's class.
    """
    text = f"{seed}\n{name}\n{length}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
