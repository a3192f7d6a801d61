"""A worker's link to its parent: receives leases, sends replies, and publishes the worker's status.

The status needs no message. It is in the worker's cells on the control page, so the parent can also
read what a worker was doing when it died or hung. The worker's stack is written on request.

Tested by ``tests/faults/engine/parent/test_endings.py``.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import queue
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from penstock.engine.loading.fetch import PassOver
from penstock.engine.memory import payload
from penstock.engine.memory.messages import (
    IS_IDLE,
    NOTHING,
    NUM_SAMPLES,
    PASS_CELL,
    PEAK_KB,
    SINCE,
    STACK_SIGNAL,
    ParentMessage,
    Reply,
    position_cell,
)
from penstock.engine.memory.shared_file import SharedFile
from penstock.machine.host import peak_kb


class WorkerStatus:
    """The status cells of one worker.

    Args:
        has_limit: Record when user code starts. This costs 0.1 microseconds per sample.
    """

    def __init__(self, cells: memoryview, worker: int, *, has_limit: bool) -> None:
        self._cells = cells
        self._cell = position_cell(worker)
        self._has_limit = has_limit
        self._index: Any = None
        self._num_done = 0

    def show(self, position: int, index: Any, num_samples: int = 1) -> None:
        """Record that user code is about to load this."""
        self._cells[self._cell + NUM_SAMPLES] = num_samples
        self._cells[self._cell] = position
        self._index = index
        if self._has_limit:
            self._cells[self._cell + SINCE] = time.monotonic_ns()

    def show_no_sample(self, *, runs_user_code: bool = False) -> None:
        """Record that no sample is being loaded. Other user code may run."""
        self._cells[self._cell] = NOTHING
        if runs_user_code and self._has_limit:
            self._cells[self._cell + SINCE] = time.monotonic_ns()

    def show_waiting(self, is_waiting: bool) -> None:
        """Record that a thread waits for its turn to run user code, or has started to run it."""
        if self._has_limit:
            self._cells[self._cell + SINCE] = 0 if is_waiting else time.monotonic_ns()

    def show_awaited(self, position: int, index: Any, num_samples: int) -> None:
        """Record the async sample that is awaited. No user code runs, and none is timed."""
        self._cells[self._cell + SINCE] = 0
        self._cells[self._cell + NUM_SAMPLES] = num_samples
        self._cells[self._cell] = position
        self._index = index

    def show_done(self) -> None:
        """Record that a lease is finished."""
        self._cells[self._cell] = NOTHING
        self._cells[self._cell + SINCE] = 0
        if self._num_done % 16 == 0:  # it takes a microsecond, and the value grows slowly
            self._cells[self._cell + PEAK_KB] = peak_kb()
        self._num_done += 1

    def show_idle(self, is_idle: bool) -> None:
        """Record whether the worker is waiting for work."""
        self._cells[self._cell + IS_IDLE] = int(is_idle)

    @property
    def index(self) -> Any:
        """The index being loaded, or None."""
        return self._index if self._cells[self._cell] != NOTHING else None

    def check_pass(self, pass_number: int) -> None:
        """Raise PassOver unless this is the current pass."""
        if self._cells[PASS_CELL] != pass_number:
            raise PassOver

    def walk(self, indices: Any, position: int, pass_number: int) -> Iterator[tuple[int, Any]]:
        """Yield positions and indices, and record each. ``position`` is the first position."""
        cells, cell, has_limit = self._cells, self._cell, self._has_limit
        cells[cell + NUM_SAMPLES] = 1
        for current, index in enumerate(indices, position):
            if cells[PASS_CELL] != pass_number:
                raise PassOver
            cells[cell] = current
            if has_limit:
                cells[cell + SINCE] = time.monotonic_ns()
            self._index = index
            yield current, index


def offer_stack() -> int:
    """Let the parent request this process's stack. Returns the value that ``take_stack`` needs.

    Called once in a worker process, when it starts.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return NOTHING
    try:
        fd = os.memfd_create("penstock-stack", os.MFD_CLOEXEC)
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    except (AttributeError, OSError, ValueError, RuntimeError):
        return NOTHING
    return fd


def dump_reply(reply: Any) -> bytes:
    """Serialize a reply. A layout with classes from ``__main__`` takes the slower path."""
    try:
        return pickle.dumps(reply, protocol=5)
    except Exception:
        return payload.dump(reply)


class Connection(Protocol):
    """A worker's source of leases and destination of replies."""

    def get(self) -> list[ParentMessage] | None:
        """Wait for the next leases. Returns None if the parent is gone or requests a stop."""

    def put(self, reply: Reply | tuple[str, str]) -> None:
        """Send a reply immediately, because the parent may be waiting for it."""

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        """Return a segment of the shared file, mapped into this process."""


class _MappedSlots:
    """Segments of the shared file, mapped on first use."""

    def __init__(self, memory: SharedFile) -> None:
        self._memory = memory
        self._segments: dict[tuple[int, int], mmap.mmap] = {}

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        mapping = self._segments.get(place)
        if mapping is None:
            mapping = self._segments[place] = self._memory.map(*place)
        return mapping


class PipeConnection(_MappedSlots):
    """The worker's end of a pipe to the parent."""

    def __init__(self, channel: Any, memory: SharedFile) -> None:
        super().__init__(memory)
        self._channel = channel

    def get(self) -> list[ParentMessage] | None:
        try:
            message = pickle.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            return None
        return message  # type: ignore[no-any-return]

    def put(self, reply: Reply | tuple[str, str]) -> None:
        self._channel.send_bytes(dump_reply(reply))


class NodeConnection(PipeConnection):
    """The pipe of a worker whose parent is :class:`penstock.engine.remote.node_worker.NodeWorker`.

    That process does not have the user's classes. It passes replies on without unpickling them, so
    they are sent with the lease's key, the size of the batch in the slot, and ``is_slot_lost``.
    """

    def put(self, reply: Reply | tuple[str, str]) -> None:
        body, key, num_bytes, is_slot_lost = dump_reply(reply), None, 0, False
        if isinstance(reply, Reply):
            key, is_slot_lost = reply.key, reply.is_slot_lost
            if reply.kind == "fixed":
                num_bytes = reply.needed_bytes
            elif reply.kind == "payload" and reply.content.inline is None:
                num_bytes = reply.content.num_bytes
        self._channel.send_bytes(pickle.dumps((key, num_bytes, is_slot_lost, body), protocol=5))


class QueueConnection(_MappedSlots):
    """A worker thread's queues from and to the parent."""

    def __init__(
        self,
        number: int,
        memory: SharedFile,
        leases: queue.SimpleQueue[list[ParentMessage] | None],
        replies: queue.SimpleQueue[tuple[int, Any]],
    ) -> None:
        super().__init__(memory)
        self._number = number
        self._leases = leases
        self._replies = replies

    def get(self) -> list[ParentMessage] | None:
        return self._leases.get()

    def put(self, reply: Reply | tuple[str, str]) -> None:
        self._replies.put((self._number, reply))
