"""Decides how the number of workers of ``num_workers="auto"`` changes while an epoch runs.

    the totals of a window -> the model of the first choice, with the times in the workers
        -> more, if the training loop waits: the number of the model, or twice as many if samples
           mostly wait. A larger number that does not make samples arrive faster is taken back,
           because the server, the disk or the cores are the limit
        -> fewer, if two windows in a row ask for at most half, and the training loop does not wait
           or samples only compute

The state is kept over epochs, which may be shorter than a window. Used by
:mod:`penstock.engine.parent.resizing`.
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
"""After fewer workers were not enough."""
FASTER = 1.1
"""A larger number must raise the rate by this factor."""
WAITED_SHARE = 0.05
"""If the training loop waits for less than this fraction of the time, no worker is added."""
MOSTLY, HARDLY = 0.5, 0.1
"""Samples mostly or hardly wait: this fraction of their time, without that for which they wait for
a core. With 64 workers on 2 cores, 18 ms of waiting and 2 ms of computing are 0.3."""


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

    @property
    def share_waiting(self) -> float:
        """Fraction of their time in which samples neither computed nor waited for a core."""
        return 1.0 - self.busy_s / self.leased_s

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
        self._has_lowered = False
        self._lower_at_s = 0.0

    def decide(
        self,
        window: WindowTotals,
        num_workers: int,
        *,
        wanted: int,
        most: int,
        now_s: float,
    ) -> tuple[int, str] | None:
        """Return another number of workers and the reason. None: it stays.

        Args:
            wanted: The number that the model chooses for this window.
            most: As many as fit beside those that run now.
        """
        if self._climb.value != num_workers:
            self._climb = HillClimb(num_workers, faster=FASTER)
        wanted, share = max(1, wanted), window.share_waiting
        is_low = wanted <= LOWER * num_workers and (not window.is_waiting or share < HARDLY)
        self._num_low = self._num_low + 1 if is_low else 0
        if self._num_low >= NUM_AGREEING and now_s >= self._lower_at_s:
            self._num_low, self._has_lowered = 0, True
            return wanted, f"{wanted} are enough"
        rate = window.num_loaded / window.wall_s if window.is_waiting else math.inf
        larger = min(most, max(wanted, 2 * num_workers if share >= MOSTLY else 0))
        if not window.is_waiting or larger < RAISE * num_workers:
            larger = 0
        self._climb.judge(rate, now_s, larger)
        if self._climb.value > num_workers:
            if self._has_lowered:
                self._has_lowered, self._lower_at_s = False, now_s + LOWER_PAUSE_S
            return self._climb.value, f"{self._climb.value} are tried"
        if self._climb.value < num_workers:
            return self._climb.value, f"{num_workers} were tried and were not faster"
        return None

    def give_up(self, now_s: float) -> None:
        """Record that a larger number of workers could not be started."""
        self._climb.revert(now_s)
