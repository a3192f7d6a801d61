"""What is wrong, why it matters, and the line that cures it: one record for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["harm", "slow", "note"]

_ORDER: tuple[Severity, ...] = ("harm", "slow", "note")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is not as it should be.

    Args:
        code: A name for programs, as in ``"shm-small"``.
        severity: ``"harm"`` breaks a run or its results, ``"slow"`` wastes time or memory,
            ``"note"`` is worth knowing.
        what: What was found, with values.
        why: What it does to whom.
        cure: A line to paste.
        where: The file and line at fault, where there is one.

    Example:
        >>> problem = Problem(code="x", severity="note", what="a", why="b", cure="c")
        >>> problem.to_dict()["cure"]
        'c'
    """

    code: str
    severity: Severity
    what: str
    why: str
    cure: str
    where: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """Plain values, for JSON."""
        return asdict(self)


def worst_first(problems: Iterable[Problem]) -> list[Problem]:
    """Harm, then what is slow, then notes; each kind in the order it was found."""
    return sorted(problems, key=lambda problem: _ORDER.index(problem.severity))
