"""Defers Ctrl-C while a process is being started.

A KeyboardInterrupt raised inside an at-fork hook is lost, and many libraries install hooks:
``random``, ``logging``, torch. In a child that has just started, it would print a second traceback.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_ctrl_c() -> Iterator[None]:
    """Defer a Ctrl-C inside the block until its end, then handle it as usual.

    A process started in the block does not receive it. SIGINT stays blocked there until the process
    unblocks it. Blocking the signal is not enough here, because another thread can receive it,
    and the main thread then runs the handler.
    """
    noted: list[tuple[Any, ...]] = []
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    mask = None
    try:
        if callable(handler) and is_main:
            signal.signal(signal.SIGINT, lambda *given: noted.append(given))
        if hasattr(signal, "pthread_sigmask"):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(handler) and is_main:
            signal.signal(signal.SIGINT, handler)
            if noted:
                handler(*noted[-1])
