"""Fences that tell when a GPU no longer reads a piece of memory.

A copy with ``non_blocking=True`` reads its source after the call has returned, on any stream that
the user chose, and the source tensor may be freed by then. An event on the current stream does not
cover such a copy: in a test on an H200 every byte was wrong. So a fence covers *all* work submitted
to the GPU so far:

- ``EventFence``: one event for all streams of the context (NVIDIA driver 12.5 and newer).
- ``SynchronizingFence``: on older drivers and on AMD GPUs, a thread synchronizes the whole device.

Neither is used while the user captures a graph, because querying the GPU would break the capture.
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
"""Status codes of the driver that concern graph capture."""


class Fence(Protocol):
    """Separates the last use of a slot from its reuse. There is one fence for each GPU."""

    name: str

    def record(self) -> IsDone:
        """Return a function to poll. It returns True once all work submitted before is done."""


class SynchronizingFence:
    """A fence whose thread synchronizes the device, once for all records made in the meantime."""

    name = "a thread that waits for the GPU"

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self.thread: OnDemandThread[list[bool]] = OnDemandThread(self._wait)

    def record(self) -> IsDone:
        # Not a threading.Event, because the garbage collector may call this while its lock is held.
        done = [False]
        self.thread.submit(done)
        return lambda: done[0]

    def _wait(self, asked: list[list[bool]]) -> None:
        try:
            torch.cuda.synchronize(self._runtime.index)
        except RuntimeError:  # the GPU is lost, so nothing reads the memory
            pass
        for done in asked:
            done[0] = True


class EventFence:
    """A fence that records one event for all streams of a GPU's context. Events are reused.

    Args:
        index: The GPU. Its context must exist.
        fallback: Used if the driver refuses an event.

    Raises:
        OSError, AttributeError: There is no NVIDIA driver, or it is older than 12.5.
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
        """Record the event after all work submitted to any stream so far.

        Returns False if a graph is being captured in the context. The caller must retry later.
        """
        status = int(self._record_event(self._context, event))
        if status in _CAPTURING:
            return False
        _check(status)
        return True

    def is_done(self, event: ctypes.c_void_p) -> bool:
        """Return True if all work before the event is done, or the GPU is lost."""
        return int(self._driver.cuEventQuery(event)) != _NOT_READY


class _RecordedEvent:
    """One recorded event. It returns to the free events when this object is deleted."""

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
        if not self._is_recorded:  # a graph was being captured: retry
            try:
                self._is_recorded = self._fence.record_event(self._event)
            except OSError:
                self._is_recorded = True  # the GPU is lost, so is_done returns True
        else:
            self._is_done = self._fence.is_done(self._event)
        return self._is_done

    def __del__(self) -> None:
        if hasattr(self, "_is_recorded"):
            self._fence.free_events.append(self._event)  # can be recorded again


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"the CUDA driver returned {status}")


def choose_fence(runtime: CudaRuntime) -> Fence:
    """Return the best fence that the driver supports. Called after the context exists."""
    waiting = SynchronizingFence(runtime)
    try:
        return EventFence(runtime.index, waiting)
    except (OSError, AttributeError):
        return waiting
