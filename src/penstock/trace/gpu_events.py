"""Timing of copies and steps on the GPU by events, converted to the host's clock.

::

    copy stream         begun == copy, finish == ended
    the step's stream              begun ===== step ===== ended
                                   ^ a batch is delivered   ^ the next batch is requested

Nothing waits for the GPU. Completed events are collected when later batches are requested. Events
give only the time between them. Once a second, an event on an idle stream relates them to the
host's clock.

A step is all work queued on its stream between two batches. It lasts at least until the next batch
is requested, so pauses in which the GPU waits for the next kernel of a step count as the step.

Called in the training process, by :mod:`penstock.device` and the loader's iterator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from penstock.trace.record import Kind, now_ns

MIN_INTERVAL_NS = 3_000_000
"""Without a requested trace, only batches at least this far apart are timed. Each takes about a
dozen driver calls, an estimated 20 microseconds, which must cost less than 1 %."""
ANCHOR_NS = 1_000_000_000
"""Interval between clock comparisons. They are repeated because the clocks drift."""
_PATIENCE_NS = 100_000
"""Time limit of a clock comparison. If it is exceeded, the next batch tries again."""
_MAX_WAIT_NS = 1_000_000_000
_MAX_PENDING = 256
"""Maximum number of operations that have not ended. Beyond it, the oldest are dropped."""


class GpuOperation:
    """A copy or step in progress on the GPU, with its first and last event."""

    __slots__ = ("asked_ns", "batch", "begun", "device", "ended", "kind", "num_bytes")

    def __init__(self, kind: int, batch: int, device: torch.device) -> None:
        self.kind, self.batch, self.device = kind, batch, device
        self.begun, self.ended = _event(), _event()
        self.num_bytes = 0
        self.asked_ns = now_ns()


class GpuWatch:
    """Records the copies and steps of one loader.

    Args:
        note: Called for each completed operation. See
            :meth:`penstock.trace.recorder.Recorder.record_device`.
        is_asked: The user requested a trace, so every batch is timed, however fast they are.
    """

    def __init__(self, note: Callable[..., None], *, is_asked: bool) -> None:
        self._note = note
        self._is_asked = is_asked
        self._is_on = False
        self._pending: deque[GpuOperation] = deque()
        self._step: GpuOperation | None = None
        self._clocks: dict[torch.device, GpuClock] = {}
        self._last_ns = self._interval_ns = 0

    def begin_copy(self, stream: Any, batch: int) -> GpuOperation | None:
        """Start timing a copy, before it is queued. Returns None if it is not timed."""
        return self._begin(Kind.COPY, stream, batch) if self._is_on else None

    def end_copy(self, copy: GpuOperation, stream: Any, num_bytes: int) -> Any:
        """Stop timing a copy, after it was queued. Returns its last event, to wait for."""
        copy.num_bytes = num_bytes
        return self._end(copy, stream)

    def begin_step(self, batch: int) -> None:
        """Start timing a step, when its batch is delivered. It runs on the user's stream."""
        try:
            if self._is_on and _can_record():
                self._step = self._begin(Kind.GPU, torch.cuda.current_stream(), batch)
        except RuntimeError:  # the GPU is lost; the user's next operation on it raises
            self._is_on = False

    def end_step(self) -> None:
        """Stop timing the step, when the next batch is requested."""
        at_ns = now_ns()
        gap_ns, self._last_ns = at_ns - self._last_ns, at_ns
        self._interval_ns += (gap_ns - self._interval_ns) // 8 if gap_ns < 10**9 else 0
        step, self._step = self._step, None
        self._is_on = (self._is_asked or self._interval_ns >= MIN_INTERVAL_NS) and _can_record()
        if not self._is_on:
            self._pending.clear()
            return
        try:
            if step is not None:
                self._end(step, torch.cuda.current_stream())
            self._collect()
        except RuntimeError:  # as above
            self._pending.clear()

    def end_pass(self) -> None:
        """Collect the last steps of an epoch. Waits for them if a trace was requested."""
        until_ns = now_ns() + _MAX_WAIT_NS * self._is_asked
        try:
            while self._pending:
                self._collect()
                if now_ns() > until_ns:
                    return
                time.sleep(0.001)
        except RuntimeError:  # as above
            self._pending.clear()

    def reset(self) -> None:
        """Discard the operations in progress, because a new epoch begins."""
        self._pending.clear()
        self._step = None

    def _begin(self, kind: int, stream: Any, batch: int) -> GpuOperation:
        op = GpuOperation(kind, batch, stream.device)
        op.begun.record(stream)
        return op

    def _end(self, op: GpuOperation, stream: Any) -> Any:
        op.ended.record(stream)
        self._pending.append(op)
        if len(self._pending) > _MAX_PENDING:
            self._pending.popleft()
        return op.ended

    def _collect(self) -> None:
        for _ in range(len(self._pending)):
            op = self._pending.popleft()
            if not op.ended.query():
                self._pending.append(op)
                continue
            clock = self._clocks.get(op.device)
            if clock is None:
                clock = self._clocks[op.device] = GpuClock(op.device)
            clock.compare()
            start_ns, end_ns = clock.place(op, now_ns())
            self._note(op.kind, start_ns, end_ns, batch=op.batch, num_bytes=op.num_bytes)


class GpuClock:
    """Converts the times of one GPU's events to the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._known: Any = None
        self._known_ns = self._compared_ns = 0

    def compare(self) -> None:
        """Compare both clocks, if due. The event's stream is idle, so the event is not delayed."""
        before_ns = now_ns()
        if self._known is not None and before_ns - self._compared_ns < ANCHOR_NS:
            return
        event = _event()
        event.record(self._idle)
        while not event.query():
            if now_ns() - before_ns > _PATIENCE_NS:
                return
        self._compared_ns = now_ns()
        self._known, self._known_ns = event, (before_ns + self._compared_ns) // 2

    def place(self, op: GpuOperation, seen_ns: int) -> tuple[int, int]:
        """Return when the operation began and ended. It had ended by ``seen_ns``.

        The result is never before the operation was queued, even if the clocks disagree.
        """
        took_ns = _between_ns(op.begun, op.ended)
        start_ns = op.asked_ns
        if self._known is not None:
            start_ns = self._known_ns + _between_ns(self._known, op.begun)
        start_ns = max(op.asked_ns, min(start_ns, seen_ns - took_ns))
        if self._known is None or seen_ns - self._known_ns > 4 * ANCHOR_NS:
            # elapsed_time() is in single precision, so the reference event must be recent.
            self._known, self._known_ns = op.ended, start_ns + took_ns
        return start_ns, start_ns + took_ns


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _between_ns(first: Any, second: Any) -> int:
    return round(float(first.elapsed_time(second)) * 1e6)


def _can_record() -> bool:
    """Return True if a GPU is in use and no graph is captured, which would include the events."""
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_open) and not torch.cuda.is_current_stream_capturing()
