"""The worker pool interface, and code shared by process and thread pools.

pool.send(worker, leases); pool.receive(timeout_s) -> [(worker, Reply | WorkerExit | ...)]

Tested by ``tests/integration/engine/parent/test_thread_pool.py``.
"""

from __future__ import annotations

import atexit
import weakref
from array import array
from collections.abc import Collection
from typing import Any, Protocol

from penstock.engine.memory.messages import CONTROL_BYTES, NOTHING, control_bytes
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent.launcher import Process
from penstock.named_tuple import NamedTuple

GRACE_S = 0.5
"""How long a worker may take to finish its current sample after a stop request."""
EXIT_CODE_WAIT_S = 2.0
SMALL_TRACE_BYTES = 64 << 10
"""Size of a worker's trace buffer if shared memory is on a disk."""


class WorkerExit(NamedTuple):
    """The exit of a worker process."""

    pid: int | str | None
    exit_code: int | None
    is_orphaned: bool = False
    """True if the fork server or the node was lost with its workers, so no sample caused it."""


class Pool(Protocol):
    """The interface that :class:`penstock.engine.parent.dispatch.Dispatcher` requires of a pool."""

    processes: list[Process]
    can_replace: bool
    host: str
    """What workers die with, for messages."""

    @property
    def ready(self) -> Collection[int] | None:
        """The workers that can take leases, at least one. None: all of them."""

    def send(self, worker: int, leases: list[Any]) -> None: ...
    def receive(self, timeout_s: float) -> list[tuple[int, Any]]: ...
    def replace(self, worker: int) -> None: ...
    def stack_of(self, worker: int) -> str: ...
    def stop(self) -> None: ...


def pid_of(process: Any) -> int | str | None:
    """Return the pid of a worker for messages. On another machine, the node is named too."""
    return getattr(process, "address", None) or process.pid  # type: ignore[no-any-return]


def control_cells(memory: SharedFile, num_workers: int, trace_bytes: int) -> tuple[memoryview, int]:
    """Return the control page and trace buffers as 64-bit cells, and the size of one buffer.

    They are the first part of the shared file. If memory is short, there are no trace buffers.
    """
    if not memory.is_sparse:  # on a disk, where the bytes are allocated immediately
        trace_bytes = min(trace_bytes, SMALL_TRACE_BYTES)
    try:
        offset = memory.grow(control_bytes(num_workers, trace_bytes))
    except OSError:
        trace_bytes = 0
        offset = memory.grow(CONTROL_BYTES)
    assert offset == 0
    cells = memoryview(memory.map(0, control_bytes(num_workers, trace_bytes))).cast("q")
    num_cells = CONTROL_BYTES // 8
    cells[:num_cells] = memoryview(array("q", [NOTHING]) * num_cells)
    return cells, trace_bytes


living_pools: weakref.WeakSet[Any] = weakref.WeakSet()


def _stop_all() -> None:
    for pool in list(living_pools):
        pool.stop()


atexit.register(_stop_all)
