"""Decides what a lost worker means: a retry, a sample that kills workers, or the end.

Judges only; :mod:`penstock.engine.parent.restarts` acts. A worker that was lost at work was at a
place: a sample, or a batch. Anything may have killed it there, so two losses only make the place a
suspect. The next worker loads it alone, and goes on when that succeeds. Losses of these workers
count against the place, in a row: DEATHS_ALONE of them make it poison. A place whose lease is
answered after all is cleared.

Kills that no sample explains (of an idle worker, the fork server, several workers at once, at a
place that was cleared) speak for a cause from outside. For OUTSIDE_S after one of them, poison
takes DEATHS_ALONE_IN_DOUBT. A kill that finds a worker at one place with a probability of 1/10 does
so that often in a row once in a million times. A crash (a signal that others do not send, an exit
code) has its cause inside, and raises no doubts.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

SUSPECT = 2
"""Losses at one place after which it is loaded alone."""
DEATHS_ALONE = 2
"""Losses of workers that loaded a place alone, in a row, that make it poison."""
DEATHS_ALONE_IN_DOUBT = 6
"""The same while something else ends workers."""
OUTSIDE_S = 60.0
"""For how long a loss that no sample explains raises doubts."""
HANGS = 2
"""Hangs at one place that make it poison. Nothing from outside looks like a hang."""
STILLBORN = 3
"""Workers that die one after the other before they are ready, without such doubts."""
NO_PROGRESS = 20
"""Losses in a row of one worker that has work and answers nothing, or of fork servers that start no
worker: the end, whatever ``max_restarts`` says."""
WINDOW_S = 600.0
"""Restarts are counted within this time: ten days of training may see more than ``max_restarts``,
ten minutes may not."""


class Place(NamedTuple):
    """What a lost worker was at."""

    kind: str
    """"sample"; "samples" (``__getitems__``); "batch": none of its samples, or an iterable
    dataset's; "silent": it had not begun."""
    lease: tuple[int, int, int]
    """The lease's key: pass, batch, part."""
    position: int | None = None
    num_samples: int = 1

    @property
    def can_be_isolated(self) -> bool:
        return self.kind in ("sample", "samples")


class RestartDecision(Enum):
    """What to do after a fault."""

    RETRY = "start another worker and load again"
    ISOLATE = "start another worker, which loads that place alone first"
    POISON = "start another worker, but do not load that place again"
    HOPELESS = "a new worker dies before it does anything"
    HELPLESS = "it cannot be ended, so nobody can take its place"
    LIMIT = "too many restarts in too short a time"
    NO_PROGRESS = "one restart after the other, and nothing is loaded in between"


@dataclass
class _Suspicion:
    """Losses at one place."""

    num_deaths: int = 0
    num_kills: int = 0
    num_alone: int = 0
    num_hangs: int = 0


