"""The recorder of a worker: one record for each part of a batch, in its buffer of the shared file.

There is one for each sample, too, when that was asked for. Now and then a part is looked at
closely: what copying into the slot took, how long a core was waited for, and how much memory is
held.
Called from: :mod:`penstock.engine.worker.loop`, in the worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import psutil

from penstock.machine.host import queued_s
from penstock.trace.record import NO_PLACE, Kind, TraceBuffer, enter_process, enter_thread, now_ns
from penstock.trace.transform_spans import trace_steps

CLOSE_LOOK_NS, EARLY_LOOKS, LATER_LOOK_NS = 50_000_000, 10, 250_000_000
"""A close look costs 30 to 60 microseconds. The first ones are at least the first interval apart,
the later ones the second."""


def next_look_ns(at_ns: int, num_looks: int) -> int:
    """When another close look is due, after ``num_looks`` of them."""
    return at_ns + (CLOSE_LOOK_NS if num_looks < EARLY_LOOKS else LATER_LOOK_NS)


class WorkerRecorder:
    """Records what one worker does.

    Args:
        buffer: Its part of the shared file; None: nothing is recorded.
        traces_samples: Record each sample, too.
        traces_steps: Record each transform of torchvision's ``Compose``.
        is_thread: Of the user's process, and not a process of its own.
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
        self._process = own_process() if not is_thread else None
        if buffer is not None:
            self._buffer = TraceBuffer(buffer)
            self._buffer.add(Kind.START, now_ns(), now_ns(), a=os.getpid())

    def enter(self) -> None:
        """From now on the user's spans are recorded here. Called from: the worker, once."""
        if self._traces_steps:
            trace_steps()
        if self._is_thread:
            enter_thread(self._buffer)
        else:
            enter_process(self._buffer)

    def begin(self, lease: Any) -> None:
        """A lease is about to be served. Small parts take 40 microseconds: this must be quick."""
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
        """The lease is served; returns the nanoseconds it took.

        Args:
            is_loaded: It was not dropped half way.
        """
        buffer, end_ns = self._buffer, now_ns()
        if buffer is not None:
            if not is_loaded:  # else the samples would seem to have been quick
                buffer.set_rows(self._number, 0)
            if self._is_close:
                self._look(buffer, end_ns)
            else:
                buffer.end(self._number, end_ns)
            buffer.place = NO_PLACE
        return end_ns - self._start_ns

    def collated(self, start_ns: int) -> None:
        """The user's collate_fn has run since ``start_ns``."""
        if self._buffer is not None:
            self._buffer.add(Kind.COLLATE, start_ns, now_ns(), *self._buffer.place)

    def watch(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the same samples; where that was asked for, time each."""
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
        """Complete the record of a part that was looked at closely."""
        cpu_ns = time.thread_time_ns() - self._cpu_ns
        queued_ns = int((queued_s() - self._queued_s) * 1e9)
        if self._inside_ns:
            buffer.set_extra(self._number, (end_ns - self._start_ns - self._inside_ns) // 1000)
        buffer.end(self._number, end_ns, cpu_ns, queued_ns)
        self._is_close = False
        self._num_looks += 1
        self._next_look_ns = next_look_ns(end_ns, self._num_looks)
        if self._process is not None:
            num_bytes, faults = memory_and_faults(self._process)
            buffer.add(Kind.MEMORY, end_ns, end_ns, a=num_bytes >> 10, b=faults)


def own_process() -> psutil.Process | None:
    """This process, as psutil sees it; None where there is no ``/proc``."""
    try:
        return psutil.Process()
    except (psutil.Error, OSError):
        return None


def memory_and_faults(process: psutil.Process | None) -> tuple[int, int]:
    """Resident memory of a process in bytes, and its major page faults; 0: unknown."""
    if process is None:
        return 0, 0
    try:
        num_bytes = process.memory_info().rss
    except (psutil.Error, OSError):  # no descriptor to be had, say
        return 0, 0
    try:
        import resource

        return num_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    except ImportError:  # Windows
        return num_bytes, 0
