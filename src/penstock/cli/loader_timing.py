"""Timing of loaders in alternating turns, with medians and their spread.

The speed of a machine drifts, because it warms up and other programs use it. So the loaders take
turns within one run, in an order that is reversed each time, and are compared turn by turn.

Tested by ``tests/unit/cli/test_loader_comparison.py``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class LoaderTiming:
    """The speed of a loader in one turn."""

    first_batch_s: float
    batches_per_s: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The median, lowest and highest value of several turns.

    Example:
        >>> Summary.of([3.0, 1.0, 2.0])
        Summary(median=2.0, low=1.0, high=3.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        return cls(median=statistics.median(samples), low=min(samples), high=max(samples))


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Return the ratio of ours to theirs, computed turn by turn to cancel drift.

    Example:
        >>> compare([4.0, 2.0, 6.0], [2.0, 1.0, 2.0])
        Summary(median=2.0, low=2.0, high=3.0)
    """
    return Summary.of([mine / other for mine, other in zip(ours, theirs, strict=True)])


def take_turns(
    contenders: Mapping[str, Callable[[], _T]],
    num_turns: int,
    on_turn: Callable[[str], None] = lambda name: None,
) -> dict[str, list[_T]]:
    """Call every contender ``num_turns`` times, alternating forward and reverse order.

    Args:
        on_turn: Called with the name of a contender before its turn.

    Example:
        >>> calls = []
        >>> _ = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
        >>> calls
        ['a', 'b', 'b', 'a']
    """
    results: dict[str, list[_T]] = {name: [] for name in contenders}
    for turn in range(num_turns):
        for name in contenders if turn % 2 == 0 else reversed([*contenders]):
            on_turn(name)
            results[name].append(contenders[name]())
    return results


def time_loader(
    make: Callable[[], Iterable[Any]], *, warm_up_s: float, window_s: float, step_s: float = 0.0
) -> LoaderTiming:
    """Measure the time to the first batch of a new loader, and its rate after a warm-up.

    Args:
        make: Creates the loader. Its duration counts towards the first batch.
        warm_up_s: How long to run after the first batch before measuring the rate. Batches that the
            workers have already loaded by then would inflate it.
        window_s: How long to measure. If an epoch ends in this time, the next one starts.
        step_s: How long to pause after each batch, as a training step on a GPU does.
    """
    start_s = time.perf_counter()
    batches = _endless(make())
    next(batches)
    first_batch_s = time.perf_counter() - start_s
    _run_for(batches, warm_up_s, step_s)
    num_batches, elapsed_s = _run_for(batches, window_s, step_s)
    return LoaderTiming(first_batch_s=first_batch_s, batches_per_s=num_batches / elapsed_s)


def _run_for(batches: Iterator[Any], limit_s: float, step_s: float) -> tuple[int, float]:
    """Take batches for about ``limit_s``. Returns the number of batches and the elapsed time."""
    num_batches = 0
    now = start_s = time.perf_counter()
    while now - start_s < limit_s:
        next(batches)
        time.sleep(step_s)
        num_batches += 1
        now = time.perf_counter()
    return num_batches, now - start_s


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
