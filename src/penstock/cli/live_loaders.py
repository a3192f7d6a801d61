"""Reads the loaders of running programs from outside, for ``penstock top``.

    /proc/PID/fd --> status (penstock.trace.live_status), control page and trace buffers of workers
                 --> LoaderView: metrics of the last seconds, one WorkerView per worker

Nothing is sent to the program, and a program that hangs or is stopped can be read too. Linux only.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.engine.memory.messages import (
    IS_IDLE,
    NOTHING,
    SINCE,
    STACK_FD,
    control_bytes,
    position_cell,
    trace_buffers,
)
from penstock.machine.kernel_files import read_fields, read_text
from penstock.trace.diagnosis import Diagnosis
from penstock.trace.live_status import NAME, read_status
from penstock.trace.metrics import WINDOW_S, Metrics, make_metrics, sum_io
from penstock.trace.record import Kind, now_ns, read_records, start_of_last
from penstock.trace.record_columns import recent_columns

_MEMFD = "/memfd:penstock"
_NUM_TRIES = 5
_NO_EPOCH = Diagnosis(
    cause="nothing", sentence="No epoch is running. Rates and times are those of the last one."
)


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker as seen from outside.

    Args:
        pid: None for a worker on a different machine.
        state: ``starting``, ``idle``, ``loading``, ``stopped`` or ``lost``.
        position: Position in the epoch of the sample that it loads, or None.
        sample: The index of that sample, if known.
        busy_s: How long it has been loading this sample, or this part of a batch.
        num_restarts: How often this worker was replaced, as far as its records show.
        stack_fd: See :func:`penstock.engine.parent.stacks.take_stack`.
    """

    number: int
    pid: int | None
    state: str
    position: int | None = None
    sample: str | None = None
    busy_s: float = 0.0
    num_restarts: int = 0
    stack_fd: int = NOTHING


