"""Measurement of contenders in turns: medians, spread, ratios and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.cli.loader_timing import Summary, compare, take_turns


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Length of a measurement.

    Args:
        warm_up_s: Warm-up time. See :func:`penstock.cli.loader_timing.time_loader`.
        window_s: Measured time.
    """

    warm_up_s: float = 0.4
    window_s: float = 1.5
    num_images_in_memory: int = 20_000


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of a ratio: at least ``bound``, or at most ``bound`` if less is better."""

    bound: float
    goal: float | None = None
    is_ceiling: bool = False

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.is_ceiling else ratio >= self.bound

    def verdict(self, ratio: float) -> str:
        """Return the target as text, and whether ``ratio`` meets it."""
        if not self.is_met(ratio):
            return f"{self}: missed"
        return f"{self}: ok" + (", goal met" if self.goal and ratio >= self.goal else "")

    def __str__(self) -> str:
        goal = f", goal {self.goal:g}x" if self.goal else ""
        return f"{'at most' if self.is_ceiling else 'at least'} {self.bound:g}x{goal}"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of a table.

    Args:
        turn: Runs one measurement.
        against: Names of the rows to compare with. If there are several, the best one counts.
    """

    name: str
    turn: Callable[[], float]
    against: tuple[str, ...] = ()
    target: Target | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table with its contenders. Less is better if the unit is seconds."""

    key: str
    title: str
    unit: str
    contenders: Sequence[Contender]

    @property
    def is_time(self) -> bool:
        return self.unit == "s"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one contender."""

    name: str
    samples: Sequence[float]
    summary: Summary
    against: str | None = None
    ratio: Summary | None = None
    target: Target | None = None

    @property
    def is_missed(self) -> bool:
        if self.target is None or self.ratio is None:
            return False
        return not self.target.is_met(self.ratio.median)

    def as_record(self) -> dict[str, Any]:
        """Return the row as values for JSON."""
        return {
            "contender": self.name,
            **asdict(self.summary),
            "samples": list(self.samples),
            "against": self.against,
            "ratio": asdict(self.ratio) if self.ratio else None,
            "target": str(self.target) if self.target else None,
            "is_met": not self.is_missed if self.target else None,
        }


def run_case(case: Case, num_turns: int, on_turn: Callable[[str], None]) -> list[Row]:
    """Run all turns, alternating between the contenders."""
    turns = {contender.name: contender.turn for contender in case.contenders}
    samples = take_turns(turns, num_turns, on_turn)
    return [_make_row(case, contender, samples) for contender in case.contenders]


def _make_row(case: Case, contender: Contender, samples: Mapping[str, list[float]]) -> Row:
    own = samples[contender.name]
    against = ratio = None
    if contender.against:
        best = min if case.is_time else max
        against = best(contender.against, key=lambda name: Summary.of(samples[name]).median)
        ratio = compare(own, samples[against])
    return Row(
        name=contender.name,
        samples=own,
        summary=Summary.of(own),
        against=against,
        ratio=ratio,
        target=contender.target,
    )
