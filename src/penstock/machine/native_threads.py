"""Counts and limits the threads of this process that Python does not know (Linux).

OpenBLAS, which NumPy contains, starts a thread per core when it is loaded. It stops them before a
fork and starts them again when they are needed. OpenMP, which torch contains, starts its threads
with the first parallel operation and does not survive a fork, unless its threads are stopped first.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SETTLE_S = 0.05
_OPENMP, _OPENBLAS = r"gomp|libomp|libiomp", "openblas"
_PAUSE_SOFT = 1
"""Value of ``omp_pause_soft``: the settings of OpenMP stay."""
_USES_PTHREADS = 1
"""Answer of ``openblas_get_parallel``. Others: no threads (0), OpenMP (2)."""


def count_threads() -> int:
    """Return the number of threads of this process.

    Raises:
        OSError: There is no ``/proc``.
    """
    return len(os.listdir("/proc/self/task"))


def wait_for_threads(number: int) -> int:
    """Wait for a moment until there are at most ``number`` threads. Returns how many there are.

    A thread that has ended stays in the list of threads for some microseconds.
    """
    limit = time.monotonic() + SETTLE_S
    while True:
        actual = count_threads()
        if actual <= number or time.monotonic() > limit:
            return actual
        time.sleep(0.001)


def stop_openmp_threads() -> None:
    """Stop the threads that OpenMP keeps for the calling thread.

    The next parallel operation starts new ones. Does nothing if OpenMP is older than version 5.
    """
    for library in _libraries()[_OPENMP]:
        with suppress(AttributeError):
            library.omp_pause_resource_all(_PAUSE_SOFT)


def count_openblas_threads() -> int:
    """Return the number of threads that OpenBLAS has started itself and not stopped for a fork."""
    return sum(number.value - 1 for number, is_running in _openblas() if is_running.value)


@contextmanager
def single_threaded_openblas() -> Iterator[None]:
    """Set OpenBLAS to one thread in the block. A child forked in the block keeps one thread."""
    before = [(number, number.value) for number, _ in _openblas()]
    try:
        for number, _ in before:
            number.value = 1
        yield
    finally:
        for number, value in before:
            number.value = value


def limit_openmp() -> None:
    """Set all OpenMP libraries of this process to one thread."""
    for library in _libraries()[_OPENMP]:
        with suppress(AttributeError):
            library.omp_set_num_threads(1)


def _openblas() -> Iterator[tuple[ctypes.c_int, ctypes.c_int]]:
    """Yield the variables of each copy of OpenBLAS: the number of threads, and if they are running.

    ``openblas_set_num_threads`` would start the threads again after a fork. Each keeps a core busy
    for a while, at the time when workers start. Without it, OpenBLAS starts them on first use.
    """
    for library in _libraries()[_OPENBLAS]:
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            with suppress(AttributeError, ValueError):  # this build has other names
                parallel = library[f"{prefix}openblas_get_parallel{suffix}"]()
                in_use = library[f"{prefix}openblas_get_num_threads{suffix}"]()
                number = ctypes.c_int.in_dll(library, "blas_cpu_number")
                is_running = ctypes.c_int.in_dll(library, "blas_server_avail")
                if parallel == _USES_PTHREADS and number.value == in_use:
                    yield number, is_running
                    break


@functools.lru_cache(maxsize=1)
def _libraries() -> dict[str, list[Any]]:
    """Return the shared libraries that this process has loaded, by the pattern of their names.

    A child that is forked knows them from its parent: finding them takes a millisecond.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line[line.index("/") :].rstrip("\n") for line in maps if "/" in line}
    found: dict[str, list[Any]] = {_OPENMP: [], _OPENBLAS: []}
    for path in sorted(paths):
        for pattern, libraries in found.items():
            if re.search(pattern, os.path.basename(path)):
                with suppress(OSError):  # not a library, or deleted since
                    libraries.append(ctypes.CDLL(path))
    return found


def forget_libraries() -> None:
    """Look for libraries again. Called before the threads of this process are counted."""
    _libraries.cache_clear()
