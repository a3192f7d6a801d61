"""A Ray actor that runs one worker process on its node, and passes leases and replies on.

    RayPool ==actor calls==> NodeWorker ==pipe and shared memory==> worker process

The worker is an ordinary worker process, forked by the fork server of the actor. If a sample kills
it, the actor survives, and reads from the control page which sample it was. It ends with the actor.

Calls of :meth:`NodeWorker.take` run one after the other, in the order of the driver. So do calls of
:meth:`NodeWorker.enqueue`, in Ray's concurrency group "leases": a worker has its next lease before
its last batch has left the node. All others run beside them, in the group "control".

Tested by ``tests/integration/engine/remote/test_ray_pool.py``.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import platform
import queue
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.memory.messages import (
    CELLS_PER_WORKER,
    IS_IDLE,
    NOTHING,
    PASS_CELL,
    SINCE,
    STACK_FD,
    WorkerTask,
    control_bytes,
    position_cell,
    trace_buffers,
)
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent import fork_server as fork_servers
from penstock.engine.parent.launcher import Launcher, Process
from penstock.engine.parent.pools import EXIT_CODE_WAIT_S, GRACE_S
from penstock.engine.parent.restart_decision import RestartPolicy
from penstock.engine.parent.stacks import take_stack
from penstock.engine.pickling.environment import describe_environment, import_path
from penstock.engine.pickling.pickler import PickledBuffers
from penstock.trace.record import Record, now_ns, read_records

SENT_SETTINGS = ("path", "folder", "argv", "default_dtype", "warn_filters")
"""The part of the driver's environment that its workers take over. The rest is the node's."""
CHECK_S = 0.5
"""How often a wait for a reply checks whether the worker is alive."""


class Taken(NamedTuple):
    """The result of :meth:`NodeWorker.take`: what the worker sent, or how it ended."""

    messages: list[bytes]
    """Pickled messages, oldest first. The last one is the reply, if there is one."""
    key: tuple[int, int, int] | None = None
    """The lease that the reply answers."""
    content: np.ndarray | None = None
    """The batch's bytes, for its slot."""
    is_slot_lost: bool = False
    end: NodeStatus | None = None
    """The last status of a worker that has exited."""


class NodeStatus(NamedTuple):
    """What a worker does now, or did last."""

    generation: int
    """Counts the worker processes of the actor."""
    pid: int | None
    exit_code: int | None
    cells: list[int]
    """Its cells of the control page. SINCE is an age, because the clock is that of the node."""
    records: list[Record]
    """New records of the timeline, with times of the node's clock."""
    head: int | None
    """The number of the next record. None if records were not read."""
    now_ns: int


class _Life(NamedTuple):
    """One worker process, from its start to its end."""

    generation: int
    process: Process
    pipe: Any
    replies: queue.SimpleQueue[Any]
    failures: list[bytes]


