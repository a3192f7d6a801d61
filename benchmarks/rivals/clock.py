"""Measurement of the time to the first batch, and of the rate after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def _endless(feed: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from feed


def _run_for(
    batches: Iterator[Any], limit_s: float, use: Callable[[Any], Any]
) -> tuple[int, float]:
    num_batches = 0
    now = start_s = time.perf_counter()
    while now - start_s < limit_s:
        use(next(batches))
        num_batches += 1
        now = time.perf_counter()
    return num_batches, now - start_s


def time_feed(
    make: Callable[[], Iterable[Any]],
    *,
    warm_up_s: float,
    window_s: float,
    check: Callable[[Any], None],
    cpu: Callable[[], float],
    use: Callable[[Any], Any] = lambda batch: batch,
) -> dict[str, float]:
    """Measure the seconds to the first batch, and the batches per second after a warm-up.

    Args:
        check: Checks the first batch. Raises if it is wrong.
        cpu: Returns the CPU time so far of all processes involved.
        use: Processes each batch, as the consumer.
    """
    start_s = time.perf_counter()
    batches = _endless(make())
    first = next(batches)
    first_s = time.perf_counter() - start_s
    check(use(first))
    del first
    _run_for(batches, warm_up_s, use)
    before_s = cpu()
    num_batches, taken_s = _run_for(batches, window_s, use)
    used_s = (cpu() - before_s) / num_batches
    return {"first_s": first_s, "per_s": num_batches / taken_s, "cpu_s": used_s}
