"""``penstock.rng()``: a NumPy Generator for the sample that is being loaded.

    SampleRandomness, before a sample   active.rng = rng; rng.position = position
    the user's code in the sample       penstock.rng() -> Generator of (seed, epoch, position)
    SampleRandomness, after the sample  rng.position = OUTSIDE
    AsyncSamples, before a sample       of_task: a context variable of the sample's task

The Generator is a Philox. Its key is computed from (seed, epoch) and its counter is set to the
position, so each sample has its own 2**128 numbers. Each thread has one Generator. It is reset for
each sample that calls ``rng()``, which takes 2.5 microseconds. Creating a Generator takes 20.
Samples that do not call ``rng()`` have no overhead.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import numpy as np

from penstock.order.keys import MASK, RNG_STREAM, make_key, mix64

UNKNOWN = -1
"""The position in an unseeded run without positions. Calling rng() makes the run invalid."""
_GIVEN = -2
"""The generator of this sample is already set up."""
OUTSIDE = -3
"""No sample of this loader is being loaded."""


class SampleRng:
    """The generators of a loader's samples in one thread, created on first use.

    Used with :data:`active`. Entering a sample is one comparison and one assignment, because it
    happens for every sample.
    """

    __slots__ = ("_generator", "_key", "_state", "is_shared", "position", "was_asked")

    def __init__(self) -> None:
        self.position = OUTSIDE
        self.was_asked = False
        self.is_shared = False
        """True while other threads load samples. No generator can be set up then."""
        self._generator: np.random.Generator | None = None
        self._key = (0, 0)

    def begin(self, seed: int, epoch: int) -> None:
        """Switch to a different epoch."""
        key = make_key(RNG_STREAM, seed, epoch & MASK)
        self._key = (key, mix64(key))
        self._generator = None

    def at(self, position: int) -> SampleRng:
        """Return the generators of one sample, for samples that are in flight together."""
        alone = SampleRng()
        alone._key, alone.position = self._key, position
        return alone

    def mark(self) -> Any:
        """Return a value that changes with each draw of the sample."""
        if self._generator is None:
            return None
        state: Any = self._generator.bit_generator.state
        return state["state"]["counter"].tobytes(), state["buffer_pos"], state["has_uint32"]

    def generator(self) -> np.random.Generator:
        """Return the sample's generator. Later calls in the same sample continue its stream."""
        self.was_asked = True
        if self._generator is None:
            bits = np.random.Philox(key=np.array(self._key, dtype=np.uint64))
            self._state: Any = bits.state
            self._generator = np.random.Generator(bits)
        if self.position != _GIVEN:
            # The counter's two lower words count the numbers drawn within this sample.
            self._state["state"]["counter"][2] = self.position & MASK
            self._generator.bit_generator.state = self._state
            self.position = _GIVEN
        return self._generator


class _Active(threading.local):
    rng: SampleRng | None = None


active = _Active()
"""``active.rng`` belongs to the loader whose samples this thread loads, or loaded last."""
of_task: ContextVar[SampleRng | None] = ContextVar("penstock_rng", default=None)
"""The generators of the async sample that the current task loads."""


def rng() -> np.random.Generator:
    """Return a NumPy Generator for the sample that is being loaded.

    Inside ``dataset[i]`` or a ``collate_fn`` under a Penstock loader, its numbers are a function of
    the loader's seed, the epoch and the position, in any worker. Call ``rng()`` in each sample and
    do not keep the result, because the object is reused for the next sample.

    Everywhere else (a sample loaded directly, a different loader, ``randomness="worker"``, an
    iterable dataset) it returns a new Generator seeded from NumPy's global generator, which
    ``np.random.seed`` and ``penstock.seed_all`` control.

    Example:
        >>> import penstock
        >>> class Noise:
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, i):
        ...         return penstock.rng().integers(100)
        >>> import torch
        >>> for num_workers in (0, 2):
        ...     _ = torch.manual_seed(0)
        ...     print(next(iter(penstock.DataLoader(Noise(), 4, num_workers=num_workers))).tolist())
        [57, 49, 59, 99]
        [57, 49, 59, 99]
    """
    current = active.rng
    if current is None or current.position == OUTSIDE:
        current = of_task.get()
    if current is None:
        seeds = np.random.randint(0, 1 << 32, size=4, dtype=np.uint64)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds.tolist())))
    return current.generator()
