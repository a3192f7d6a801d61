"""What a worker must find around it: environment, folder, import path, torch's settings.

    parent: describe_surroundings() -> plain values --> worker: enter(surroundings)

The fork server may be older than the loader, so each worker is given the parent's present
surroundings rather than what the fork server started with.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 while a worker imports its libraries: one thread each, so that a fork server may
fork."""


def describe_surroundings() -> dict[str, Any]:
    """The parent's surroundings as they are now. Called from: the parent."""
    torch = sys.modules.get("torch")
    return {
        "environ": dict(os.environ),
        "folder": _folder(),
        "path": import_path(),
        "argv": list(sys.argv),
        "authkey": bytes(multiprocessing.current_process().authkey),
        "parent_pid": os.getpid(),
        "default_dtype": str(torch.get_default_dtype()) if torch else None,
        "warn_filters": _warn_filters(),
    }


def _warn_filters() -> list[Any]:
    import warnings

    return [
        (action, category, lineno)
        for action, message, category, module, lineno in warnings.filters
        if message is None and module is None and category.__module__ == "builtins"
    ]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # the folder was deleted under us; the worker stays where it is


def import_path() -> list[str]:
    """sys.path as another process can use it: the empty entry is the present folder."""
    folder = _folder() or ""
    return [entry or folder for entry in sys.path]


def enter(surroundings: dict[str, Any]) -> None:
    """Make this process look like the parent. Called from: a worker, before it unpacks."""
    os.environ.clear()
    os.environ.update(surroundings["environ"])
    if surroundings["folder"]:
        try:
            os.chdir(surroundings["folder"])
        except OSError:
            pass  # gone meanwhile: relative paths fail where the user's code uses them, by name
    sys.path[:] = surroundings["path"]
    sys.argv[:] = surroundings["argv"]
    multiprocessing.current_process().authkey = surroundings["authkey"]
    import warnings

    import torch

    for action, category, lineno in reversed(surroundings["warn_filters"]):
        warnings.simplefilter(action, category, lineno)
    dtype = surroundings["default_dtype"]
    if dtype is not None and dtype != str(torch.get_default_dtype()):
        torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))
