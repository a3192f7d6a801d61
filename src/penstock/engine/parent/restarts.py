"""Replaces workers that died or hung, and loads their unfinished work again.

    WorkerExit (its pipe closed), or overdue() (it hangs) -> WorkerFault -> RestartDecision
        -> a new worker with the same number, which loads what the lost one had not answered; it
           first loads a sample in isolation if that sample is suspected of crashing workers

The new worker loads into the same rows of the same slots with the same randomness, so the batches
are the same. An iterable dataset has no positions. Its new worker continues from the last state
that the dataset provided. Without a state, it reads the delivered batches again and drops them.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from penstock.engine.memory.messages import (
    IS_IDLE,
    NOTHING,
    NUM_SAMPLES,
    PEAK_KB,
    SINCE,
    Lease,
    NewPass,
    ParentMessage,
    Reply,
    ResumeStream,
    WorkerTask,
    position_cell,
)
from penstock.engine.parent.crash_report import (
    WorkerFault,
    describe_crash,
    describe_stuck,
    describe_timeout,
    signal_name,
)
from penstock.engine.parent.faults import Faults
from penstock.engine.parent.in_flight import LeaseQueue
from penstock.engine.parent.pools import Pool, WorkerExit, pid_of
from penstock.engine.parent.restart_decision import Place, RestartDecision, RestartPolicy
from penstock.engine.parent.stacks import all_stacks
from penstock.errors import StartFailed, Stuck, WorkerTimeout
from penstock.machine.oom import OomCount

log = logging.getLogger("penstock")

OWN_LIMIT_S = 30.0
"""Time limit for a worker that waits although it has work, and for a parent that waits although no
worker has work. The cause is a bug in Penstock, or a worker that was stopped."""
LOOK_S = 0.2
"""How often workers are checked if samples have a time limit."""
STARTING_S = 60.0
"""If samples have a time limit, a worker that takes longer than both limits to start counts as hung
in user code: the dataset's ``__setstate__``, or ``worker_init_fn``."""
AT_ONCE_S = 0.1
"""Workers lost within this time of each other count as lost together."""
ASLEEP_S = 5.0
"""A longer gap between checks means that this process itself was stopped. The gap is not counted
against any worker."""
_PASSING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
START_PAUSES_S = (0.1, 0.5, 2.0)
"""Pauses between attempts to start a worker when memory or processes are exhausted."""


_SENT_BY_OTHERS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


def is_crash(exit_code: int | None) -> bool:
    """Return True if the worker's own code ended it. Always False on Windows.

    Windows reports the same exit code for a worker that another process terminated.
    """
    if exit_code is None or os.name == "nt":
        return False
    return exit_code >= 0 or signal_name(exit_code) not in _SENT_BY_OTHERS


