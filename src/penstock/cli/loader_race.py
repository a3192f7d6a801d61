"""Two loaders raced: who was faster, by how much, and is it more than noise?

Built from plain records, so nothing has to be raced to test it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.cli.stopwatch import Lap, Summary, compare

NOISE = 0.05
"""Gaps below this mean nothing on an ordinary machine, however alike the turns are."""


@dataclass(frozen=True, kw_only=True)
class Race:
    """What both loaders did, turn by turn.

    Args:
        num_workers: What both raced with.
        alone: Our loader without workers.
        cold_s: Our first batch in this process, fork server included; None without workers.
        theirs: Empty when PyTorch's loader failed.
        failure: What it failed with.
    """

    batch_size: int
    num_workers: int
    cold_s: float | None
    ours: Sequence[Lap]
    theirs: Sequence[Lap]
    alone: Sequence[Lap] = ()
    failure: str | None = None

    def rates(self, laps: Sequence[Lap]) -> list[float]:
        return [lap.batches_per_s * self.batch_size for lap in laps]

    def first_batches(self, laps: Sequence[Lap]) -> list[float]:
        return [lap.first_batch_s for lap in laps]


def describe_race(console: Console, race: Race) -> None:
    """Print the table, then say in words what it shows."""
    table = Table("median (lowest to highest)", "Penstock", "PyTorch")
    table.add_row(
        "images a second",
        _as_rate(Summary.of(race.rates(race.ours))),
        _as_rate(Summary.of(race.rates(race.theirs))) if race.theirs else "failed",
    )
    if race.cold_s is not None:
        first = f"{race.theirs[0].first_batch_s:.2f} s" if race.theirs else "failed"
        table.add_row("first batch, first loader", f"{race.cold_s:.2f} s", first)
    table.add_row(
        "first batch, later loaders" if race.cold_s is not None else "first batch",
        _as_seconds(Summary.of(race.first_batches(race.ours))),
        _as_seconds(Summary.of(race.first_batches(race.theirs))) if race.theirs else "failed",
    )
    console.print(table)
    if race.failure is not None:
        console.print(f"PyTorch's DataLoader failed here: {race.failure}", markup=False)
    else:
        for sentence in conclude(race):
            console.print(sentence)
    if race.alone:
        console.print(_against_none(race))


def _against_none(race: Race) -> str:
    """What workers bring, beside none."""
    gain = compare(race.rates(race.ours), race.rates(race.alone))
    alone = _as_rate(Summary.of(race.rates(race.alone)))
    return (
        f"Workers: {race.num_workers} load {gain.median:.2f} times as fast as none "
        f"({alone} images a second)."
    )


def conclude(race: Race) -> list[str]:
    """What the race shows, one sentence a finding, whoever won.

    Example:
        >>> laps = [Lap(first_batch_s=0.1, batches_per_s=rate) for rate in (10.0, 11.0, 12.0)]
        >>> race = Race(batch_size=1, num_workers=0, cold_s=None, ours=laps, theirs=laps)
        >>> print(*conclude(race), sep="\\n")
        Loading: no difference beyond noise.
        First batch: no difference beyond noise.
    """
    rate = compare(race.rates(race.ours), race.rates(race.theirs))
    delay = compare(race.first_batches(race.theirs), race.first_batches(race.ours))
    sentences = [
        f"Loading: {_winner(rate, 'faster')}",
        f"First batch: {_winner(delay, 'sooner')}",
    ]
    if race.cold_s is not None and race.cold_s > 2 * race.first_batches(race.theirs)[0]:
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


def _as_rate(summary: Summary) -> str:
    return f"{summary.median:,.0f} ({summary.low:,.0f} to {summary.high:,.0f})"


def _as_seconds(summary: Summary) -> str:
    return f"{summary.median:.2f} s ({summary.low:.2f} to {summary.high:.2f})"
