"""Decides whether the fork server can be a fork of this process, and says why not.

A fork copies only the calling thread, and everything else as it is: locks, pools, handles, data. It
is safe if nothing exists that would be wrong in the copy. :func:`why_unclean` checks this when the
first loader with workers is created, where most programs have only imported modules and created a
dataset.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from penstock.engine.memory.fork_watch import process_forks
from penstock.importing import memory_after_imports, own_memory
from penstock.machine.host import is_library_file
from penstock.machine.native_threads import (
    count_openblas_threads,
    count_threads,
    forget_libraries,
    stop_openmp_threads,
    wait_for_threads,
)

SWITCH = "PENSTOCK_FORK_SERVER"
"""Environment variable. ``fresh`` always starts a new Python."""
MAX_DATA_BYTES = 64 << 20
"""Memory beyond the imports that the fork server may keep alive after this process freed it."""
MAX_MODULE_BYTES = 256 << 10
"""Memory that importing a module takes, at most, on average: 255 KiB with torch for CUDA, 125 KiB
with torch for CPUs, 59 KiB with NumPy alone."""
LATER_MODULE_BYTES = 128 << 10
"""The same for modules imported after torch: 64 KiB for torchvision, albumentations and timm."""
_PLAIN_DEVICES = r"/dev/(null|zero|full|u?random|tty.*|pts/.*|console)$"


def why_unclean(dataset_bytes: int = 0) -> str | None:
    """Return why this process must not be forked, or None if a fork is safe.

    Args:
        dataset_bytes: The part of its memory that the workers need.
    """
    try:
        for check in _CHECKS:
            reason = check()
            if reason is not None:
                return reason
        return _check_memory(dataset_bytes)
    except Exception as error:  # a fresh Python is always possible
        return f"its state could not be read ({type(error).__name__}: {error})"


def count_data_bytes() -> int | None:
    """Return the memory of this process besides its modules. None if it is unknown."""
    now, before = own_memory(), memory_after_imports()
    if now is None or before is None:
        return None
    import_bytes = min(before.num_bytes, MAX_MODULE_BYTES * before.num_modules)
    import_bytes += LATER_MODULE_BYTES * max(0, now.num_modules - before.num_modules)
    return now.num_bytes - import_bytes


def describe_threads(num_others: int) -> str:
    return f"it has {num_others} more thread{'s' if num_others > 1 else ''}"


# -- the checks ------------------------------------------------------------------------------------


def _check_switch() -> str | None:
    return f"{SWITCH}=fresh is set" if os.environ.get(SWITCH) == "fresh" else None


def _check_thread() -> str | None:
    if threading.current_thread() is not threading.main_thread():
        return f"the loader was created in thread {threading.current_thread().name!r}"
    return None


def _check_threads() -> str | None:
    """Count threads. Those of OpenBLAS are allowed, because it stops them before a fork."""
    forget_libraries()
    if count_threads() == 1:
        return None
    num_allowed = 1 + count_openblas_threads()
    if count_threads() > num_allowed:
        stop_openmp_threads()
    num_others = wait_for_threads(num_allowed) - num_allowed
    return describe_threads(num_others) if num_others > 0 else None


def _check_torch() -> str | None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "the GPU is in use"
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is on"
    num_modes = getattr(torch._C, "_len_torch_function_stack", int)()
    num_modes += getattr(torch._C, "_len_torch_dispatch_stack", int)()
    return "a torch mode is active, such as a default device" if num_modes else None


def _check_tracing() -> str | None:
    """Find coverage tools and debuggers. A fresh Python can be measured, too."""
    monitoring: Any = getattr(sys, "monitoring", None)
    is_monitored = monitoring is not None and any(map(monitoring.get_tool, range(6)))
    if is_monitored or sys.gettrace() is not None or sys.getprofile() is not None:
        return "a debugger, profiler or coverage tool is active"
    return None


def _check_frames() -> str | None:
    """Find states of the running code that would be copied into every worker."""
    error = sys.exc_info()[0]
    if error is not None:
        return f"the loader was created while {error.__name__} was being handled"
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # this thread is the only one
        if frame.f_code.co_name == "_load_unlocked" and "importlib" in frame.f_code.co_filename:
            name = frame.f_locals["spec"].name
            return f"the loader was created while {name} was being imported"
        frame = frame.f_back
    return None


def _check_memory(dataset_bytes: int) -> str | None:
    """Compare the memory with that of modules and dataset. See :mod:`penstock.importing`."""
    data_bytes = count_data_bytes()
    if data_bytes is None:
        return "it is unknown how much memory it holds besides its modules"
    if data_bytes - dataset_bytes > MAX_DATA_BYTES:
        what = "its modules and its dataset" if dataset_bytes else "its modules"
        return f"it holds {(data_bytes - dataset_bytes) >> 20} MiB besides {what}"
    return None


def _check_descriptors() -> str | None:
    """Find open files and connections. User code in a worker may rely on them.

    Inherited pipes and sockets are allowed. Python opens its own with close-on-exec.
    """
    spared = {*process_forks.fds, *_log_files(_handlers())}
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2 or fd in spared:
            continue
        with suppress(OSError):  # closed since, like the listing itself
            reason = _why_keep(fd, os.readlink(f"/proc/self/fd/{fd}"))
            if reason is not None:
                return reason
    return None


def _why_keep(fd: int, path: str) -> str | None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or path.startswith("anon_inode:"):
        return None if os.get_inheritable(fd) else f"a connection is open ({path})"
    if stat.S_ISCHR(mode) and re.match(_PLAIN_DEVICES, path):
        return None
    if stat.S_ISDIR(mode) or path.startswith(("/memfd:penstock", "/sys/", "/proc/")):
        return None
    if stat.S_ISREG(mode) and is_library_file(fd):  # the fork keeps it
        return None
    return f"{path} is open"


def _handlers() -> Iterator[logging.Handler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        yield from getattr(logger, "handlers", ())


def _log_files(handlers: Iterable[logging.Handler]) -> Iterator[int]:
    """Return the descriptors of log files. The fork server removes their handlers."""
    for handler in handlers:
        with suppress(AttributeError, OSError, ValueError):  # no stream, or a stream without a file
            if isinstance(handler, logging.FileHandler) and handler.stream is not None:
                yield handler.stream.fileno()


_CHECKS: tuple[Callable[[], str | None], ...] = (
    _check_switch,
    _check_thread,
    _check_threads,
    _check_torch,
    _check_tracing,
    _check_frames,
    _check_descriptors,
)
