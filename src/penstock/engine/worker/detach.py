"""Drops what a fork server copied from the user's process.

The fork server can be a fork of the user's process. Nothing of that process may then act a second
time: no exit handler, finalizer, buffer or signal handler, no open file or socket.
Objects are kept alive rather than released, because releasing them could run user code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import multiprocessing.process
import os
import signal
import sys
import threading
import types
import weakref
from multiprocessing import util
from typing import Any, TextIO

import torch

from penstock.engine.pickling.environment import count_frames
from penstock.machine.host import is_library_file
from penstock.machine.native_threads import limit_openmp

_kept: list[Any] = []
"""Objects of the user's process that were replaced here. Never released."""


def detach(control_fd: int) -> None:
    """Turn a fork of the user's process into a process of its own.

    Args:
        control_fd: The only descriptor that stays open besides the standard streams.
    """
    _drop_descriptors(control_fd)
    _reset_signals()
    _reset_hooks()
    _replace_streams()
    _drop_exit_handlers()
    _replace_main()
    torch.set_grad_enabled(True)
    limit_openmp()


def _drop_descriptors(control_fd: int) -> None:
    """Close all other descriptors. Their numbers stay in use, and reading from them is an error.

    An object that is released later may close its descriptor. By then, the number must not belong
    to another file. Shared libraries stay open, because their code uses the descriptor.
    """
    nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in (control_fd, nothing):
            try:
                if is_library_file(fd):
                    continue
            except OSError:
                continue  # the listing itself
            try:
                os.dup2(nothing, fd, inheritable=False)
            except OSError:  # its number is above the limit on open files
                os.close(fd)
    os.close(nothing)
    no_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(no_input, 0)
    os.close(no_input)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0.0)
    for number in signal.valid_signals():
        with contextlib.suppress(RuntimeError, ValueError):  # SIGSEGV: enable() handles it
            faulthandler.unregister(number)
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP
                _kept.append(signal.signal(number, signal.SIG_DFL))


def _reset_hooks() -> None:
    _kept.extend((sys.excepthook, sys.unraisablehook, threading.excepthook))
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.setrecursionlimit(sys.getrecursionlimit() + count_frames())  # those of the user stay


def _replace_streams() -> None:
    """Open the standard streams anew. Text in the old buffers belongs to the user's process."""
    old = {name: (getattr(sys, name), getattr(sys, f"__{name}__")) for name in ("stdout", "stderr")}
    _kept.extend((sys.stdin, sys.__stdin__, old))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_stream(1, sys.__stdout__)  # type: ignore[misc, assignment]
    sys.stderr = sys.__stderr__ = _open_stream(2, sys.__stderr__)  # type: ignore[misc, assignment]
    if faulthandler.is_enabled():
        faulthandler.enable(2)
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in list(getattr(logger, "handlers", ())):
            _replace_handler(logger, handler, old)


def _open_stream(fd: int, old: Any) -> TextIO | None:
    try:
        is_terminal = os.isatty(fd)
        os.fstat(fd)
    except OSError:
        return None  # closed in the user's process, too
    return open(
        fd,
        "w",
        buffering=1 if is_terminal or fd == 2 else -1,
        encoding=getattr(old, "encoding", None),
        errors=getattr(old, "errors", None) or "backslashreplace",
        closefd=False,
    )


def _replace_handler(logger: Any, handler: Any, old: dict[str, tuple[Any, Any]]) -> None:
    """Make a log handler write to the new stream, or remove it if it wrote to a file."""
    stream = getattr(handler, "stream", None)
    for name, streams in old.items():
        if stream is not None and any(stream is one for one in streams):
            handler.stream = getattr(sys, name)
            return
    if not isinstance(handler, logging.NullHandler):
        _kept.append(handler)
        logger.handlers.remove(handler)


def _drop_exit_handlers() -> None:
    """Drop finalizers and child processes, which belong to the user's process."""
    finalize: Any = weakref.finalize
    registries: list[dict[Any, Any]] = [finalize._registry, util._finalizer_registry]  # type: ignore[attr-defined]
    for registry in registries:
        _kept.append(dict(registry))
        registry.clear()
    finalize._registered_with_atexit = False
    process: Any = multiprocessing.process
    _kept.append(process._children)
    process._process_counter, process._children = itertools.count(1), set()


def _replace_main() -> None:
    """Replace the main module. Objects from it are sent by value."""
    _kept.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = types.ModuleType("__main__")
