"""Times of copies and steps on the GPU, by its own events, on this machine's clock.

::

    copy stream         begun == copy, finish == ended
    the step's stream              begun ===== step ===== ended
                                   ^ a batch is handed out  ^ the next one is asked for

Nothing waits for the GPU: whether an event is over is asked when a later batch goes by. Events tell
only the time between them. Their place on this machine's clock is found once a second, by an event
on a stream that has nothing else to do.

A step is all that was asked of its stream between two batches, and lasts at least until the next
batch is asked for: moments in which the GPU waits for the next kernel of a step belong to the step.

Called from: the training process, by :mod:`penstock.device` and the loader's iterator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from penstock.trace.record import Kind, now_ns

MIN_INTERVAL_NS = 3_000_000
"""Unasked, only batches that are at least this far apart are watched: about a dozen driver calls
for each, an estimated 20 microseconds, must cost less than 1 %."""
ANCHOR_NS = 1_000_000_000
"""How often the clocks are compared: no two run equally fast."""
_PATIENCE_NS = 100_000
"""How long comparing them may take; else it is tried again at the next batch."""
_MAX_WAIT_NS = 1_000_000_000
_MAX_PENDING = 256
"""Operations whose end is waited for; beyond it the oldest are given up."""


class GpuOperation:
    """A copy or a step under way on the GPU: its first and last event."""

    __slots__ = ("asked_ns", "batch", "begun", "device", "ended", "kind", "num_bytes")

    def __init__(self, kind: int, batch: int, device: torch.device) -> None:
        self.kind, self.batch, self.device = kind, batch, device
        self.begun, self.ended = _event(), _event()
        self.num_bytes = 0
        self.asked_ns = now_ns()


class GpuWatch:
    """Records copies and steps of one loader.

    Args:
        note: Takes what was seen; see :meth:`penstock.trace.recorder.Recorder.record_device`.
        is_asked: A trace was asked for: every batch is watched, however fast they come.
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
        """A copy is about to be queued on this stream; None: it is not watched."""
        return self._begin(Kind.COPY, stream, batch) if self._is_on else None

    def end_copy(self, copy: GpuOperation, stream: Any, num_bytes: int) -> Any:
        """The copy was queued; returns its last event, for which others may wait."""
        copy.num_bytes = num_bytes
        return self._end(copy, stream)

    def begin_step(self, batch: int) -> None:
        """The batch is handed out: what comes now on the user's stream is the step."""
        try:
            if self._is_on and _can_record():
                self._step = self._begin(Kind.GPU, torch.cuda.current_stream(), batch)
        except RuntimeError:  # the GPU is lost; whoever uses it next says so
            self._is_on = False

    def end_step(self) -> None:
        """Another batch is asked for."""
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
        """The epoch is over: where a trace was asked for, its last steps are waited for."""
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
        """Another epoch begins: what is still under way belongs to none."""
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
    """Converts the times of one GPU's events to this machine's clock."""

    def __init__(self, device: torch.device) -> None:
        self._idle = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._known: Any = None
        self._known_ns = self._compared_ns = 0

    def compare(self) -> None:
        """Look at both clocks, if it is time to. Nothing stands before the event on its stream."""
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
        """When the operation began and ended; ``seen_ns``: it was over by then.

        Whatever the clocks say, nothing begins before it was asked for.
        """
        took_ns = _between_ns(op.begun, op.ended)
        start_ns = op.asked_ns
        if self._known is not None:
            start_ns = self._known_ns + _between_ns(self._known, op.begun)
        start_ns = max(op.asked_ns, min(start_ns, seen_ns - took_ns))
        if self._known is None or seen_ns - self._known_ns > 4 * ANCHOR_NS:
            # The GPU gives milliseconds in single precision: not too far from the last one.
            self._known, self._known_ns = op.ended, start_ns + took_ns
        return start_ns, start_ns + took_ns


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _between_ns(first: Any, second: Any) -> int:
    return round(float(first.elapsed_time(second)) * 1e6)


def _can_record() -> bool:
    """Whether a GPU is in use, and no graph is captured that our events would become part of."""
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_open) and not torch.cuda.is_current_stream_capturing()
