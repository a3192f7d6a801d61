"""Comparison of two loaders: which is faster, by how much, and whether that exceeds the noise.

Used by ``penstock demo``. It works on plain records, so tests need no loaders.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from penstock.cli.loader_timing import LoaderTiming, Summary, compare

NOISE = 0.05
"""Smaller differences are noise on an ordinary machine, even if the turns are similar."""

Timings = Sequence[LoaderTiming]


@dataclass(frozen=True, kw_only=True)
class LoaderComparison:
    """Timings of both loaders, turn by turn.

    Args:
        ours: Penstock's loader.
        theirs: PyTorch's loader. Empty if it failed.
        step_s: Time of the step after each batch, or 0 if batches are only loaded.
        failure: The error of PyTorch's loader.
    """

    batch_size: int
    ours: Timings
    theirs: Timings
    step_s: float = 0.0
    failure: str | None = None

    def rates(self, timings: Timings) -> list[float]:
        """Return the samples per second of each turn."""
        return [timing.batches_per_s * self.batch_size for timing in timings]

    def median_rate(self, timings: Timings) -> float:
        return statistics.median(self.rates(timings))


def print_comparison(console: Console, found: LoaderComparison) -> None:
    """Print the rates and the conclusion."""
    for whose, timings in (("Penstock", found.ours), ("PyTorch", found.theirs)):
        if timings:
            rates = _as_rate(found.rates(timings))
            first = _as_seconds([timing.first_batch_s for timing in timings])
            console.print(f"  {whose:<10}{rates} images/s, first batch after {first}")
    if found.failure is not None:
        console.print(f"  PyTorch   failed: {found.failure}", markup=False)
    else:
        console.print(f"  {conclude(found)}")


def conclude(found: LoaderComparison) -> str:
    """Return the conclusion of the comparison.

    Example:
        >>> same = [LoaderTiming(first_batch_s=0.1, batches_per_s=rate) for rate in (10.0, 11.0)]
        >>> print(conclude(LoaderComparison(batch_size=1, ours=same, theirs=same)))
        No difference beyond the noise: most of the time is spent in the dataset, whose code is \
the same for both.
    """
    ratio = compare(found.rates(found.ours), found.rates(found.theirs))
    if ratio.low <= 1 <= ratio.high or abs(ratio.median - 1) < NOISE:
        if found.step_s:
            ideal = found.batch_size / found.step_s
            return (
                f"The step is the limit for both ({ideal:,.0f} images/s at most): the batches are "
                "ready in time, and faster loading would not help."
            )
        return (
            "No difference beyond the noise: most of the time is spent in the dataset, whose code "
            "is the same for both."
        )
    if ratio.median > 1:
        return f"Penstock is {ratio.median:.2f} times as fast, and faster in every turn."
    return f"PyTorch is {1 / ratio.median:.2f} times as fast here, and faster in every turn."


def _as_rate(rates: Sequence[float]) -> str:
    summary = Summary.of(rates)
    return f"{summary.median:,.0f} ({summary.low:,.0f} to {summary.high:,.0f})"


def _as_seconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s"
