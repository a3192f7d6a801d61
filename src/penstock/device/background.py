"""Things that are done in a thread which is there only while there is something to do.

Called from anywhere, garbage collection included: handing something over puts it into a queue, and
starts a bare thread where none is running. So no loader leaves a thread behind, and none has to be
told to end it.

At the end of the program what runs is waited for: a thread that comes back from the GPU's driver
into an interpreter that is gone ends the whole process with an error.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from penstock.device.cuda_runtime import allow_during_capture

Item = TypeVar("Item")

WAIT_AT_EXIT_S = 10.0


class Background(Generic[Item]):
    """Does ``work`` with what it is handed, all that has come together at once.

    Args:
        work: Takes items out of the list as it goes: what stays in it is kept alive.
    """

    def __init__(self, work: Callable[[list[Item]], None]) -> None:
        self._work = work
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._left: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._is_running = False
        self._lock = threading.RLock()  # the collector may call take() while we hold it
        self._process = os.getpid()

    @property
    def is_running(self) -> bool:
        """Is there a thread now, in this process? A fork has none of its parent's."""
        return self._is_running and self._process == os.getpid()

    def take(self, item: Item) -> None:
        """Have it done soon; at the end of the program not at all: the system frees everything."""
        if _is_over:
            return
        if os.getpid() != self._process:
            self._forget()  # the thread is our parent's, and so is what waited for it
        self._left.put(item)
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        try:  # not threading.Thread, whose start takes locks and waits
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no thread can be had
            self._is_running = False

    def _run(self) -> None:
        allow_during_capture()
        while True:
            with self._lock:
                self._is_running = False
                if self._left.empty():
                    return
                self._is_running = True
            try:
                self._work(self._take_all())
            except BaseException:
                self._is_running = False  # the next one is done by another thread
                raise

    def _take_all(self) -> list[Item]:
        items: list[Item] = []
        try:
            while True:
                items.append(self._left.get_nowait())
        except queue.Empty:
            return items


_all: weakref.WeakSet[Background[Any]] = weakref.WeakSet()
_is_over = False


@atexit.register
def _wait_for_all() -> None:
    global _is_over
    _is_over = True
    until_s = time.monotonic() + WAIT_AT_EXIT_S
    while any(one.is_running for one in list(_all)) and time.monotonic() < until_s:
        time.sleep(0.001)
