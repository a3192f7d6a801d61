"""A background thread that exists only while it has work.

Submitting is safe from anywhere, including garbage collection. It puts an item into a queue and
starts a bare thread if none is running. So loaders leave no thread behind and need not stop one.

At exit, a running thread is joined. A thread that returns from the GPU driver after the interpreter
has shut down would end the process with an error.
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


class OnDemandThread(Generic[Item]):
    """Calls ``work`` with a list of all items submitted so far.

    Args:
        work: Should remove items from the list as it processes them. Items in the list stay alive.
    """

    def __init__(self, work: Callable[[list[Item]], None]) -> None:
        self._work = work
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._is_running = False
        self._lock = threading.RLock()  # the garbage collector may call submit() while it is held
        self._process = os.getpid()

    @property
    def is_running(self) -> bool:
        """True if the thread is running in this process. Threads do not survive a fork."""
        return self._is_running and self._process == os.getpid()

    def submit(self, item: Item) -> None:
        """Schedule an item. Items submitted during exit are dropped, as the system frees memory."""
        if _is_over:
            return
        if os.getpid() != self._process:
            self._reset()  # the thread and its items belong to the parent process
        self._items.put(item)
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        try:  # not threading.Thread, because its start() takes locks and waits
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # cannot start a thread
            self._is_running = False

    def _run(self) -> None:
        allow_during_capture()
        while True:
            with self._lock:
                self._is_running = False
                if self._items.empty():
                    return
                self._is_running = True
            try:
                self._work(self._take_all())
            except BaseException:
                self._is_running = False  # the next item starts a new thread
                raise

    def _take_all(self) -> list[Item]:
        items: list[Item] = []
        try:
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items


_all: weakref.WeakSet[OnDemandThread[Any]] = weakref.WeakSet()
_is_over = False


@atexit.register
def _wait_for_all() -> None:
    global _is_over
    _is_over = True
    until_s = time.monotonic() + WAIT_AT_EXIT_S
    while any(one.is_running for one in list(_all)) and time.monotonic() < until_s:
        time.sleep(0.001)
