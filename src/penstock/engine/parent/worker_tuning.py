"""Decides how the number of workers of ``num_workers="auto"`` changes while an epoch runs.

    the totals of a window -> the model of the first choice, with the times in the workers
        -> fewer: if two windows in a row ask for at most half. If samples arrive more slowly then,
           while the training loop waits, the number before is taken again
        -> more: if the training loop waits. A larger number that does not make samples arrive
           faster is taken back, because the server or the disk is the limit

The model may ask for too few, because it only estimates what workers cost. So the number is also
doubled as long as that is faster and cores are free. The state is kept over epochs, which may be
shorter than a window. Used by :mod:`penstock.engine.parent.resizing`.
"""

from __future__ import annotations

import math
from operator import add
from typing import Any, NamedTuple

from penstock.engine.loading.hill_climb import HillClimb

RAISE, LOWER = 1.25, 0.5
"""The number changes if the new one is at least RAISE times as large, or at most LOWER times."""
NUM_AGREEING = 2
"""Windows in a row that must ask for fewer workers."""
LOWER_PAUSE_S = 60.0
"""After fewer workers were slower. Other programs that keep the cores busy make samples seem to
compute."""
FASTER = 1.1
"""A larger number must raise the rate by this factor."""
WAITED_SHARE = 0.05
"""If the training loop waits for less than this fraction of the time, no worker is added."""
FREE_SHARE = 0.9
"""If workers use more than this fraction of the cores, their number is not doubled."""


class WindowTotals(NamedTuple):
    """Totals of a window.

    Args:
        waited_s: Time in which the training loop waited for a batch.
        own_s: CPU time of this process.
        leased_s: Time that workers took for their samples.
        busy_s: Time that they computed or waited for a core. NaN if unknown.
    """

    wall_s: float = 0.0
    waited_s: float = 0.0
    own_s: float = 0.0
    leased_s: float = 0.0
    busy_s: float = 0.0
    num_batches: int = 0
    num_loaded: int = 0

    def plus(self, other: WindowTotals) -> WindowTotals:
        return WindowTotals(*map(add, self, other))

    @property
    def is_known(self) -> bool:
        has_samples = self.num_loaded > 0 and self.leased_s > 0 and self.num_batches > 0
        return has_samples and not math.isnan(self.busy_s)

    @property
    def is_waiting(self) -> bool:
        return self.waited_s > WAITED_SHARE * self.wall_s

    def measured(self) -> dict[str, Any]:
        """Return the fields of the workload that this window shows."""
        return {
            "sample_s": self.leased_s / self.num_loaded,
            "busy_share": min(1.0, self.busy_s / self.leased_s),
            "step_s": (self.wall_s - self.waited_s) / self.num_batches,
            "step_busy_s": self.own_s / self.num_batches,
        }


class WorkerTuning:
    """The state of one loader.

    Attributes:
        carried: Totals of epochs that were shorter than a window.
    """

    def __init__(self) -> None:
        self.carried = WindowTotals()
        self._climb = HillClimb(0, faster=FASTER)
        self._num_low = 0
        self._lowered: tuple[int, float] | None = None
        """The number before the last reduction, and the rate, until that is judged."""
        self._lower_at_s = 0.0

    def decide(
        self,
        window: WindowTotals,
        num_workers: int,
        *,
        wanted: int,
        most: int,
        num_cores: int,
        now_s: float,
    ) -> tuple[int, str] | None:
        """Return another number of workers and the reason. None: it stays.

        Args:
            wanted: The number that the model chooses for this window.
            most: As many as fit beside those that run now.
        """
        if self._climb.value != num_workers:
            self._climb = HillClimb(num_workers, faster=FASTER)
        rate = window.num_loaded / window.wall_s if window.is_waiting else math.inf
        lowered, self._lowered = self._lowered, None
        if lowered is not None and FASTER * rate < lowered[1]:
            self._lower_at_s = now_s + LOWER_PAUSE_S
            return lowered[0], f"{num_workers} were tried and were slower"
        wanted = max(1, wanted)
        self._num_low = self._num_low + 1 if wanted <= LOWER * num_workers else 0
        if self._num_low >= NUM_AGREEING and now_s >= self._lower_at_s:
            self._num_low = 0
            self._lowered = (num_workers, rate) if window.is_waiting else None
            return wanted, f"{wanted} are enough"
        is_free = window.busy_s < FREE_SHARE * num_cores * window.wall_s
        larger = min(most, max(wanted, 2 * num_workers if is_free else 0))
        if not window.is_waiting or larger < RAISE * num_workers:
            larger = 0
        self._climb.judge(rate, now_s, larger)
        if self._climb.value > num_workers:
            return self._climb.value, f"{self._climb.value} are tried"
        if self._climb.value < num_workers:
            return self._climb.value, f"{num_workers} were tried and were not faster"
        return None

    def give_up(self, now_s: float) -> None:
        """Record that a larger number of workers could not be started."""
        self._climb.revert(now_s)