@dataclass(frozen=True, kw_only=True)
class LoaderView:
    """One loader of a running program.

    Args:
        idle_s: Time since the last batch was delivered.
        waiting_s: How long the training loop has been waiting for a batch, or None.
        ring_bytes: Memory of the batches in flight, the control page and the workers' records.
        is_stopped: True if the program is stopped (Ctrl-Z, SIGSTOP).
    """

    pid: int
    program: str
    rank: str | None
    facts: dict[str, Any]
    idle_s: float
    waiting_s: float | None
    ring_bytes: int
    is_stopped: bool
    metrics: Metrics
    workers: tuple[WorkerView, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        plain = {**vars(self), "metrics": self.metrics.to_dict()}
        return {**plain, "workers": [asdict(worker) for worker in self.workers]}


def read_program(pid: int) -> list[LoaderView]:
    """Return the loaders of one program that have run for at least a second.

    Raises:
        ProcessLookupError: No program has this pid.
        PermissionError: It belongs to a different user.
    """
    views = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        if _link(path).startswith(f"/memfd:{NAME}"):
            with suppress(FileNotFoundError, ProcessLookupError):
                view = _read_loader(pid, path)
                views += [] if view is None else [view]
    return sorted(views, key=lambda view: -view.metrics.num_batches)


def find_programs() -> Iterator[int]:
    """Yield the programs whose loaders this user can read."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                links = [_link(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
                if any(link.startswith(f"/memfd:{NAME}") for link in links):
                    yield int(name)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed since
        return ""


def _read_loader(pid: int, path: str) -> LoaderView | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        found = None
        for _ in range(_NUM_TRIES):
            found = read_status(fd)
            if found is not None:
                break
            time.sleep(0.001)  # a write is in progress
    finally:
        os.close(fd)
    if found is None or found[0].get("pid") != _inner_pid(pid):
        return None  # a fork of the program has inherited it
    header, main = found
    at_ns = now_ns()
    outer = _outer_pids(pid, [one for pool in header["pools"] for one in pool["pids"]])
    pools = [_Pool(pid, pool, header.get("samples") or [], outer) for pool in header["pools"]]
    workers = tuple(worker for pool in pools for worker in pool.workers(at_ns))
    pids = {pid, *(worker.pid for worker in workers if worker.pid is not None)}
    counts = {**header["counts"], **sum_io(sorted(pids))}
    metrics = make_metrics(_recent(header, main, pools), counts)
    if header.get("has_ended"):  # and the records of its workers are gone
        metrics = replace(metrics, verdict=_NO_EPOCH)
    last = read_records(main, max(0, _head(main) - 50))[0]
    ends_ns = [record.end_ns for record in last if record.kind == Kind.BATCH]
    waiting_ns = header.get("waiting_ns")
    return LoaderView(
        pid=pid,
        program=_command(pid),
        rank=header.get("rank"),
        facts=header["facts"],
        idle_s=(at_ns - max(ends_ns)) * 1e-9 if ends_ns else 0.0,
        waiting_s=None if waiting_ns is None else (at_ns - waiting_ns) * 1e-9,
        ring_bytes=sum(pool.num_bytes for pool in pools),
        is_stopped=_state(pid) == "T",
        metrics=metrics,
        workers=workers,
    )


def _recent(header: dict[str, Any], main: bytes, pools: list[_Pool]) -> dict[str, Any]:
    """Return the records of the last seconds of loading, as ``Recorder.recent_records`` does."""
    since_ns = start_of_last(main, 1) - int(WINDOW_S * 1e9)
    spans = recent_columns(main, since_ns)
    lanes = [{"name": "main", "role": "main", "pid": header["pid"], "spans": spans}]
    for pool in pools:
        lanes += pool.lanes(since_ns)
    return {"facts": header["facts"], "lanes": lanes}


class _Pool:
    """The control page and the trace buffers of the workers of one pool."""

    def __init__(
        self, pid: int, pool: dict[str, Any], samples: list[str | None], outer: dict[int, int]
    ) -> None:
        self._pids = [outer.get(one, one) if one else None for one in pool["pids"]]
        self._pass_offset: int = pool["pass_offset"]
        self._samples = samples
        self._cells: memoryview | None = None
        self._buffers: list[memoryview] = []
        self.num_bytes = 0
        """Memory that the pool's file really uses. The file is sparse."""
        num_workers, trace_bytes = len(self._pids), pool["trace_bytes"]
        path = f"/proc/{pid}/fd/{pool['fd']}"
        with suppress(OSError, ValueError):
            if not _link(path).startswith(_MEMFD):
                return
            fd = os.open(path, os.O_RDONLY)
            try:
                self.num_bytes = os.fstat(fd).st_blocks * 512
                size = control_bytes(num_workers, trace_bytes)
                self._cells = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ)).cast("q")
            finally:
                os.close(fd)
            self._buffers = trace_buffers(self._cells, num_workers, trace_bytes)

    def lanes(self, since_ns: int) -> list[dict[str, Any]]:
        found = []
        for number, buffer in enumerate(self._buffers):
            spans = recent_columns(buffer, since_ns, self._pass_offset)
            lane = {"name": f"worker {number}", "role": "worker", "number": number}
            found.append({**lane, "pid": self._pids[number] or 0, "spans": spans})
        return found

    def workers(self, at_ns: int) -> Iterator[WorkerView]:
        cells = self._cells
        for number, pid in enumerate(self._pids if cells is not None else ()):
            assert cells is not None
            cell = position_cell(number)
            position, is_idle = cells[cell], cells[cell + IS_IDLE]
            state = {1: "idle", NOTHING: "starting"}.get(is_idle, "loading")
            found = "S" if pid is None else _state(pid)
            state = {"T": "stopped", "": "lost", "Z": "lost"}.get(found, state)
            is_busy = state in ("loading", "stopped") and is_idle == 0
            records = read_records(self._buffers[number], 0)[0] if self._buffers else []
            since_ns = cells[cell + SINCE]  # on the same clock
            if since_ns <= 0:
                open_ns = [one.start_ns for one in records[-20:] if not one.end_ns]
                since_ns = open_ns[0] if open_ns else at_ns
            sample = self._samples[number] if number < len(self._samples) else None
            yield WorkerView(
                number=number,
                pid=pid,
                state=state,
                position=position if is_busy and position != NOTHING else None,
                sample=sample if is_busy else None,
                busy_s=max(0.0, (at_ns - since_ns) * 1e-9) if is_busy else 0.0,
                num_restarts=max(0, sum(one.kind == Kind.START for one in records) - 1),
                stack_fd=cells[cell + STACK_FD],
            )


def _head(buffer: bytes) -> int:
    return int.from_bytes(buffer[:8], "little")


def _inner_pid(pid: int) -> int:
    """Return the process's id in its own container."""
    ids = read_fields(Path(f"/proc/{pid}/status")).get("NSpid", "").split()
    return int(ids[-1]) if ids else pid


def _outer_pids(pid: int, inner: list[int]) -> dict[int, int]:
    """Return the ids in this container of processes of a program in a container within it.

    ``inner`` are their ids in the program's own container. Empty if both are in the same container.
    """
    namespace = _link(f"/proc/{pid}/ns/pid")
    if _inner_pid(pid) == pid and namespace in ("", _link("/proc/self/ns/pid")):
        return {}
    others = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    found = {_inner_pid(one): one for one in others if _link(f"/proc/{one}/ns/pid") == namespace}
    return {one: found.get(one, 0) for one in inner}  # 0: it has ended


def _state(pid: int) -> str:
    """Return the state letter of a process, or "" if it is gone."""
    text = read_text(Path(f"/proc/{pid}/stat"))
    return text.rpartition(") ")[2][:1]


def _command(pid: int) -> str:
    parts = read_text(Path(f"/proc/{pid}/cmdline")).split("\0")
    return " ".join(part for part in parts if part)
