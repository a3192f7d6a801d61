"""Decides how to handle a lost worker: retry, mark a sample as poison, or give up.

This module only decides. :mod:`penstock.engine.parent.restarts` acts. A worker is *lost* if it dies
or hangs. Its *place* is the sample or batch that it was loading. A worker can die there for any
reason, so two losses only make the place a suspect. The next worker loads the place in isolation,
and continues if that succeeds. If it is lost too, that counts against the place. DEATHS_ALONE of
these losses in a row make it poison: it is not loaded again. A place is cleared if its lease is
answered after all.

Kills that no sample explains indicate an external cause. Examples are kills of an idle worker, of
the fork server, of several workers at the same time, or of a worker at a place that was cleared
later. For OUTSIDE_S after such a kill, it takes DEATHS_ALONE_IN_DOUBT losses to make a place
poison. If a random kill hits a worker at one place with a probability of 1/10, that many hits in a
row have a probability of one in a million. A crash (a signal that other processes do not send, or
an exit code) has an internal cause and does not count as such a kill.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum

from penstock.named_tuple import NamedTuple

SUSPECT = 2
"""Losses at one place after which it is loaded in isolation."""
DEATHS_ALONE = 2
"""Consecutive losses of workers that loaded a place in isolation, after which it is poison."""
DEATHS_ALONE_IN_DOUBT = 6
"""The same limit while an external cause is suspected."""
OUTSIDE_S = 60.0
"""How long an external cause is suspected after an unexplained loss."""
HANGS = 2
"""Hangs at one place after which it is poison. No external cause looks like a hang."""
STILLBORN = 3
"""Consecutive workers that may die during startup, unless an external cause is suspected."""
NO_PROGRESS = 20
"""Consecutive losses of one worker that has work but answers no lease, or of fork servers that
start no worker. After this many, loading fails regardless of ``max_restarts``."""
WINDOW_S = 600.0
"""The period of ``max_restarts``. Ten days of training may need more restarts than that, but ten
minutes should not."""


class Place(NamedTuple):
    """The sample, samples or batch that a lost worker was loading."""

    kind: str
    """"sample"; "samples" (``__getitems__``); "batch" (no single sample, or an iterable dataset);
    "silent" (it had not started the lease)."""
    lease: tuple[int, int, int]
    """The lease's key: pass, batch, part."""
    position: int | None = None
    num_samples: int = 1

    @property
    def can_be_isolated(self) -> bool:
        return self.kind in ("sample", "samples")


class RestartDecision(Enum):
    """The action after a fault."""

    RETRY = "start a new worker and load again"
    ISOLATE = "start a new worker, which first loads that place in isolation"
    POISON = "start a new worker, but do not load that place again"
    HOPELESS = "new workers die during startup"
    HELPLESS = "the worker cannot be terminated, so it cannot be replaced"
    LIMIT = "too many restarts in too short a time"
    NO_PROGRESS = "repeated restarts without loading anything"


class _Suspicion:
    """Losses at one place."""

    def __init__(self) -> None:
        self.num_deaths = self.num_kills = self.num_alone = self.num_hangs = 0


class RestartPolicy:
    """Counts the faults of one pool and decides what to do about each.

    Args:
        max_restarts: Number of faults allowed within ``window_s``. The next one is fatal.

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
        """Losses at the place judged last, and how many of them were isolated workers."""
        self.is_spent = False
        """True once this policy has decided that loading cannot continue."""
        self._now = now
        self._times: deque[float] = deque(maxlen=max_restarts + 1)
        self._suspicions: dict[Place, _Suspicion] = {}
        self._num_in_a_row: Counter[int] = Counter()
        self._num_stillborn: Counter[int] = Counter()
        self._num_servers_in_a_row = 0
        self._outside_s = -OUTSIDE_S

    @property
    def is_counting(self) -> bool:
        """True if :meth:`note_answer` must be called."""
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
        """Decide how to handle a lost worker.

        Args:
            place: What it was working on. None if it had no work, or if its end has a known cause.
            is_alone: It was loading that place in isolation.
            is_hang: It was terminated because it hung there.
            is_crash: The way it exited shows that its own code caused it.
            is_outside: No sample explains this loss.
            was_ready: It had completed its startup.
            has_work: It owes an answer. A worker without work is not expected to make progress.
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
            self._num_in_a_row.pop(worker, None)  # finding a cause counts as progress
            return decision
        self._num_in_a_row[worker] += has_work
        if self._num_in_a_row[worker] >= NO_PROGRESS:
            return RestartDecision.NO_PROGRESS
        return decision

    def judge_fork_server(self) -> RestartDecision:
        """Decide how to handle a fork server that was killed before it started a worker."""
        self._outside_s = self._now()
        self._num_servers_in_a_row += 1
        if not self._spend():
            return RestartDecision.LIMIT
        if self._num_servers_in_a_row >= NO_PROGRESS:
            self.is_spent = True
            return RestartDecision.NO_PROGRESS
        return RestartDecision.RETRY

    def note_start(self) -> None:
        """Record that the fork server has started a worker."""
        self._num_servers_in_a_row = 0

    def note_answer(self, worker: int, lease: tuple[int, int, int]) -> None:
        """Record an answered lease. Its places are cleared, because the worker survived them."""
        self._num_in_a_row.pop(worker, None)
        for place in [place for place in self._suspicions if place.lease == lease]:
            self.clear(place)

    def clear(self, place: Place) -> None:
        """Clear a place that was loaded. Something else caused the losses of workers there."""
        suspicion = self._suspicions.pop(place, None)
        if suspicion is not None and suspicion.num_kills:
            self._outside_s = self._now()

    def forget_places(self) -> None:
        """Forget all places. A new epoch has different samples at the same positions."""
        self._suspicions.clear()

    def _spend(self) -> bool:
        """Count a restart. Returns False if none was left."""
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
        """Return True if the place is poison. ``is_clear``: no external cause is suspected."""
        if suspicion.num_hangs >= HANGS:
            return True
        if not place.can_be_isolated:  # each replay counts; in doubt, only NO_PROGRESS is final
            return is_clear and suspicion.num_deaths >= SUSPECT + DEATHS_ALONE
        return suspicion.num_alone >= (DEATHS_ALONE if is_clear else DEATHS_ALONE_IN_DOUBT)
