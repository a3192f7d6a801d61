"""When is memory that a GPU may still be reading free again?

A copy with ``non_blocking=True`` reads its source after the call has returned, on whatever stream
the user chose, and the source tensor may be gone by then. An event on the current stream does not
see that copy: on an H200 every byte was wrong. So a fence stands after *everything* asked of the
GPU so far:

- ``ContextFence``: one event for all streams of the context (NVIDIA's driver, 12.5 and newer).
- ``WaitingFence``: elsewhere, and on AMD's GPUs, a thread of ours waits for the whole device.

Neither is used while the user captures a graph: asking would break the capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

from penstock.device.background import Background
from penstock.device.cuda_runtime import ContextEvents, Runtime

IsOver = Callable[[], bool]


class Fence(Protocol):
    """Stands between the last view of a slot and its next use. One for each GPU."""

    name: str

    def record(self) -> IsOver:
        """A question to ask again and again: is all that was asked before this call done?"""


class WaitingFence:
    """A thread waits until the GPU has done everything, once for all that asked meanwhile."""

    name = "a thread that waits for the GPU"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.background: Background[list[bool]] = Background(self._wait)

    def record(self) -> IsOver:
        done = [False]  # no threading.Event: its locks may be held when the collector calls us
        self.background.take(done)
        return lambda: done[0]

    def _wait(self, asked: list[list[bool]]) -> None:
        try:
            self._runtime.synchronise()
        except RuntimeError:  # the GPU is lost: nothing reads any more
            pass
        for done in asked:
            done[0] = True


class ContextFence:
    """One event of the driver's for all streams; events are used again.

    Args:
        otherwise: Is asked instead where the driver refuses an event.
    """

    name = "an event of the whole GPU context"

    def __init__(self, events: ContextEvents, otherwise: Fence) -> None:
        self._events = events
        self._otherwise = otherwise
        self._free: list[ctypes.c_void_p] = []

    def record(self) -> IsOver:
        try:
            return _Mark(self._events, self._free)
        except OSError:
            return self._otherwise.record()


class _Mark:
    """One event, recorded; it goes back to those that are free when nobody asks any more."""

    def __init__(self, events: ContextEvents, free: list[ctypes.c_void_p]) -> None:
        self._events, self._free = events, free
        self._is_over = False
        try:
            self._event = free.pop()
        except IndexError:
            self._event = events.make()
        self._is_recorded = False
        self._is_recorded = events.record(self._event)

    def __call__(self) -> bool:
        if self._is_over:
            return True
        if not self._is_recorded:  # another thread captured a graph: again, now
            try:
                self._is_recorded = self._events.record(self._event)
            except OSError:
                self._is_recorded = True  # the GPU is lost, and so says is_over
        else:
            self._is_over = self._events.is_over(self._event)
        return self._is_over

    def __del__(self) -> None:
        if hasattr(self, "_is_recorded"):
            self._free.append(self._event)  # whoever records it next forgets what it stood for


def choose_fence(runtime: Runtime) -> Fence:
    """The best that this driver offers. Called once the context exists."""
    waiting = WaitingFence(runtime)
    try:
        return ContextFence(ContextEvents(runtime.index), waiting)
    except (OSError, AttributeError):
        return waiting
