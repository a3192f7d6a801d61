"""Decides what a lost worker means: a retry, a sample that kills workers, or the end.

Judges only; :mod:`penstock.engine.parent.restarts` acts. A fault has a suspect, if the worker had
begun something: the sample (or batch) it was at. The first fault of a suspect is bad luck, the
second is its own doing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from enum import Enum

STRIKES = 2
"""Faults at one place that make it poison."""
STILLBORN = 3
"""Workers that die one after the other before they are ready."""
WINDOW_S = 600.0
"""Restarts are counted within this time: ten days of training may see more than ``max_restarts``,
ten minutes may not."""


class RestartDecision(Enum):
    """What to do after a fault."""

    RETRY = "start another worker and load again"
    POISON = "start another worker, but do not load that place again"
    HOPELESS = "a new worker dies before it does anything"
    HELPLESS = "it cannot be ended, so nobody can take its place"
    LIMIT = "too many restarts in too short a time"


class RestartPolicy:
    """Counts faults.

    Args:
        max_restarts: Faults that are allowed within ``window_s``; the next one is the end.

    Example:
        >>> policy = RestartPolicy(max_restarts=10)
        >>> policy.judge(0, suspect="sample 7").name, policy.judge(1, "sample 7").name
        ('RETRY', 'POISON')
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        window_s: float = WINDOW_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self.num_restarts = 0
        self._now = now
        self._times: deque[float] = deque(maxlen=max_restarts + 1)
        self._strikes: Counter[Hashable] = Counter()
        self._stillborn: Counter[int] = Counter()

    def judge(
        self, worker: int, suspect: Hashable | None, *, was_ready: bool = True
    ) -> RestartDecision:
        """A worker was lost.

        Args:
            suspect: What it was at; None: nothing, or something else is known to have ended it.
            was_ready: Had it come so far that it could take work?
        """
        self._times.append(self._now())
        recent = [moment for moment in self._times if self._now() - moment <= self.window_s]
        if len(recent) > self.max_restarts:
            return RestartDecision.LIMIT
        self.num_restarts += 1
        if suspect is not None:
            self._stillborn[worker] = 0
            self._strikes[suspect] += 1
            return (
                RestartDecision.POISON
                if self._strikes[suspect] >= STRIKES
                else RestartDecision.RETRY
            )
        self._stillborn[worker] = 0 if was_ready else self._stillborn[worker] + 1
        return (
            RestartDecision.HOPELESS
            if self._stillborn[worker] >= STILLBORN
            else RestartDecision.RETRY
        )

    def forget_strikes(self) -> None:
        """An epoch has begun: other samples stand at the same positions."""
        self._strikes.clear()
