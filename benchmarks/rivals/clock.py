"""How long until the first batch, and how many a second after that?"""

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
    """Seconds to the first batch, and batches a second once it has been running for a while.

    Args:
        check: Looks at the first batch; raises if it is wrong.
        cpu: The processor time so far, of all processes that take part.
        use: What the consumer does with each batch.
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
