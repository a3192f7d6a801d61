"""Randomness of async samples: ``penstock.rng()`` for each, and detection of all other draws.

Samples that are in flight together take turns in one thread. A global generator, or one that the
dataset holds, cannot be set for one of them: whichever continues first would draw its numbers. Only
``penstock.rng()`` belongs to the sample. A draw from any other generator is an error. It is
detected by comparing the states before and after each turn, which takes 3 microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import SharedDraw
from penstock.order.dataset_generators import DatasetGenerators, NamedGenerators
from penstock.order.global_generators import (
    numpy_generator,
    python_generator,
    save_generators,
    state_reads,
    torch_generator,
)
from penstock.order.rng import SampleRng


class DrawMark(NamedTuple):
    """The states of the generators at one moment."""

    python: Any
    numpy: Any
    torch: Any
    reads: tuple[object, object]
    own: list[Any]


class AsyncRandomness:
    """The random numbers of a loader's async samples.

    Args:
        seed: The loader's base seed.
        with_torch: False ignores torch's generator (the user seeded it in worker_init_fn).
        is_worker, states, names: See :class:`DatasetGenerators`.

    Example:
        >>> import random
        >>> randomness = AsyncRandomness(0, dataset=None)
        >>> mark = randomness.mark()
        >>> _ = randomness.rng_at(0, 5).generator().random()
        >>> randomness.moved_since(mark)
        []
        >>> _ = random.random()
        >>> randomness.moved_since(mark)
        ["Python's random module"]
    """

    def __init__(
        self,
        seed: int,
        dataset: Any,
        *,
        with_torch: bool = True,
        is_worker: bool = False,
        states: Mapping[str, Any] | None = None,
        names: NamedGenerators | None = None,
    ) -> None:
        self._seed = seed
        self._epoch: int | None = None
        self._rng = SampleRng()
        self._torch = torch_generator() if with_torch else None
        self._own = DatasetGenerators(dataset, is_worker=is_worker, states=states, names=names)
        python, numpy = python_generator(), numpy_generator()
        self._python, self._numpy = None, None
        if python.is_known and numpy.is_known:
            self._python, self._numpy = python.cells(), numpy.cells()

    def rng_at(self, epoch: int, position: int) -> SampleRng:
        """Return what ``penstock.rng()`` uses in the sample at ``position``."""
        if self._epoch != epoch:
            self._epoch = epoch
            self._rng.begin(self._seed, epoch)
        return self._rng.at(position)

    def mark(self) -> DrawMark:
        """Return the states of all generators that the sample must not draw from."""
        python: Any = None
        numpy: Any = None
        if self._python is None or self._numpy is None:
            python = save_generators()
        else:
            python = [cell.value for cell in self._python]
            numpy = [cell.value for cell in self._numpy]
        torch = None if self._torch is None else self._torch.marks()
        reads = state_reads.of_globals, state_reads.of_torch
        return DrawMark(python, numpy, torch, reads, self._own.save() if self._own else [])

    def moved_since(self, mark: DrawMark) -> list[str]:
        """Return the names of the generators that were drawn from or read since ``mark``."""
        now = self.mark()
        if now == mark:
            return []
        both = self._python is None  # one state for both, so that only the pair is known
        names = {
            "Python's random or NumPy's numpy.random": both and now.python != mark.python,
            "Python's random module": not both and now.python != mark.python,
            "NumPy's numpy.random": not both and now.numpy != mark.numpy,
            "torch's default generator": now.torch != mark.torch,
            "the state of a global generator": now.reads != mark.reads,
        }
        return [name for name, has_moved in names.items() if has_moved] + self._own.moved_since(
            mark.own
        )


def describe_draw(generators: list[str], index: Any) -> SharedDraw:
    """Return the error for a sample that drew from ``generators``."""
    return SharedDraw(
        f"async sample {index!r} drew from {' and '.join(generators)}, which it shares with the "
        "other samples in flight: its numbers depend on which of them continues first",
        likely="a random transform, or a random delay between retries",
        remedy="penstock.rng() in the sample, for example penstock.rng().random(); "
        "random.SystemRandom() for a delay that does not affect the sample; or a dataset without "
        "async",
        sample_index=index,
        generators=generators,
    )


def describe_order(index: Any) -> SharedDraw:
    """Return the error for a sample whose tasks draw in the order in which they continue."""
    return SharedDraw(
        f"several tasks of async sample {index!r} drew from penstock.rng() after an await: their "
        "numbers depend on which of them continues first",
        likely="asyncio.gather in __getitems__, with a random transform after the request",
        remedy="draw before the first await of a task, or in one place, for example numbers = "
        "penstock.rng().random(len(indices)); or async def __getitem__ without __getitems__",
        sample_index=index,
        generators=["penstock.rng()"],
    )
