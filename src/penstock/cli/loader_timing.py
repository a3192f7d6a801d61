"""Times loaders against each other: turns in alternation, and medians with their spread.

A machine's speed drifts: it warms up, and others use it. So contenders take turns inside one run,
the order is turned round every time, and two of them are compared turn by turn.
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
    """How fast a loader was in one turn."""

    first_batch_s: float
    batches_per_s: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The median of some turns, with the lowest and the highest.

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
    """How many times theirs ours is, turn by turn: what slowed one turn slowed both.

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
    """Call every contender ``num_turns`` times, forwards and backwards through the list.

    Args:
        on_turn: Told the name of a contender before its turn.

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
    make: Callable[[], Iterable[Any]], *, warm_up_s: float, window_s: float
) -> LoaderTiming:
    """Time the first batch of a new loader, and its rate once it has been running for a while.

    Args:
        make: Makes the loader; that counts towards the first batch.
        warm_up_s: How long to run after the first batch before counting: workers load ahead, and
            what they had finished by then would count for nothing.
        window_s: How long to count. An epoch that ends meanwhile is followed by the next one.
    """
    start_s = time.perf_counter()
    batches = _endless(make())
    next(batches)
    first_batch_s = time.perf_counter() - start_s
    _run_for(batches, warm_up_s)
    num_batches, elapsed_s = _run_for(batches, window_s)
    return LoaderTiming(first_batch_s=first_batch_s, batches_per_s=num_batches / elapsed_s)


def _run_for(batches: Iterator[Any], limit_s: float) -> tuple[int, float]:
    """Take batches for about ``limit_s``; how many there were, and how long it took."""
    num_batches = 0
    now = start_s = time.perf_counter()
    while now - start_s < limit_s:
        next(batches)
        num_batches += 1
        now = time.perf_counter()
    return num_batches, now - start_s


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
