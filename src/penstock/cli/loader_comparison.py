"""Comparison of two loaders: which is faster, by how much, and whether that exceeds the noise.

Used by ``penstock demo``. It works on plain records, so tests need no loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.cli.loader_timing import LoaderTiming, Summary, compare

NOISE = 0.05
"""Smaller differences are noise on an ordinary machine, even if the turns are similar."""

Timings = Sequence[LoaderTiming]


@dataclass(frozen=True, kw_only=True)
class LoaderComparison:
    """Timings of both loaders, turn by turn.

    Args:
        num_workers: Number of workers of both loaders.
        cold_s: Time to Penstock's first batch in this process, including the start of the fork
            server. None without workers.
        ours: Penstock's loader.
        theirs: PyTorch's loader. Empty if it failed.
        alone: Penstock's loader without workers.
        failure: The error of PyTorch's loader.
    """

    batch_size: int
    num_workers: int
    cold_s: float | None
    ours: Timings
    theirs: Timings
    alone: Timings = ()
    failure: str | None = None

    def rates(self, timings: Timings) -> list[float]:
        """Return the samples per second of each turn."""
        return [timing.batches_per_s * self.batch_size for timing in timings]


def print_comparison(console: Console, found: LoaderComparison) -> None:
    """Print the table and the conclusions."""
    table = Table("median (lowest to highest)", "Penstock", "PyTorch")
    both = (found.ours, found.theirs)
    table.add_row(
        "images per second",
        *(_as_rate(found.rates(timings)) if timings else "failed" for timings in both),
    )
    if found.cold_s is not None:
        first = f"{found.theirs[0].first_batch_s:.2f} s" if found.theirs else "failed"
        table.add_row("first batch, first loader", f"{found.cold_s:.2f} s", first)
    table.add_row(
        "first batch, later loaders" if found.cold_s is not None else "first batch",
        *(_as_seconds(_first_batches(timings)) if timings else "failed" for timings in both),
    )
    console.print(table)
    if found.failure is not None:
        console.print(f"PyTorch's DataLoader failed: {found.failure}", markup=False)
    else:
        for sentence in conclude(found):
            console.print(sentence)
    if found.alone:
        alone = found.rates(found.alone)
        gain = compare(found.rates(found.ours), alone).median
        console.print(
            f"Workers: {found.num_workers} load {gain:.2f} times as fast as none "
            f"({_as_rate(alone)} images/s)."
        )


def conclude(found: LoaderComparison) -> list[str]:
    """Return the conclusions of the comparison, one sentence each.

    Example:
        >>> same = [LoaderTiming(first_batch_s=0.1, batches_per_s=rate) for rate in (10.0, 11.0)]
        >>> found = LoaderComparison(
        ...     batch_size=1, num_workers=0, cold_s=None, ours=same, theirs=same
        ... )
        >>> print(*conclude(found), sep="\\n")
        Loading: no difference beyond noise.
        First batch: no difference beyond noise.
    """
    ours, theirs = _first_batches(found.ours), _first_batches(found.theirs)
    rate = compare(found.rates(found.ours), found.rates(found.theirs))
    sentences = [
        f"Loading: {_winner(rate, 'faster')}",
        f"First batch: {_winner(compare(theirs, ours), 'sooner')}",
    ]
    if found.cold_s is not None and found.cold_s > 2 * theirs[0]:
        sentences.append(
            "The first loader of a program starts more slowly than PyTorch's, because Penstock "
            "starts a clean process once. All later workers are forked from it."
        )
    return sentences


def _winner(ratio: Summary, better: str) -> str:
    """Return the conclusion for ``ratio``. A ratio above 1 is in favor of Penstock."""
    if ratio.low <= 1 <= ratio.high or abs(ratio.median - 1) < NOISE:
        return "no difference beyond noise."
    if ratio.median > 1:
        return f"Penstock is {ratio.median:.2f} times {better}."
    return f"PyTorch is {1 / ratio.median:.2f} times {better} here."


def _first_batches(timings: Timings) -> list[float]:
    return [timing.first_batch_s for timing in timings]


def _as_rate(rates: Sequence[float]) -> str:
    summary = Summary.of(rates)
    return f"{summary.median:,.0f} ({summary.low:,.0f} to {summary.high:,.0f})"


def _as_seconds(seconds: Sequence[float]) -> str:
    summary = Summary.of(seconds)
    return f"{summary.median:.2f} s ({summary.low:.2f} to {summary.high:.2f})"