class WorkerRestarts:
    """Replaces the workers of one pool.

    Args:
        lease_queue: The leases that each worker has not answered yet.
        faults: The user's fault options. Records restarts and samples that crash or hang workers.
        policy: Decides about losses. The launcher also reports lost fork servers to it.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        lease_queue: LeaseQueue,
        cells: memoryview,
        faults: Faults,
        task: WorkerTask,
        policy: RestartPolicy,
    ) -> None:
        self._pool = pool
        self._lease_queue = lease_queue
        self._cells = cells
        self._faults = faults
        self._task = task
        self._policy = policy
        self._trials: dict[int, Place] = {}
        """What a new worker loads in isolation before its leases."""
        self._lost_ns: dict[int, int] = {}
        self._lost_together: set[int] = set()
        self.patience_s = 1.0 if faults.sample_timeout_s is None else LOOK_S
        """How long the parent may wait before it checks the workers again."""
        self._oom = OomCount.now()
        self._answers = [0] * len(pool.processes)
        self._states: list[Any] = [None] * len(pool.processes)
        self.has_news = False
        """True if a worker has answered since the last check."""
        self._pass_number = NOTHING
        self._fresh: NewPass | None = None
        self._excused_ns = self._looked_ns = self._heard_ns = time.monotonic_ns()
        self._started_ns = [self._heard_ns] * len(pool.processes)

    def begin(
        self, pass_number: int, fresh: NewPass | None, streams: Mapping[int, Any] | None = None
    ) -> None:
        """Start a pass.

        Args:
            fresh: The first message to its workers.
            streams: The states from which workers resume an iterable dataset.
        """
        self._pass_number, self._fresh = pass_number, fresh
        self._answers = [0] * len(self._answers)
        self._states = [(streams or {}).get(worker) for worker in range(len(self._states))]
        self._policy.forget_places()
        self._trials.clear()

    @property
    def needs_replies(self) -> bool:
        """True if :meth:`note_reply` must be called."""
        return self._task.is_iterable or self._policy.is_counting

    def note_trial(self, worker: int) -> None:
        """Record that a worker survived loading a suspected place in isolation."""
        place = self._trials.pop(worker, None)
        if place is not None:
            self._policy.clear(place)

    def note_reply(self, worker: int, reply: Reply) -> None:
        """Record a worker's reply."""
        self._policy.note_answer(worker, reply.key)
        if reply.pass_number == self._pass_number and self._task.is_iterable:
            self._answers[worker] += 1  # since the last state
            if reply.state is not None:
                self._answers[worker], self._states[worker] = 0, reply.state

    # -- current work ----------------------------------------------------------------------------

    def index_at(self, worker: int) -> Any:
        """Return what a worker is loading: an index, a list (``__getitems__``), or None."""
        return self._current_sample(worker)[1]

    def current_samples(self) -> list[Any]:
        """Return what each worker is loading. See :meth:`index_at`."""
        return [self.index_at(worker) for worker in range(len(self._pool.processes))]

    def _current_sample(self, worker: int) -> tuple[int | None, Any]:
        """Return the position that a worker is loading, and its index."""
        lease = self._current_lease(worker)
        if lease is None:
            return None, None
        cell = position_cell(worker)
        position, num_samples = self._cells[cell], self._cells[cell + NUM_SAMPLES]
        if not self._task.auto_collation:
            return position, lease.index
        row, indices = position - lease.position, list(lease.index)
        return position, indices[row : row + num_samples] if num_samples > 1 else indices[row]

    def _current_lease(self, worker: int) -> Lease | None:
        """Return the lease of the sample that a worker is loading.

        Only a worker with async samples works on several leases at a time.
        """
        position = self._cells[position_cell(worker)]
        owed = self._lease_queue.owed(worker)
        for lease in owed if self._task.in_flight is not None else owed[:1]:
            is_there = position != NOTHING and 0 <= position - lease.position < lease.num_samples
            if is_there and lease.pass_number == self._pass_number:
                return lease
        return None

    def _owed_lease(self, worker: int, place: Place) -> Lease:
        return next(one for one in self._lease_queue.owed(worker) if one.key == place.lease)

    def _place_of(self, worker: int, how: str) -> Place | None:
        owed = self._lease_queue.owed(worker)
        if not owed or owed[0].pass_number != self._pass_number:
            return None
        if how == "silent":
            return Place(how, owed[0].key)
        position, index = self._current_sample(worker)
        lease = self._current_lease(worker)
        if position is not None and lease is not None:
            is_list = isinstance(index, list)
            kind, num_samples = ("samples", len(index)) if is_list else ("sample", 1)
            return Place(kind, lease.key, position, num_samples)
        is_at_work = self._cells[position_cell(worker) + IS_IDLE] == 0
        return Place("batch", owed[0].key) if is_at_work else None

    def _seconds(self, worker: int) -> float:
        """Return how long a worker has been running user code, or 0 if that is not measured."""
        since_ns = self._cells[position_cell(worker) + SINCE]
        if since_ns <= 0:
            return 0.0
        return (time.monotonic_ns() - max(since_ns, self._excused_ns)) * 1e-9

    # -- detecting -------------------------------------------------------------------------------

    def overdue(self, waiting_since: float) -> list[WorkerFault]:
        """Return the workers that must be replaced because they hang.

        Args:
            waiting_since: When the wait for the next batch started (time.monotonic).

        Raises:
            Stuck: No worker has work, but a batch is missing.
        """
        now_ns, since_ns = time.monotonic_ns(), int(waiting_since * 1e9)
        self._heard_ns = max(self._heard_ns, since_ns)
        if now_ns - max(self._looked_ns, since_ns) > ASLEEP_S * 1e9:
            self._excused_ns = self._heard_ns = now_ns
        self._looked_ns = now_ns
        if self.has_news:
            self.has_news, self._heard_ns = False, now_ns
        faults = self._late(self._faults.sample_timeout_s)
        if now_ns - self._heard_ns < OWN_LIMIT_S * 1e9 or faults:
            return faults
        self._heard_ns = now_ns
        if not self._lease_queue.has_owed:
            raise self._stuck("no worker has work, but a batch is missing")
        return [
            self._fault(worker, how="silent", seconds=OWN_LIMIT_S)
            for worker in range(len(self._pool.processes))
            if self._lease_queue.owed(worker) and self._is_out_of_work(worker)
        ]

    def _is_out_of_work(self, worker: int) -> bool:
        """Return True if a worker waits although it has work, or was stopped by a signal."""
        return self._cells[position_cell(worker) + IS_IDLE] == 1 or self._is_stopped(worker)

    def _is_stopped(self, worker: int) -> bool:
        import psutil  # on first use, because the import takes 10 ms

        pid = self._pool.processes[worker].pid
        try:
            return pid is not None and psutil.Process(pid).status() == "stopped"
        except psutil.Error:
            return False

    def _late(self, limit_s: float | None) -> list[WorkerFault]:
        if limit_s is None:
            return []
        return [
            self._fault(worker, how="hung", seconds=seconds)
            for worker in range(len(self._pool.processes))
            if (seconds := self._seconds(worker)) > limit_s
            or (seconds := self._starting_s(worker)) > max(limit_s, STARTING_S)
        ]

    def _starting_s(self, worker: int) -> float:
        """Return how long a worker has been unpickling the dataset or in ``worker_init_fn``."""
        is_ready = self._cells[position_cell(worker) + IS_IDLE] != NOTHING
        if is_ready or self._pool.processes[worker].pid is None:
            return 0.0
        return (time.monotonic_ns() - max(self._started_ns[worker], self._excused_ns)) * 1e-9

    def _fault(self, worker: int, *, how: str, seconds: float) -> WorkerFault:
        position, index = self._current_sample(worker)
        return WorkerFault(
            worker=worker,
            pid=pid_of(self._pool.processes[worker]),
            how=how,
            index=index,
            position=position,
            place=self._place_of(worker, how),
            is_stopped=self._is_stopped(worker),
            seconds=seconds,
            stack=self._pool.stack_of(worker),  # last, because the signal may interrupt a wait
        )

    def fault_of(self, worker: int, exit: WorkerExit) -> WorkerFault:
        """Collect the facts about a worker whose process exited."""
        counted = OomCount.now()
        kills, self._oom = counted.since(self._oom), counted
        position, index = self._current_sample(worker)
        return WorkerFault(
            worker=worker,
            pid=exit.pid,
            exit_code=exit.exit_code,
            is_orphaned=exit.is_orphaned,
            index=index,
            position=position,
            place=None if exit.is_orphaned else self._place_of(worker, "died"),
            is_crash=is_crash(exit.exit_code),
            is_outside=self._is_from_outside(worker, exit),
            oom=str(kills),
            peak_kb={
                other: self._cells[position_cell(other) + PEAK_KB]
                for other in range(len(self._pool.processes))
            },
        )

    def _is_from_outside(self, worker: int, exit: WorkerExit) -> bool:
        """Return True if no sample explains the loss: it was idle, or others died with it."""
        was_idle = self._cells[position_cell(worker) + IS_IDLE] == 1
        now_ns, processes = time.monotonic_ns(), self._pool.processes
        before_ns = [moment for other, moment in self._lost_ns.items() if other != worker]
        self._lost_ns[worker] = now_ns
        dead = {
            other
            for other, process in enumerate(processes)
            if other != worker and process.exitcode is not None
        }
        is_one_of_several = (
            bool(dead)
            or worker in self._lost_together
            or any(now_ns - moment < AT_ONCE_S * 1e9 for moment in before_ns)
        )
        self._lost_together.discard(worker)
        self._lost_together |= dead
        is_unexplained = exit.is_orphaned or was_idle or is_one_of_several
        return is_unexplained and not is_crash(exit.exit_code)

    # -- replacing -------------------------------------------------------------------------------

    def replace(self, fault: WorkerFault) -> list[ParentMessage]:
        """Start a new worker to replace the lost one.

        Returns the messages that the new worker must receive before the leases of the lost one. If
        a sample is poison, its lease has been amended.

        Raises:
            WorkerDied, SampleTimeout, Stuck, StartFailed: The worker is not replaced.
        """
        worker, place = fault.worker, fault.place
        if not self._pool.can_replace:
            raise describe_crash(fault, RestartDecision.HELPLESS)
        was_ready = fault.is_orphaned or self._cells[position_cell(worker) + IS_IDLE] != NOTHING
        decision = self._policy.judge(
            worker,
            place,
            is_alone=place is not None and self._trials.get(worker) == place,
            is_hang=fault.how != "died" and not (fault.how == "hung" and fault.is_stopped),
            is_crash=fault.is_crash,
            is_outside=fault.is_outside or fault.is_stopped,
            was_ready=was_ready,
            has_work=bool(self._lease_queue.owed(worker)),
        )
        if decision is RestartDecision.POISON and fault.how == "silent":
            raise self._stuck(f"worker {worker} has work but does not start it")
        is_skipped = decision is RestartDecision.POISON and self._may_skip(worker, place)
        goes_on = decision in (RestartDecision.RETRY, RestartDecision.ISOLATE) or is_skipped
        if not goes_on:
            raise describe_crash(fault, decision, self._policy)
        if fault.is_orphaned:
            log.warning("worker %d (pid %s) died with its %s", worker, fault.pid, self._pool.host)
        else:
            said = describe_crash(fault, decision, self._policy)
            log.warning("%s%s", said.what, f"\n  Likely: {said.likely}" if said.likely else "")
        if place is not None and is_skipped:
            self._trials.pop(worker, None)
            error = describe_crash(fault, decision, self._policy)
            self._skip_sample(worker, fault.index, place, error)
        elif decision is RestartDecision.ISOLATE and place is not None:
            self._trials[worker] = place
        self._start(worker)
        self._faults.count_restart(is_hang=fault.how != "died")
        return self._first_messages(worker)

    def _start(self, worker: int) -> None:
        self._started_ns[worker] = time.monotonic_ns()
        for pause_s in START_PAUSES_S:
            try:
                return self._pool.replace(worker)
            except (StartFailed, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _PASSING:
                    raise  # not a start failure, for example from a signal handler of the user
                if self._policy.is_spent:
                    raise
                log.warning("cannot replace worker %d, retry in %g s: %s", worker, pause_s, error)
                time.sleep(pause_s)
        return self._pool.replace(worker)

    def _may_skip(self, worker: int, place: Place | None) -> bool:
        """Return True if the sample can be skipped.

        If the sample was skipped before, its substitutes crashed or hung workers too. Their number
        is limited.
        """
        if place is None or place.position is None or not self._faults.is_tolerant:
            return False
        lease = self._owed_lease(worker, place)
        num_before = sum(lease.position + row == place.position for row, _ in lease.poison_rows)
        return num_before <= self._faults.num_substitutes

    def _skip_sample(self, worker: int, index: Any, place: Place, error: Exception) -> None:
        lease = self._owed_lease(worker, place)
        assert place.position is not None
        if isinstance(index, list):  # from __getitems__: it is not known which sample is poison
            lease = lease._replace(is_suspect=True)
        else:
            self._faults.add_poison(index, error)
            lease = lease._replace(
                poison_rows=(*lease.poison_rows, (place.position - lease.position, error))
            )
        self._lease_queue.amend(worker, lease)

    def _first_messages(self, worker: int) -> list[ParentMessage]:
        messages: list[ParentMessage] = [] if self._fresh is None else [self._fresh]
        if self._task.is_iterable:
            state, num_batches = self._states[worker], self._answers[worker]
            messages.append(ResumeStream(self._pass_number, state, num_batches))
        place = self._trials.get(worker)
        if place is not None and place.position is not None:
            lease = self._owed_lease(worker, place)
            trial = (place.position - lease.position, place.num_samples)
            messages.append(lease._replace(trial=trial))
        return messages

    # -- reporting -------------------------------------------------------------------------------

    def timed_out(self, timeout_s: float, batch: int) -> WorkerTimeout:
        """Return the error for a batch that did not arrive within the loader's ``timeout``."""
        busy = {
            worker: (self.index_at(worker), self._pool.stack_of(worker))
            for worker in range(len(self._pool.processes))
            if self._lease_queue.owed(worker)
        }
        return describe_timeout(timeout_s, batch, busy)

    def _stuck(self, what: str) -> Stuck:
        names = [
            (f"worker {worker} (pid {pid_of(process)})", self._pool.stack_of(worker))
            for worker, process in enumerate(self._pool.processes)
        ]
        return describe_stuck(what, OWN_LIMIT_S, all_stacks(names))
