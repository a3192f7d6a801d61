"""Two runs side by side: what changed, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.trace.accounting import Account


@dataclass(frozen=True, kw_only=True)
class Line:
    """One number of both runs.

    Args:
        is_better: Is the second run's better? None: neither is.
    """

    what: str
    one: float
    other: float
    unit: str
    is_better: bool | None = None

    @property
    def change(self) -> str:
        """How the second relates to the first."""
        if self.unit == "%":
            return f"{(self.other - self.one) * 100:+.0f} points"
        if not self.one:
            return "" if not self.other else "new"
        return f"{self.other / self.one:.2f}x"

    def shown(self, value: float) -> str:
        return f"{value:.0%}" if self.unit == "%" else f"{value:,.4g} {self.unit}".rstrip()


def compare(one: Account, other: Account) -> list[Line]:
    """What two runs differ in.

    Example:
        >>> fast = Account(num_batches=9, steady_s=1.0, steady_rows=80, step_s=1.0)
        >>> slow = Account(num_batches=9, steady_s=2.0, steady_rows=80, step_s=1.0, stall_s=1.0)
        >>> line = compare(slow, fast)[0]
        >>> line.what, line.change, line.is_better
        ('samples a second', '2.00x', True)
    """
    rows: list[tuple[str, Any, str, bool | None]] = [
        ("samples a second", lambda a: a.rate, "", True),
        ("waiting for batches", lambda a: a.share(a.stall_s + a.loading_s), "%", False),
        ("your step", lambda a: a.share(a.step_s), "%", None),
        ("to the device", lambda a: a.share(a.transfer_s), "%", False),
        ("putting together", lambda a: a.share(a.deliver_s), "%", False),
        ("start-up", lambda a: a.startup_s, "s", False),
        ("a sample in a worker", _row_ms, "ms", False),
        ("workers", lambda a: len(a.workers), "", None),
        ("batches", lambda a: a.num_batches, "", None),
    ]
    found = []
    for what, read, unit, more_is_better in rows:
        left, right = float(read(one)), float(read(other))
        is_better = None
        if more_is_better is not None and left != right:
            is_better = (right > left) == more_is_better
        found.append(Line(what=what, one=left, other=right, unit=unit, is_better=is_better))
    return found


def _row_ms(account: Account) -> float:
    rows = sorted(worker.row_s for worker in account.workers if worker.row_s)
    return rows[len(rows) // 2] * 1e3 if rows else 0.0
