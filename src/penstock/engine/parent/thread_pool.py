"""A pool of worker threads, which share the interpreter and pickle nothing."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.engine.loading.generator_lock import abandon, lock_for_pool
from penstock.engine.memory.messages import PASS_CELL, STOP, ParentMessage, WorkerTask
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent.launcher import Process
from penstock.engine.parent.pools import GRACE_S, living_pools
from penstock.engine.parent.stacks import stack_of_thread
from penstock.errors import NoStopIteration


class WorkerThread(threading.Thread):
    """A worker thread with the interface of a process."""

    pid = property(lambda self: os.getpid())
    exitcode = property(lambda self: None if self.is_alive() else 0)

    def terminate(self) -> None:
        """Do nothing. A thread cannot be terminated; it stops after its current sample."""

    kill = terminate


class ThreadPool:
    """Worker threads in the training process. Nothing is pickled.

    With per-sample randomness, samples that draw from the global generators run one at a time, and
    the generators are restored afterwards. Samples that do not draw run concurrently.

    Args:
        make_worker: See :func:`penstock.engine.worker.entry.make_thread_worker`.
    """

    can_replace = False
    """Threads cannot be terminated, so the first hang is an error."""
    host = "process"
    ready = None

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
        self._generator_lock = lock_for_pool() if task.per_sample else None
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
                generator_lock=self._generator_lock,
            )
            thread = WorkerThread(
                target=run,
                name=f"penstock-worker-{number}",
                daemon=True,
            )
            thread.start()
            self._leases.append(leases)
            self.processes.append(thread)
        living_pools.add(self)

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
        raise AssertionError(f"worker thread {worker} cannot be terminated")

    def stack_of(self, worker: int) -> str:
        """Return the stack of a worker thread as text."""
        return stack_of_thread(self.processes[worker].ident)  # type: ignore[attr-defined]

    def stop(self) -> None:
        self._cells[PASS_CELL] = STOP
        for leases in self._leases:
            leases.put(None)
        limit = time.monotonic() + GRACE_S
        here: Any = threading.current_thread()
        for thread in self.processes:
            if thread is not here:  # the garbage collector may run in one of them
                thread.join(max(0.0, limit - time.monotonic()))
                if thread.is_alive() and self._generator_lock is not None:
                    abandon(self._generator_lock)
        living_pools.discard(self)


def _call_init(init_fn: Any, num_workers: int) -> BaseException | None:
    try:
        for number in range(num_workers) if init_fn is not None else ():
            with NoStopIteration("worker_init_fn"):
                init_fn(number)
    except Exception as error:
        return error
    return None
