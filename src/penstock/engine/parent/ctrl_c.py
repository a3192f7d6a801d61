"""Holds Ctrl-C back while a process is started.

A KeyboardInterrupt inside an at-fork hook is lost, and many libraries have hooks: ``random``,
``logging``, torch. In a child that has just begun it would be a traceback of the child's own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_ctrl_c() -> Iterator[None]:
    """Handle a Ctrl-C that comes inside the block at its end, as it would have been handled.

    A process started in the block does not get it: SIGINT stays blocked there until the process
    unblocks it. Blocking alone does not do here, as another thread may take the signal, and the
    main thread then runs the handler.
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
