"""Copies environment variables, folder, cores, import path and torch settings to a worker.

    parent: describe_environment() -> plain values --> worker: apply_environment(environment)

The fork server may have started before the loader was created. Each worker therefore receives the
parent's current environment instead of the fork server's.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 while a worker imports its libraries. With one thread each, the fork server can fork."""


def describe_environment() -> dict[str, Any]:
    """Return the current environment. Called by the parent."""
    torch = sys.modules.get("torch")
    return {
        "environ": dict(os.environ),
        "folder": _folder(),
        "umask": _umask(),
        "cores": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        "path": import_path(),
        "argv": list(sys.argv),
        "recursion_limit": sys.getrecursionlimit(),
        "authkey": bytes(multiprocessing.current_process().authkey),
        "parent_pid": os.getpid(),
        "default_dtype": str(torch.get_default_dtype()) if torch else None,
        "warn_filters": [
            (action, category, lineno)
            for action, message, category, module, lineno in warnings.filters
            if message is None and module is None and category.__module__ == "builtins"
        ],
    }


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # the folder was deleted; the worker keeps its own


def _umask() -> int | None:
    """Return the file mode mask. Only Linux shows it without changing it."""
    try:
        with open("/proc/self/status", "rb") as status:
            masks = [line.split()[1] for line in status if line.startswith(b"Umask:")]
        return int(masks[0], 8)
    except (OSError, IndexError, ValueError):
        return None


def import_path() -> list[str]:
    """Return sys.path for use in another process, with empty entries made absolute."""
    folder = _folder() or ""
    return [entry or folder for entry in sys.path]


def count_frames() -> int:
    """Return the depth of the stack. A fork of the user's process keeps the frames of its code."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def apply_environment(environment: dict[str, Any]) -> None:
    """Apply the parent's environment. Called by a worker before it unpickles its objects."""
    if os.environ != environment["environ"]:
        os.environ.clear()
        os.environ.update(environment["environ"])
    if environment["folder"]:
        with suppress(OSError):  # deleted since: the user's relative paths fail with their names
            os.chdir(environment["folder"])
    if environment["umask"] is not None:
        os.umask(environment["umask"])
    if environment["cores"] is not None and environment["cores"] != os.sched_getaffinity(0):
        with suppress(OSError):  # a container has taken these cores away since
            os.sched_setaffinity(0, environment["cores"])
    sys.path[:] = environment["path"]
    sys.argv[:] = environment["argv"]
    sys.setrecursionlimit(environment["recursion_limit"] + count_frames())
    multiprocessing.current_process().authkey = environment["authkey"]
    import torch

    for action, category, lineno in reversed(environment["warn_filters"]):
        warnings.simplefilter(action, category, lineno)
    dtype = environment["default_dtype"]
    if dtype is not None and dtype != str(torch.get_default_dtype()):
        torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))
