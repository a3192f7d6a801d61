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

import torch

from penstock.device.cuda_runtime import CudaRuntime, load_driver
from penstock.device.on_demand_thread import OnDemandThread

IsDone = Callable[[], bool]

_DISABLE_TIMING = 2
_NOT_READY = 600
_CAPTURING = range(900, 910)
"""The driver's answers about captures of graphs."""


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
            torch.cuda.synchronize(self._runtime.index)
        except RuntimeError:  # the GPU is lost: nothing reads any more
            pass
        for done in asked:
            done[0] = True


class EventFence:
    """One event for all streams of a GPU's context; events are reused.

    Args:
        index: The GPU, whose context exists.
        fallback: Used where the driver refuses an event.

    Raises:
        OSError, AttributeError: There is no such driver here, or it is older than 12.5.
    """

    name = "an event of the whole GPU context"

    def __init__(self, index: int, fallback: Fence) -> None:
        self._fallback = fallback
        self._driver = load_driver()
        self._record_event = self._driver.cuCtxRecordEvent
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        _check(self._driver.cuDeviceGet(ctypes.byref(device), index))
        _check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device))
        self.free_events: list[ctypes.c_void_p] = []

    def record(self) -> IsDone:
        try:
            return _RecordedEvent(self)
        except OSError:
            return self._fallback.record()

    def make_event(self) -> ctypes.c_void_p:
        event, popped = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self._driver.cuCtxPushCurrent_v2(self._context))
        try:
            _check(self._driver.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING))
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
        return event

    def record_event(self, event: ctypes.c_void_p) -> bool:
        """Put the event after everything that was asked of any stream so far.

        False: a graph is being captured in the context, and it is to be tried again later.
        """
        status = int(self._record_event(self._context, event))
        if status in _CAPTURING:
            return False
        _check(status)
        return True

    def is_done(self, event: ctypes.c_void_p) -> bool:
        """Is everything before the event done? True also once the GPU is lost."""
        return int(self._driver.cuEventQuery(event)) != _NOT_READY


class _RecordedEvent:
    """One event; it returns to the free ones when nothing polls it any more."""

    def __init__(self, fence: EventFence) -> None:
        self._fence = fence
        self._is_done = False
        try:
            self._event = fence.free_events.pop()
        except IndexError:
            self._event = fence.make_event()
        self._is_recorded = False
        self._is_recorded = fence.record_event(self._event)

    def __call__(self) -> bool:
        if self._is_done:
            return True
        if not self._is_recorded:  # another thread captured a graph: again, now
            try:
                self._is_recorded = self._fence.record_event(self._event)
            except OSError:
                self._is_recorded = True  # the GPU is lost, as is_done will say
        else:
            self._is_done = self._fence.is_done(self._event)
        return self._is_done

    def __del__(self) -> None:
        if hasattr(self, "_is_recorded"):
            self._fence.free_events.append(self._event)  # recording it again replaces its meaning


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"the CUDA driver answered {status}")


def choose_fence(runtime: CudaRuntime) -> Fence:
    """The best that this driver offers. Called once the context exists."""
    waiting = SynchronizingFence(runtime)
    try:
        return EventFence(runtime.index, waiting)
    except (OSError, AttributeError):
        return waiting
