"""A pool of workers on this machine, and workers on other machines that join them.

    workers 0 to n - 1: processes of this machine; from n on: actors on the nodes of a Ray cluster

The first batch comes from this machine. The remote workers are started after it or, with
``remote_workers="auto"``, when the training loop has to wait for batches. Each of them gets leases
once it is ready. Both kinds take the same leases and send the same replies.

Tested by ``tests/integration/engine/remote/test_ray_pool.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.engine.parent.pools import Pool

FIRST_POLL_S, LAST_POLL_S = 0.005, 0.05
"""How often remote workers are asked for replies while nothing arrives, at first and later. Each
time costs a fraction of a millisecond."""
WINDOW_S = 2.0
"""With "auto", how long the training loop is watched."""
WAITED_SHARE = 0.1
"""With "auto", remote workers start if the loop waits for more than this fraction of the time."""


class Unstarted:
    """The place of a remote worker before it is started, with the interface of a process."""

    pid = exitcode = None
    daemon = True
    name = "penstock-worker"

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        """Do nothing, because no process was started."""

    terminate = kill = join


class MixedPool:
    """Workers of two pools, with the numbers of the local ones first.

    Args:
        local: Workers on this machine.
        num_remote: The number of workers on other machines.
        start_remote: Starts the other pool. Its workers are numbered from 0.
        is_auto: Start it only when the training loop waits for batches.
        note: Adds a note to the plan.
    """

    can_replace = True
    host = "fork server, Ray actor or node"

    def __init__(
        self,
        local: Pool,
        num_remote: int,
        start_remote: Callable[[], Pool],
        *,
        is_auto: bool,
        note: Callable[[str], None],
    ) -> None:
        self._local = local
        self._remote: Pool | None = None
        self._start_remote = start_remote
        self._is_auto = is_auto
        self._note = note
        self._first = len(local.processes)
        self._since_s: float | None = None
        self._waited_s = 0.0
        self.processes: list[Any] = [*local.processes, *(Unstarted() for _ in range(num_remote))]
        self.ready = set(range(self._first))

    def send(self, worker: int, leases: list[Any]) -> None:
        if worker < self._first:
            self._local.send(worker, leases)
        elif self._remote is not None:
            self._remote.send(worker - self._first, leases)

    def receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return the replies that have arrived. Waits up to ``timeout_s`` for the first."""
        if self._remote is None:
            start_s = time.monotonic()
            events = self._local.receive(timeout_s)
            self._watch(start_s, bool(events))
            return events
        limit_s, poll_s = time.monotonic() + timeout_s, FIRST_POLL_S
        while True:
            left_s = max(0.0, limit_s - time.monotonic())
            events = self._local.receive(min(left_s, poll_s))
            poll_s = min(2 * poll_s, LAST_POLL_S)
            events += [(self._first + worker, event) for worker, event in self._remote.receive(0)]
            self._update()
            if events or time.monotonic() >= limit_s:
                return events

    def _watch(self, start_s: float, has_events: bool) -> None:
        """Start the remote workers, if it is time."""
        now_s = time.monotonic()
        if self._since_s is None:
            if has_events:
                self._since_s = now_s
            return
        self._waited_s += now_s - start_s
        watched_s = now_s - self._since_s
        is_slow = watched_s > WINDOW_S and self._waited_s > WAITED_SHARE * watched_s
        if is_slow or not self._is_auto:
            if self._is_auto:
                num_remote, share = len(self.processes) - self._first, self._waited_s / watched_s
                waited = f"the training loop waited {share:.0%} of {watched_s:.0f} s"
                self._note(f"remote_workers='auto' starts {num_remote}, because {waited}")
            self._remote = self._start_remote()
            self._update()
        elif watched_s > WINDOW_S:
            self._since_s, self._waited_s = now_s, 0.0

    def _update(self) -> None:
        assert self._remote is not None
        self.processes[self._first :] = self._remote.processes
        self.ready -= {one for one in self.ready if one >= self._first}
        self.ready.update(self._first + worker for worker in self._remote.ready or ())

    def replace(self, worker: int) -> None:
        """End a worker, and start a new one with the same number.

        Raises:
            StartFailed, OSError: The new worker does not start.
        """
        if worker < self._first:
            self._local.replace(worker)
            self.processes[worker] = self._local.processes[worker]
        else:
            assert self._remote is not None
            self._remote.replace(worker - self._first)
            self._update()

    def stack_of(self, worker: int) -> str:
        """Return the stack of a worker as text."""
        if worker < self._first:
            return self._local.stack_of(worker)
        return "" if self._remote is None else self._remote.stack_of(worker - self._first)

    def stop(self) -> None:
        """End all workers. The time is bounded."""
        try:
            self._local.stop()
        finally:
            if self._remote is not None:
                self._remote.stop()