class RestartPolicy:
    """Counts faults of one pool.

    Args:
        max_restarts: Faults that are allowed within ``window_s``; the next one is the end.

    Example:
        >>> policy, place = RestartPolicy(max_restarts=10), Place("sample", (0, 3, 0), 7)
        >>> policy.judge(0, place).name, policy.judge(0, place).name
        ('RETRY', 'ISOLATE')
        >>> [policy.judge(0, place, is_alone=True).name for _ in range(2)]
        ['ISOLATE', 'POISON']
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
        self.num_there = self.num_alone = 0
        """Losses at the place that was judged last, and those of workers that loaded it alone."""
        self.is_spent = False
        """Has this policy said that it cannot go on?"""
        self._now = now
        self._times: deque[float] = deque(maxlen=max_restarts + 1)
        self._suspicions: dict[Place, _Suspicion] = {}
        self._num_in_a_row: Counter[int] = Counter()
        self._num_stillborn: Counter[int] = Counter()
        self._num_servers_in_a_row = 0
        self._outside_s = -OUTSIDE_S

    @property
    def is_counting(self) -> bool:
        """Must this policy be told of answers?"""
        return bool(self._num_in_a_row or self._suspicions)

    def judge(
        self,
        worker: int,
        place: Place | None,
        *,
        is_alone: bool = False,
        is_hang: bool = False,
        is_crash: bool = False,
        is_outside: bool = False,
        was_ready: bool = True,
        has_work: bool = True,
    ) -> RestartDecision:
        """A worker was lost.

        Args:
            place: What it was at; None: nothing, or something else is known to have ended it.
            is_alone: It loaded that place alone.
            is_hang: It was ended because it stood still there.
            is_crash: How it ended shows that its own code did it.
            is_outside: No sample explains this loss.
            was_ready: Had it come so far that it could take work?
            has_work: Does it owe an answer? One that does not makes no progress, and needs none.
        """
        if is_outside:
            self._outside_s = self._now()
        if not self._spend():
            return RestartDecision.LIMIT
        decision = RestartDecision.RETRY
        if place is not None:
            self._num_stillborn[worker] = 0
            suspicion = self._suspicions.setdefault(place, _Suspicion())
            suspicion.num_hangs += is_hang
            suspicion.num_deaths += not is_hang
            suspicion.num_kills += not is_hang and not is_crash
            suspicion.num_alone += not is_hang and is_alone
            decision = self._judge_place(place, suspicion, is_crash or not self._is_in_doubt)
        else:
            self._num_stillborn[worker] = 0 if was_ready else self._num_stillborn[worker] + 1
            is_clear = is_crash or not self._is_in_doubt
            if self._num_stillborn[worker] >= STILLBORN and is_clear:
                return RestartDecision.HOPELESS
        if decision is RestartDecision.POISON:
            self._num_in_a_row.pop(worker, None)  # a cause is found: that is progress
            return decision
        self._num_in_a_row[worker] += has_work
        if self._num_in_a_row[worker] >= NO_PROGRESS:
            return RestartDecision.NO_PROGRESS
        return decision

    def judge_fork_server(self) -> RestartDecision:
        """A fork server was killed before it had started a worker."""
        self._outside_s = self._now()
        self._num_servers_in_a_row += 1
        if not self._spend():
            return RestartDecision.LIMIT
        if self._num_servers_in_a_row >= NO_PROGRESS:
            self.is_spent = True
            return RestartDecision.NO_PROGRESS
        return RestartDecision.RETRY

    def note_start(self) -> None:
        """The fork server has started a worker."""
        self._num_servers_in_a_row = 0

    def note_answer(self, worker: int, lease: tuple[int, int, int]) -> None:
        """A worker has answered a lease: nothing in it kills workers."""
        self._num_in_a_row.pop(worker, None)
        for place in [place for place in self._suspicions if place.lease == lease]:
            self.clear(place)

    def clear(self, place: Place) -> None:
        """A place was loaded: something else has ended the workers that were lost there."""
        suspicion = self._suspicions.pop(place, None)
        if suspicion is not None and suspicion.num_kills:
            self._outside_s = self._now()

    def forget_places(self) -> None:
        """An epoch has begun: other samples stand at the same positions."""
        self._suspicions.clear()

    def _spend(self) -> bool:
        """Count a restart; False when there was none left."""
        now = self._now()
        self._times.append(now)
        if sum(now - moment <= self.window_s for moment in self._times) > self.max_restarts:
            self.is_spent = True
            return False
        self.num_restarts += 1
        return True

    @property
    def _is_in_doubt(self) -> bool:
        return self._now() - self._outside_s < OUTSIDE_S

    def _judge_place(self, place: Place, suspicion: _Suspicion, is_clear: bool) -> RestartDecision:
        self.num_there = suspicion.num_deaths + suspicion.num_hangs
        self.num_alone = suspicion.num_alone
        if self._is_poison(place, suspicion, is_clear):
            del self._suspicions[place]
            return RestartDecision.POISON
        if suspicion.num_deaths >= SUSPECT and place.can_be_isolated:
            return RestartDecision.ISOLATE
        return RestartDecision.RETRY

    def _is_poison(self, place: Place, suspicion: _Suspicion, is_clear: bool) -> bool:
        """``is_clear``: nothing speaks for a cause from outside."""
        if suspicion.num_hangs >= HANGS:
            return True
        if not place.can_be_isolated:  # each replay counts; in doubt only NO_PROGRESS is the end
            return is_clear and suspicion.num_deaths >= SUSPECT + DEATHS_ALONE
        return suspicion.num_alone >= (DEATHS_ALONE if is_clear else DEATHS_ALONE_IN_DOUBT)
