"""Recorder of a worker: one record per part of a batch, in its buffer in the shared file.

On request, it also writes one record per sample. Some parts are measured in detail: the time spent
copying into the slot, the time waiting for a core, and the memory held.
Called by :mod:`penstock.engine.worker.loop`, in the worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from penstock.machine.host import num_major_faults, queued_s, resident_bytes
from penstock.trace.record import (
    NO_PLACE,
    Kind,
    TraceBuffer,
    enter_process,
    enter_thread,
    next_look_ns,
    now_ns,
)
from penstock.trace.transform_spans import trace_steps


class WorkerRecorder:
    """Records the work of one worker.

    Args:
        buffer: The worker's buffer in the shared file. None turns recording off.
        traces_samples: Also record each sample.
        traces_steps: Record each transform of torchvision's ``Compose``.
        is_thread: The worker is a thread of the user's process, not a separate process.
    """

    def __init__(
        self,
        buffer: memoryview | None,
        *,
        traces_samples: bool,
        traces_steps: bool,
        is_thread: bool,
    ) -> None:
        self._buffer: TraceBuffer | None = None
        self._per_sample = traces_samples
        self._traces_steps = traces_steps
        self._is_thread = is_thread
        self._next_look_ns = self._start_ns = self._cpu_ns = self._inside_ns = 0
        self._number = self._num_looks = 0
        self._queued_s = 0.0
        self._is_close = False
        self._position = 0
        if buffer is not None:
            self._buffer = TraceBuffer(buffer)
            self._buffer.add(Kind.START, now_ns(), now_ns(), a=os.getpid())

    def enter(self) -> None:
        """Record the user's spans in this buffer from now on. Called once, in the worker."""
        if self._traces_steps:
            trace_steps()
        if self._is_thread:
            enter_thread(self._buffer)
        else:
            enter_process(self._buffer)

    def begin(self, lease: Any) -> None:
        """Begin a lease. Must be fast, because small parts take only 40 microseconds."""
        self._start_ns = start_ns = now_ns()
        buffer = self._buffer
        if buffer is None:
            return
        pass_, batch, part = buffer.place = lease[:3]
        rows = lease.rows if lease.is_whole else len(lease.index)
        self._number = buffer.add(Kind.LEASE, start_ns, 0, pass_, batch, part, rows, -1, -1, -1)
        if start_ns > self._next_look_ns:
            self._is_close, self._inside_ns = True, 0
            self._queued_s = queued_s()
            self._cpu_ns = time.thread_time_ns()
        if self._per_sample:
            self._position = lease.position

    def end(self, *, is_loaded: bool) -> int:
        """End a lease. Returns its duration in nanoseconds.

        Args:
            is_loaded: The part was loaded completely, not abandoned.
        """
        buffer, end_ns = self._buffer, now_ns()
        if buffer is not None:
            if not is_loaded:  # otherwise the samples would appear to be fast
                buffer.set_rows(self._number, 0)
            if self._is_close:
                self._look(buffer, end_ns)
            else:
                buffer.end(self._number, end_ns)
            buffer.place = NO_PLACE
        return end_ns - self._start_ns

    def collated(self, start_ns: int) -> None:
        """Record a call of the user's collate_fn that began at ``start_ns`` and has just ended."""
        if self._buffer is not None:
            self._buffer.add(Kind.COLLATE, start_ns, now_ns(), *self._buffer.place)

    def watch(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Return the same samples. Each is timed on request and during detailed measurements."""
        if self._buffer is None or not (self._is_close or self._per_sample):
            return samples
        return self._timed(samples, self._buffer)

    def _timed(self, samples: Iterator[Any], buffer: TraceBuffer) -> Iterator[Any]:
        start_ns = now_ns()
        for sample in samples:
            end_ns = now_ns()
            self._inside_ns += end_ns - start_ns
            if self._per_sample:
                buffer.add(Kind.SAMPLE, start_ns, end_ns, *buffer.place, 1, self._position)
                self._position += 1
            yield sample
            start_ns = now_ns()

    def _look(self, buffer: TraceBuffer, end_ns: int) -> None:
        """Complete the record of a part that was measured in detail."""
        cpu_ns = time.thread_time_ns() - self._cpu_ns
        queued_ns = int((queued_s() - self._queued_s) * 1e9)
        if self._inside_ns:
            buffer.set_extra(self._number, (end_ns - self._start_ns - self._inside_ns) // 1000)
        buffer.end(self._number, end_ns, cpu_ns, queued_ns)
        self._is_close = False
        self._num_looks += 1
        self._next_look_ns = next_look_ns(end_ns, self._num_looks)
        if not self._is_thread:
            num_kb, faults = resident_bytes() >> 10, num_major_faults()
            buffer.add(Kind.MEMORY, end_ns, end_ns, a=num_kb, b=faults)
