"""Results of planning: choices with their reasons, and problems with their fixes.

Tested by ``tests/unit/planning/test_decisions.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from penstock.planning.quantities import size

Source = Literal["asked", "measured", "rule"]
Severity = Literal["harm", "slow", "note"]

_NO_ARGUMENTS = ("start_method", "threads_per_worker", "slot_memory")
_SEVERITIES: tuple[Severity, ...] = ("harm", "slow", "note")


def label(name: str) -> str:
    """Return the name of a choice as shown: words, if ``DataLoader`` has no such argument.

    Example:
        >>> label("start_method"), label("num_workers")
        ('start method', 'num_workers')
    """
    return name.replace("_", " ") if name in _NO_ARGUMENTS else name


def value_text(name: str, value: Any) -> str:
    """Return the value of a choice as shown: memory with its unit, ``-`` for None.

    Example:
        >>> value_text("slot_memory", 3 << 20), value_text("start_method", None)
        ('3 MiB', '-')
    """
    if value is None:
        return "-"
    return size(value) if name == "slot_memory" else str(value)


class Choice(NamedTuple):
    """One decision.

    Example:
        >>> print(Choice(2, "two cores", "rule"))
        2 (rule: two cores)
    """

    value: Any
    reason: str
    source: Source

    def __str__(self) -> str:
        return f"{self.value} ({self.source}: {self.reason})"


class Plan(NamedTuple):
    """Settings of a loader on this machine. ``str(plan)`` is a table.

    Args:
        slot_memory: Bytes of shared memory for batches in flight. None until the first batch.
        warnings: Given options that cause problems on this machine, each with the reason.
        notes: Unusual events since the workers started.
    """

    pool: Choice
    start_method: Choice
    num_workers: Choice
    prefetch_factor: Choice
    persistent_workers: Choice
    pin_memory: Choice
    threads_per_worker: Choice
    slot_memory: Choice
    randomness: Choice
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def choices(self) -> dict[str, Choice]:
        """The choices by name, in display order."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, Choice)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        shown: dict[str, Any] = {
            name: {"value": choice.value, "reason": choice.reason, "source": choice.source}
            for name, choice in self.choices.items()
        }
        return {**shown, "warnings": list(self.warnings), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Return the plan that :meth:`to_dict` described."""
        lists = {name: tuple(values[name]) for name in ("warnings", "notes")}
        choices = {name: Choice(**value) for name, value in values.items() if name not in lists}
        return cls(**{**choices, **lists})  # type: ignore[arg-type]

    def __str__(self) -> str:
        width = max(len(name) for name in self.choices)
        rows = [
            f"{label(name):<{width}}  {value_text(name, value)} ({source}: {reason})"
            for name, (value, reason, source) in self.choices.items()
        ]
        rows += [f"warning: {text}" for text in self.warnings]
        return "\n".join([*rows, *(f"note: {text}" for text in self.notes)])


class Problem(NamedTuple):
    """A problem found on a machine.

    Args:
        code: An identifier for programs, such as ``"shm-small"``.
        severity: ``"harm"`` breaks a run or its results, ``"slow"`` wastes time or memory,
            ``"note"`` is for information.
        what: What was found, with values.
        why: Its effect.
        cure: The fix, as a line to paste.
        where: The file and line at fault, if there is one.

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
        """Return plain values, for JSON."""
        return self._asdict()


def worst_first(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems by severity: harm, slow, note. The sort is stable."""
    return sorted(problems, key=lambda problem: _SEVERITIES.index(problem.severity))
