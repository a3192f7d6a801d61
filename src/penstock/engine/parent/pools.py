"""Pools of workers with one interface: processes, or threads of this process.

pool.send(worker, leases); pool.receive(timeout_s) -> [(worker, Reply | WorkerExit | ErrorReport)]
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.loading.generator_lock import GeneratorLock
from penstock.engine.memory.messages import (
    CELLS_PER_WORKER,
    CONTROL_BYTES,
    EPOCH_CELL,
    NOTHING,
    STACK_FD,
    STOP,
    ParentMessage,
    WorkerTask,
    control_bytes,
    position_cell,
)
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent.channels import ChannelPoller, dump_leases, make_channel
from penstock.engine.parent.launcher import Launcher, Process
from penstock.engine.parent.stacks import stack_of_thread, take_stack
from penstock.errors import StartFailed

GRACE_S = 0.5
"""How long a worker may take to finish its present sample when it is told to stop."""
EXIT_CODE_WAIT_S = 2.0
SMALL_RING_BYTES = 64 << 10
"""Of a worker's notes, where shared memory lies on a disk."""


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """A worker process is gone."""

    pid: int | None
    exit_code: int | None
    is_orphaned: bool = False
    """The fork server was lost, and all workers with it: no sample is to blame."""


class Pool(Protocol):
    """What :class:`penstock.engine.parent.dispatch.Dispatcher` needs of its workers."""

    processes: list[Process]
    can_replace: bool

    def send(self, worker: int, leases: list[Any]) -> None: ...
    def receive(self, timeout_s: float) -> list[tuple[int, Any]]: ...
    def replace(self, worker: int) -> None: ...
    def stack_of(self, worker: int) -> str: ...
    def stop(self) -> None: ...


