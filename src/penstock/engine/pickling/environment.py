"""The parent's environment variables, folder, import path and torch settings, for a worker.

    parent: describe_environment() -> plain values --> worker: apply_environment(environment)

The fork server may be older than the loader, so each worker is given the parent's present
environment rather than what the fork server started with.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 while a worker imports its libraries: one thread each, so that a fork server may
fork."""


def describe_environment() -> dict[str, Any]:
    """The parent's environment as they are now. Called from: the parent."""
    torch = sys.modules.get("torch")
    return {
        "environ": dict(os.environ),
        "folder": _folder(),
        "path": import_path(),
        "argv": list(sys.argv),
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
        return None  # the folder was deleted under us; the worker stays where it is


def import_path() -> list[str]:
    """sys.path as another process can use it: the empty entry is the present folder."""
    folder = _folder() or ""
    return [entry or folder for entry in sys.path]


def apply_environment(environment: dict[str, Any]) -> None:
    """Make this process look like the parent. Called from: a worker, before it unpickles."""
    os.environ.clear()
    os.environ.update(environment["environ"])
    if environment["folder"]:
        with suppress(OSError):  # gone meanwhile: the user's relative paths fail, by name
            os.chdir(environment["folder"])
    sys.path[:] = environment["path"]
    sys.argv[:] = environment["argv"]
    multiprocessing.current_process().authkey = environment["authkey"]
    import torch

    for action, category, lineno in reversed(environment["warn_filters"]):
        warnings.simplefilter(action, category, lineno)
    dtype = environment["default_dtype"]
    if dtype is not None and dtype != str(torch.get_default_dtype()):
        torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))
