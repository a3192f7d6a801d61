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

from penstock.trace.record import COPY, GPU, now_ns

MIN_PACE_NS = 3_000_000
"""Unasked, only batches that are at least this far apart are watched: about a dozen calls of the
driver's for each, an estimated 20 microseconds, are to cost less than 1 %."""
ANCHOR_NS = 1_000_000_000
"""How often the clocks are compared: no two run equally fast."""
_PATIENCE_NS = 100_000
"""How long comparing them may take; else it is tried again at the next batch."""
_MAX_WAIT_NS = 1_000_000_000
_MAX_PENDING = 256
"""Spans whose end is waited for; beyond it the oldest are given up."""


class GpuOperation:
    """Something under way on the GPU."""

    __slots__ = ("asked_ns", "batch", "begun", "device", "ended", "kind", "num_bytes")

    def __init__(self, kind: int, batch: int, device: torch.device) -> None:
        self.kind, self.batch, self.device = kind, batch, device
        self.begun, self.ended = _event(), _event()
        self.num_bytes = 0
        self.asked_ns = now_ns()


class GpuWatch:
    """Notes copies and steps of one loader.

    Args:
        note: Takes what was seen; see :meth:`penstock.trace.recorder.Recorder.on_device`.
        is_asked: Somebody wants a trace: every batch is watched, however fast they come.
    """

    def __init__(self, note: Callable[..., None], *, is_asked: bool) -> None:
        self._note = note
        self._is_asked = is_asked
        self._is_on = False
        self._pending: deque[GpuOperation] = deque()
        self._step: GpuOperation | None = None
        self._clocks: dict[torch.device, GpuClock] = {}
        self._last_ns = self._pace_ns = 0

    def begin_copy(self, stream: Any, batch: int) -> GpuOperation | None:
        """A copy is about to be asked for on this stream; None: it is not watched."""
        return self._begin(COPY, stream, batch) if self._is_on else None

    def end_copy(self, copy: GpuOperation, stream: Any, num_bytes: int) -> Any:
        """It was asked for. Its last event, for which others may wait."""
        copy.num_bytes = num_bytes
        return self._end(copy, stream)

    def begin_step(self, batch: int) -> None:
        """The batch is handed out: what comes now on the user's stream is his step."""
        try:
            if self._is_on and _can_ask():
                self._step = self._begin(GPU, torch.cuda.current_stream(), batch)
        except RuntimeError:  # the GPU is lost; whoever uses it next says so
            self._is_on = False

    def end_step(self) -> None:
        """Another batch is asked for."""
        at_ns = now_ns()
        gap_ns, self._last_ns = at_ns - self._last_ns, at_ns
        self._pace_ns += (gap_ns - self._pace_ns) // 8 if gap_ns < 10**9 else 0
        is_wanted = self._is_asked or self._pace_ns >= MIN_PACE_NS
        if not is_wanted and not self._pending:
            self._is_on, self._step = False, None
            return
        step, self._step = self._step, None
        self._is_on = is_wanted and _can_ask()
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
        operation = GpuOperation(kind, batch, stream.device)
        operation.begun.record(stream)
        return operation

    def _end(self, operation: GpuOperation, stream: Any) -> Any:
        operation.ended.record(stream)
        self._pending.append(operation)
        if len(self._pending) > _MAX_PENDING:
            self._pending.popleft()
        return operation.ended

    def _collect(self) -> None:
        for _ in range(len(self._pending)):
            operation = self._pending.popleft()
            if not operation.ended.query():
                self._pending.append(operation)
                continue
            clock = self._clocks.get(operation.device)
            if clock is None:
                clock = self._clocks[operation.device] = GpuClock(operation.device)
            clock.compare()
            start_ns, end_ns = clock.place(operation, now_ns())
            self._note(
                operation.kind,
                start_ns,
                end_ns,
                batch=operation.batch,
                num_bytes=operation.num_bytes,
            )


class GpuClock:
    """Where the events of one GPU lie on this machine's clock."""

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

    def place(self, operation: GpuOperation, seen_ns: int) -> tuple[int, int]:
        """When the operation began and ended; ``seen_ns``: it was over by then.

        Whatever the clocks say, nothing begins before it was asked for.
        """
        took_ns = _between_ns(operation.begun, operation.ended)
        start_ns = operation.asked_ns
        if self._known is not None:
            start_ns = self._known_ns + _between_ns(self._known, operation.begun)
        start_ns = max(operation.asked_ns, min(start_ns, seen_ns - took_ns))
        if self._known is None or seen_ns - self._known_ns > 4 * ANCHOR_NS:
            # The GPU gives milliseconds in single precision: not too far from the last one.
            self._known, self._known_ns = operation.ended, start_ns + took_ns
        return start_ns, start_ns + took_ns


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _between_ns(first: Any, second: Any) -> int:
    return round(float(first.elapsed_time(second)) * 1e6)


def _can_ask() -> bool:
    """Is there a GPU in use, and no graph being captured that our events would become part of?"""
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(is_open) and not torch.cuda.is_current_stream_capturing()
