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

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from penstock.device.runtime import ContextEvents, Runtime, allow_during_capture

IsOver = Callable[[], bool]


class Fence(Protocol):
    """Stands between the last view of a slot and its next use."""

    name: str

    def record(self) -> IsOver:
        """A question to ask again and again: is all that was asked before this call done?"""

    def close(self) -> None:
        """Stop what runs in the background."""


class ContextFence:
    """One event of the driver's for all streams; events are used again."""

    name = "an event of the whole GPU context"

    def __init__(self, events: ContextEvents) -> None:
        self._events = events
        self._free: list[object] = []

    def record(self) -> IsOver:
        event = self._free.pop() if self._free else self._events.make()
        self._events.record(event)  # type: ignore[arg-type]
        is_done = False

        def is_over() -> bool:
            nonlocal is_done
            if not is_done and self._events.is_over(event):  # type: ignore[arg-type]
                is_done = True
                self._free.append(event)
            return is_done

        return is_over

    def close(self) -> None:
        self._free.clear()


class WaitingFence:
    """A thread waits until the GPU has done everything, once for all that asked meanwhile."""

    name = "a thread that waits for the GPU"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._asked: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def record(self) -> IsOver:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_wait_for_all, args=(self._asked, self._runtime), daemon=True
            )
            self._thread.start()
        done = threading.Event()
        self._asked.put(done)
        return done.is_set

    def close(self) -> None:
        self._asked.put(None)


def _wait_for_all(asked: queue.SimpleQueue[threading.Event | None], runtime: Runtime) -> None:
    """The thread of a :class:`WaitingFence`."""
    allow_during_capture()
    while True:
        batch = [asked.get()]
        while not asked.empty():
            batch.append(asked.get())
        try:
            runtime.synchronise()
        except RuntimeError:  # the GPU is lost: nothing reads any more
            pass
        for done in batch:
            if done is not None:
                done.set()
        if None in batch:
            return


def choose_fence(runtime: Runtime) -> Fence:
    """The best that this driver offers. Called once the context exists."""
    try:
        return ContextFence(ContextEvents(runtime.index))
    except (OSError, AttributeError):
        return WaitingFence(runtime)