class NodeWorker:
    """The actor. Created without arguments, so that versions are compared before anything else."""

    def __init__(self) -> None:
        if fork_servers.is_needed("process", None):
            fork_servers.warm_up()  # it imports torch while this node is compared with the driver
        self._lock = threading.Lock()
        self._life: _Life | None = None
        self._places: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._mappings: dict[tuple[int, int], Any] = {}

    def hello(self, paths: list[str]) -> dict[str, Any]:
        """Return this node, its versions, and those of ``paths`` that do not exist here."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return {
            "node": f"{ray.util.get_node_ip_address()} ({node_id[:8]})",
            "versions": versions(),
            "missing": [path for path in paths if not os.path.exists(path)],
        }

    def clock(self) -> int:
        """Return the time of the clock that the timeline uses."""
        return now_ns()

    # -- the worker's life -----------------------------------------------------------------------

    def start(
        self,
        number: int,
        num_workers: int,
        task: WorkerTask,
        pickled: tuple[Any, ...],
        environment: dict[str, Any],
        limit_s: float,
    ) -> tuple[str, Any]:
        """Start the worker, and wait until it is ready. See :meth:`_await_ready`.

        ``pickled`` comes from the node's copy in Ray's object store.
        """
        sys.path += [one for one in environment["path"] if one not in sys.path]
        self._number, self._task = number, task
        self._memory = SharedFile.create()
        num_bytes = control_bytes(num_workers, task.trace_bytes)
        self._memory.grow(num_bytes)
        self._cells = memoryview(self._memory.map(0, num_bytes)).cast("q")
        self._cells[PASS_CELL] = NOTHING
        buffers = trace_buffers(self._cells, num_workers, task.trace_bytes)
        self._buffer = buffers[number] if buffers else None
        self._launcher = Launcher(
            method="forkserver" if fork_servers.is_needed("process", None) else "spawn",
            worker_entry=_no_entry,
            task=task,
            num_workers=num_workers,
            objects={},
            memory=self._memory,
            policy=RestartPolicy(0),
            pickled=PickledBuffers(*pickled),
            environment={**describe_environment(), **environment, "path": import_path()},
        )
        self.restart(0)
        return self._await_ready(limit_s)

    def restart(self, generation: int) -> None:
        """End the worker process, if there is one, and start another."""
        with self._lock:
            self._end()
            first = position_cell(self._number)
            for cell in range(first, first + CELLS_PER_WORKER):
                self._cells[cell] = NOTHING
            process, pipe, greeting = self._launcher.start(self._number, at_once=True)
            if greeting:
                pipe.send_bytes(greeting)
            life = _Life(generation, process, pipe, queue.SimpleQueue(), [])
            self._life = life
        threading.Thread(target=_read_replies, args=(life,), daemon=True).start()

    def _end(self) -> None:
        life = self._life
        if life is not None:
            life.process.kill()
            life.process.join(GRACE_S)
            if life.process.is_alive():  # blocked in the kernel: it could still write into a slot
                raise RuntimeError(f"process {life.process.pid} ignores SIGKILL")
        self._places.clear()

    def end_worker(self) -> None:
        """Kill the worker process."""
        if self._life is not None:
            self._life.process.kill()

    def _await_ready(self, limit_s: float) -> tuple[str, Any]:
        """Wait until the worker has unpickled the dataset.

        Returns ("ready", None), ("failed", its report), ("exited", its exit code) or ("late", its
        stack).
        """
        limit = time.monotonic() + limit_s
        cell = position_cell(self._number) + IS_IDLE
        while time.monotonic() < limit:
            life = self._life
            assert life is not None
            if self._cells[cell] != NOTHING:
                return "ready", None
            if life.failures:
                return "failed", life.failures[0]
            if life.process.exitcode is not None:
                time.sleep(CHECK_S)  # its last message may be under way
                return ("failed", life.failures[0]) if life.failures else ("exited", None)
            time.sleep(0.02)
        return "late", self.stack()

    # -- leases and replies ----------------------------------------------------------------------

    def enqueue(
        self,
        generation: int,
        pass_number: int,
        num_bytes: int,
        places: dict[tuple[int, int, int], tuple[int, int]],
        leases: bytes,
    ) -> None:
        """Pass leases on to the worker.

        Args:
            num_bytes: The size that the shared file needs.
            places: The segment of each lease.
        """
        life = self._life
        if life is None or life.generation != generation:
            return
        if num_bytes > self._memory.num_bytes:
            self._memory.grow(num_bytes - self._memory.num_bytes)
        self._places.update(places)
        self.set_pass(pass_number)
        try:
            life.pipe.send_bytes(leases)
        except OSError:
            pass  # the worker is gone, which take() reports

    def set_pass(self, pass_number: int) -> None:
        """Make the worker drop leases of earlier passes."""
        self._cells[PASS_CELL] = max(self._cells[PASS_CELL], pass_number)

    def take(self, generation: int) -> Taken:
        """Wait for the next reply of the worker, or for its end."""
        messages: list[bytes] = []
        while True:
            life = self._life
            assert life is not None
            if life.generation != generation:
                return Taken(messages)
            try:
                found = life.replies.get(timeout=CHECK_S)
            except queue.Empty:
                # A child of the worker may hold the pipe open after the worker is gone.
                if life.process.exitcode is None:
                    continue
                found = None
            if found is None:
                return Taken(messages, end=self._status(life, None))
            key, num_bytes, is_slot_lost, body = found
            messages.append(body)
            if key is not None:
                content = self._content(key, num_bytes) if num_bytes else None
                return Taken(messages, key, content, is_slot_lost)

    def _content(self, key: tuple[int, int, int], num_bytes: int) -> np.ndarray:
        """Return a view of the batch. Ray copies it to the object store before the next call."""
        place = self._places.pop(key)
        mapping = self._mappings.get(place)
        if mapping is None:
            mapping = self._mappings[place] = self._memory.map(*place)
        return np.frombuffer(mapping, dtype=np.uint8, count=num_bytes)

    # -- watching --------------------------------------------------------------------------------

    def status(self, since: int) -> NodeStatus:
        """Return what the worker does, and the records of its timeline from ``since`` on."""
        assert self._life is not None
        return self._status(self._life, since)

    def _status(self, life: _Life, since: int | None) -> NodeStatus:
        read_ns = now_ns()
        first = position_cell(self._number)
        cells = [int(cell) for cell in self._cells[first : first + CELLS_PER_WORKER]]
        if cells[SINCE] > 0:
            cells[SINCE] = max(1, time.monotonic_ns() - cells[SINCE])
        records: list[Record] = []
        head = since
        if self._buffer is not None and since is not None:
            records, head = read_records(self._buffer, since)
            num_ended = next((n for n, one in enumerate(records) if not one.end_ns), len(records))
            records, head = records[:num_ended], head - len(records) + num_ended
        process = life.process
        return NodeStatus(
            life.generation, process.pid, process.exitcode, cells, records, head, read_ns
        )

    def stack(self) -> str:
        """Return the stack of the worker as text."""
        life = self._life
        assert life is not None
        fd = self._cells[position_cell(self._number) + STACK_FD]
        return take_stack(life.process.pid if life.process.is_alive() else None, fd)


def _no_entry(kind: str) -> Any:
    raise AssertionError(f"a worker of a node is not started by {kind}")


def _read_replies(life: _Life) -> None:
    """Read what a worker sends until it exits. Runs in a thread of its own."""
    try:
        while True:
            key, num_bytes, is_slot_lost, body = pickle.loads(life.pipe.recv_bytes())
            if key == "failed":
                life.failures.append(body)
                key = None
            life.replies.put((key, num_bytes, is_slot_lost, body))
    except (EOFError, OSError):
        pass
    life.process.join(EXIT_CODE_WAIT_S)
    life.replies.put(None)
    life.pipe.close()


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all nodes. Does not import torch."""
    from penstock import __version__

    found = {"Penstock": __version__, "Python": platform.python_version()}
    for name, package in (("torch", "torch"), ("NumPy", "numpy")):
        try:
            found[name] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found
