"""``penstock.rng()``: a NumPy Generator that belongs to the sample being loaded.

    SampleRandomness, before a sample   active.rng = rng; rng.position = position
    the user's code in the sample       penstock.rng() -> Generator of (seed, epoch, position)
    SampleRandomness, after it          rng.position = OUTSIDE

The Generator is Philox, keyed by (seed, epoch), its counter set to the position: each sample has
2**128 numbers of its own. One object per thread is set anew for each sample that asks (2.5
microseconds; making one costs 20). Samples that do not ask cost nothing.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from penstock.order.keys import MASK, RNG_STREAM, make_key, mix64

UNKNOWN = -1
"""The position in an unseeded run without positions: asking for rng() makes the run invalid."""
_GIVEN = -2
"""This sample has its generator already."""
OUTSIDE = -3
"""No sample of this loader is being loaded."""


class SampleRng:
    """The generators of a loader's samples in one thread, made when first asked for.

    Pairs with :data:`active`. Entering a sample is one comparison and one assignment, because it
    happens for each of them.
    """

    __slots__ = ("_generator", "_key", "_state", "is_shared", "position", "was_asked")

    def __init__(self) -> None:
        self.position = OUTSIDE
        self.was_asked = False
        self.is_shared = False
        """Other threads load samples now: no generator may be set."""
        self._generator: np.random.Generator | None = None
        self._key = (0, 0)

    def begin(self, seed: int, epoch: int) -> None:
        """Turn to another epoch."""
        key = make_key(RNG_STREAM, seed, epoch & MASK)
        self._key = (key, mix64(key))
        self._generator = None

    def generator(self) -> np.random.Generator:
        """The sample's generator; asked again within the sample, the same one, further on."""
        self.was_asked = True
        if self._generator is None:
            bits = np.random.Philox(key=np.array(self._key, dtype=np.uint64))
            self._state: Any = bits.state
            self._generator = np.random.Generator(bits)
        if self.position != _GIVEN:
            # The counter's two lower words count this sample's own numbers.
            self._state["state"]["counter"][2] = self.position & MASK
            self._generator.bit_generator.state = self._state
            self.position = _GIVEN
        return self._generator


class _Active(threading.local):
    rng: SampleRng | None = None


active = _Active()
"""``active.rng``: of the loader whose samples this thread loads, or loaded last."""


def rng() -> np.random.Generator:
    """A NumPy Generator of the sample that is being loaded: new code's way to draw.

    Inside ``dataset[i]`` (or a ``collate_fn``) under a Penstock loader it is a function of the
    loader's seed, the epoch and the position, whatever worker runs it. Ask for it in each sample
    and do not keep it: the object is used again for the next one.

    Anywhere else (a sample loaded by hand, another loader, ``randomness="worker"``, an iterable
    dataset) it is a new Generator seeded from NumPy's global one, which ``np.random.seed`` and
    ``penstock.seed_all`` decide.

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
        seeds = np.random.randint(0, 1 << 32, size=4, dtype=np.uint64)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds.tolist())))
    return current.generator()
