"""Counts and limits the threads of this process that Python does not know (Linux).

OpenBLAS, which NumPy contains, starts a thread per core when it is loaded. It stops them before a
fork and starts them again when they are needed. OpenMP, which torch contains, starts its threads
with the first parallel operation and does not survive a fork, unless its threads are stopped first.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SETTLE_S = 0.05
_OPENMP = r"gomp|libomp|libiomp"
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
    for library in _find_libraries(_OPENMP):
        with suppress(AttributeError):
            library.omp_pause_resource_all(_PAUSE_SOFT)


def count_openblas_threads() -> int:
    """Return the number of threads that OpenBLAS has started itself."""
    return sum(max(0, get() - 1) for get, _ in _openblas())


@contextmanager
def single_threaded_openblas() -> Iterator[None]:
    """Set OpenBLAS to one thread in the block. A child forked in the block keeps one thread."""
    before = [(set_, get()) for get, set_ in _openblas()]
    try:
        for set_, _ in before:
            set_(1)
        yield
    finally:
        for set_, number in before:
            set_(number)


def limit_openmp() -> None:
    """Set all OpenMP libraries of this process to one thread."""
    for library in _find_libraries(_OPENMP):
        with suppress(AttributeError):
            library.omp_set_num_threads(1)


def _openblas() -> Iterator[tuple[Any, Any]]:
    """Yield the functions that get and set the number of threads, for each copy of OpenBLAS."""
    for library in _find_libraries("openblas"):
        for prefix in ("", "scipy_"):
            for suffix in ("", "64_", "_64"):
                with suppress(AttributeError):
                    get_parallel = library[f"{prefix}openblas_get_parallel{suffix}"]
                    if get_parallel() == _USES_PTHREADS:
                        get = library[f"{prefix}openblas_get_num_threads{suffix}"]
                        yield get, library[f"{prefix}openblas_set_num_threads{suffix}"]


def _find_libraries(pattern: str) -> Iterator[Any]:
    """Yield the shared libraries that this process has loaded and whose file names match."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    paths = {fields[5] for fields in lines if len(fields) == 6 and fields[5].startswith("/")}
    for path in sorted(paths):
        if re.search(pattern, os.path.basename(path)):
            with suppress(OSError):  # not a library, or deleted since
                yield ctypes.CDLL(path)
