"""Prints how two loaders compare: which is faster, by how much, and whether that is beyond noise.

Called from: ``penstock demo``. Built from plain records, so a test needs no loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.cli.loader_timing import LoaderTiming, Summary, compare

NOISE = 0.05
"""Gaps below this mean nothing on an ordinary machine, however alike the turns are."""

Timings = Sequence[LoaderTiming]


@dataclass(frozen=True, kw_only=True)
class LoaderComparison:
    """What both loaders did, turn by turn.

    Args:
        num_workers: Of both loaders.
        cold_s: Our first batch in this process, fork server included; None without workers.
        ours: Our loader.
        theirs: PyTorch's loader; empty when it failed.
        alone: Our loader without workers.
        failure: What PyTorch's loader failed with.
    """

    batch_size: int
    num_workers: int
    cold_s: float | None
    ours: Timings
    theirs: Timings
    alone: Timings = ()
    failure: str | None = None

    def rates(self, timings: Timings) -> list[float]:
        """Samples a second in each turn."""
        return [timing.batches_per_s * self.batch_size for timing in timings]


def print_comparison(console: Console, found: LoaderComparison) -> None:
    """Print the table, then say in words what it shows."""
    table = Table("median (lowest to highest)", "Penstock", "PyTorch")
    both = (found.ours, found.theirs)
    table.add_row(
        "images a second",
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
        console.print(f"PyTorch's DataLoader failed here: {found.failure}", markup=False)
    else:
        for sentence in conclude(found):
            console.print(sentence)
    if found.alone:
        alone = found.rates(found.alone)
        gain = compare(found.rates(found.ours), alone).median
        console.print(
            f"Workers: {found.num_workers} load {gain:.2f} times as fast as none "
            f"({_as_rate(alone)} images a second)."
        )


def conclude(found: LoaderComparison) -> list[str]:
    """What the comparison shows, one sentence a finding, whoever won.

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
            "The first loader of a program is later than PyTorch's: a clean process is started "
            "once, from which all later workers are forked."
        )
    return sentences


def _winner(ratio: Summary, better: str) -> str:
    """Who won, where ``ratio`` above 1 speaks for us."""
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
