"""Fences: when memory that a GPU may still be reading is free again.

A copy with ``non_blocking=True`` reads its source after the call has returned, on whatever stream
the user chose, and the source tensor may be gone by then. An event on the current stream does not
cover that copy: on an H200 every byte was wrong. So a fence stands after *everything* asked of the
GPU so far:

- ``EventFence``: one event for all streams of the context (NVIDIA's driver, 12.5 and newer).
- ``SynchronizingFence``: elsewhere, and on AMD's GPUs, a thread synchronizes the whole device.

Neither is used while the user captures a graph: asking would break the capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

from penstock.device.cuda_runtime import ContextEvents, CudaRuntime
from penstock.device.on_demand_thread import OnDemandThread

IsDone = Callable[[], bool]


class Fence(Protocol):
    """Between the last view of a slot and its next use. One for each GPU."""

    name: str

    def record(self) -> IsDone:
        """A function to poll: is all that was asked of the GPU before this call done?"""


class SynchronizingFence:
    """A thread waits until the GPU has done everything, once for all that asked meanwhile."""

    name = "a thread that waits for the GPU"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self.thread: OnDemandThread[list[bool]] = OnDemandThread(self._wait)

    def record(self) -> IsDone:
        done = [False]  # no threading.Event: its lock may be held when the collector calls us
        self.thread.submit(done)
        return lambda: done[0]

    def _wait(self, asked: list[list[bool]]) -> None:
        try:
            self._runtime.synchronize()
        except RuntimeError:  # the GPU is lost: nothing reads any more
            pass
        for done in asked:
            done[0] = True


class EventFence:
    """One event of the driver's for all streams; events are reused.

    Args:
        fallback: Used where the driver refuses an event.
    """

    name = "an event of the whole GPU context"

    def __init__(self, events: ContextEvents, fallback: Fence) -> None:
        self._events = events
        self._fallback = fallback
        self._free: list[ctypes.c_void_p] = []

    def record(self) -> IsDone:
        try:
            return _RecordedEvent(self._events, self._free)
        except OSError:
            return self._fallback.record()


class _RecordedEvent:
    """One event; it returns to the free ones when nothing polls it any more."""

    def __init__(self, events: ContextEvents, free: list[ctypes.c_void_p]) -> None:
        self._events, self._free = events, free
        self._is_done = False
        try:
            self._event = free.pop()
        except IndexError:
            self._event = events.make()
        self._is_recorded = False
        self._is_recorded = events.record(self._event)

    def __call__(self) -> bool:
        if self._is_done:
            return True
        if not self._is_recorded:  # another thread captured a graph: again, now
            try:
                self._is_recorded = self._events.record(self._event)
            except OSError:
                self._is_recorded = True  # the GPU is lost, as is_done will say
        else:
            self._is_done = self._events.is_done(self._event)
        return self._is_done

    def __del__(self) -> None:
        if hasattr(self, "_is_recorded"):
            self._free.append(self._event)  # recording it again replaces what it stood for


def choose_fence(runtime: CudaRuntime) -> Fence:
    """The best that this driver offers. Called once the context exists."""
    waiting = SynchronizingFence(runtime)
    try:
        return EventFence(ContextEvents(runtime.index), waiting)
    except (OSError, AttributeError):
        return waiting