class ProcessPool:
    """Worker processes. Pairs with :meth:`stop`, which leaves none behind."""

    can_replace = True

    def __init__(self, launcher: Launcher, num_workers: int, cells: memoryview) -> None:
        self.processes: list[Process] = []
        self._channels: list[Any] = []
        self._cells = cells
        self._launcher = launcher
        self._is_stopped = False
        self._owner = os.getpid()
        try:
            for number in range(num_workers):
                process, pipe = launcher.start(number)
                self.processes.append(process)
                self._channels.append(make_channel(pipe))
        except BaseException:
            self.stop()
            raise
        self._switchboard = ChannelPoller(self._channels)
        _living_pools.add(self)

    def send(self, worker: int, leases: list[Any]) -> None:
        self._channels[worker].send(dump_leases(leases))

    def receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Replies that have come; waits up to ``timeout_s`` for the first."""
        try:
            events = self._receive(timeout_s)
        except (OSError, ValueError):
            if not self._has_stopped():
                raise
            events = []
        if self._has_stopped():  # at interpreter exit, say, while another thread is loading
            time.sleep(min(timeout_s, 0.05))
            return []
        return events

    def _has_stopped(self) -> bool:
        return self._is_stopped

    def _receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        events: list[tuple[int, Any]] = []
        for worker in self._switchboard.wait(timeout_s):
            channel = self._channels[worker]
            self._launcher.start_next()
            events += [(worker, pickle.loads(frame)) for frame in channel.read()]
            if not channel.is_open and not self._is_stopped:
                self._switchboard.forget(worker)
                events.append((worker, self._exit_of(worker)))
        return events or self._find_deaths()

    def _find_deaths(self) -> list[tuple[int, Any]]:
        """Workers that ended although their pipe is open: a child of theirs holds it."""
        return [
            (worker, self._exit_of(worker))
            for worker, process in enumerate(self.processes)
            if process.exitcode is not None and self._channels[worker].is_open
        ]

    def _exit_of(self, worker: int) -> WorkerExit:
        process = self.processes[worker]
        process.join(EXIT_CODE_WAIT_S)
        is_orphaned = getattr(process, "is_orphaned", False)
        return WorkerExit(pid=process.pid, exit_code=process.exitcode, is_orphaned=is_orphaned)

    def replace(self, worker: int) -> None:
        """Make sure that a worker is gone, and start another with the same number.

        Raises:
            StartFailed, OSError: The other does not start.
        """
        process = self.processes[worker]
        if process.is_alive():
            process.kill()
        process.join(GRACE_S)
        if process.is_alive():  # stuck in the kernel: it might still write into a slot
            raise StartFailed(
                f"worker {worker} (pid {process.pid}) cannot be ended: it ignores SIGKILL",
                likely="it waits in the kernel for a disk or a network share that does not answer.",
                remedy="look at the storage; `cat /proc/PID/stack` as root says where it waits",
            )
        self._switchboard.forget(worker)
        self._channels[worker].close()
        first = position_cell(worker)
        for cell in range(first, first + CELLS_PER_WORKER):
            self._cells[cell] = NOTHING
        self.processes[worker], pipe = self._launcher.start(worker, at_once=True)
        self._channels[worker] = make_channel(pipe)
        self._switchboard.watch(worker)

    def stack_of(self, worker: int) -> str:
        """Where a worker stands, as text."""
        process = self.processes[worker]
        fd = self._cells[position_cell(worker) + STACK_FD]
        return take_stack(process.pid if process.is_alive() else None, fd)

    def stop(self) -> None:
        """End all workers: let them finish a sample, then terminate, then kill. Bounded."""
        if self._is_stopped or self._owner != os.getpid():
            return
        self._is_stopped = True
        self._cells[EPOCH_CELL] = STOP
        for channel in self._channels:
            # Words as well as hanging up: a forked sibling may hold our end open.
            channel.send(dump_leases(None))
            channel.close()
        for end in (None, "terminate", "kill"):
            if end is not None:
                for process in self.processes:
                    if process.is_alive():
                        getattr(process, end)()
            limit = time.monotonic() + GRACE_S
            for process in self.processes:
                process.join(max(0.0, limit - time.monotonic()))
            if not any(process.is_alive() for process in self.processes):
                break
        self._launcher.close()
        _living_pools.discard(self)


class WorkerThread(threading.Thread):
    """A worker thread with the face of a process."""

    pid = property(lambda self: os.getpid())
    exitcode = property(lambda self: None if self.is_alive() else 0)

    def terminate(self) -> None:
        """Threads cannot be ended from outside; they stop after their present sample."""

    kill = terminate


class ThreadPool:
    """Worker threads: nothing travels, the interpreter is shared.

    With per-sample randomness, samples that draw from the global generators run one at a time, and
    leave them as they found them; samples that do not run at once.

    Args:
        make_worker: See :func:`penstock.engine.worker.entry.make_thread_worker`.
    """

    can_replace = False
    """Nobody can end a thread from outside: the first one that hangs is an error."""

    def __init__(
        self,
        make_worker: Callable[..., Callable[[], None]],
        *,
        num_workers: int,
        task: WorkerTask,
        objects: dict[str, Any],
        memory: SharedFile,
        cells: memoryview,
    ) -> None:
        self._cells = cells
        self._replies: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._leases: list[queue.SimpleQueue[list[ParentMessage] | None]] = []
        self.processes: list[Process] = []
        generator_lock = GeneratorLock() if task.per_sample else None
        objects = {**objects, "init_error": _call_init(objects.get("worker_init_fn"), num_workers)}
        for number in range(num_workers):
            leases: queue.SimpleQueue[list[ParentMessage] | None] = queue.SimpleQueue()
            run = make_worker(
                number=number,
                task=task,
                objects=objects,
                memory=memory,
                leases=leases,
                replies=self._replies,
                cells=cells,
                generator_lock=generator_lock,
            )
            thread = WorkerThread(
                target=run,
                name=f"penstock-worker-{number}",
                daemon=True,
            )
            thread.start()
            self._leases.append(leases)
            self.processes.append(thread)
        _living_pools.add(self)

    def send(self, worker: int, leases: list[Any]) -> None:
        self._leases[worker].put(leases)

    def receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        events: list[tuple[int, Any]] = []
        try:
            if timeout_s > 0:
                events.append(self._replies.get(timeout=max(timeout_s, 0.001)))
            while True:
                events.append(self._replies.get_nowait())
        except queue.Empty:
            return events

    def replace(self, worker: int) -> None:
        raise AssertionError(f"worker thread {worker} cannot be ended")

    def stack_of(self, worker: int) -> str:
        """Where a worker thread stands, as text."""
        return stack_of_thread(self.processes[worker].ident)  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._cells[EPOCH_CELL] = STOP
        for leases in self._leases:
            leases.put(None)
        limit = time.monotonic() + GRACE_S
        here: Any = threading.current_thread()
        for thread in self.processes:
            if thread is not here:  # the collector may run in one of them
                thread.join(max(0.0, limit - time.monotonic()))
        _living_pools.discard(self)


def _call_init(init_fn: Any, num_workers: int) -> BaseException | None:
    try:
        for number in range(num_workers) if init_fn is not None else ():
            init_fn(number)
    except Exception as error:
        return error
    return None


def control_cells(memory: SharedFile, num_workers: int, ring_bytes: int) -> tuple[memoryview, int]:
    """The control page and the rings as 64-bit cells, and how large a ring could be.

    They are the first piece of the shared file. Where memory is short, nothing is noted.
    """
    if not memory.is_sparse:  # it is a disk's, and really taken
        ring_bytes = min(ring_bytes, SMALL_RING_BYTES)
    try:
        offset = memory.grow(control_bytes(num_workers, ring_bytes))
    except OSError:
        ring_bytes = 0
        offset = memory.grow(CONTROL_BYTES)
    assert offset == 0
    cells = memoryview(memory.map(0, control_bytes(num_workers, ring_bytes))).cast("q")
    for cell in range(CONTROL_BYTES // 8):
        cells[cell] = NOTHING
    return cells, ring_bytes


_living_pools: weakref.WeakSet[Any] = weakref.WeakSet()


def _stop_all() -> None:
    for pool in list(_living_pools):
        pool.stop()


atexit.register(_stop_all)
