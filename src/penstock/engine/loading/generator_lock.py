"""A lock for worker threads, which share the global random generators.

exclusive()   one thread runs user code, with its sample's generators, which are restored afterwards
shared()      any number of threads run samples that do not draw from the global generators

Samples that have not drawn so far can run concurrently, because no thread sets a generator during
that time. If one does draw, its run is loaded again under the exclusive lock.

The generators belong to the process, so all thread pools share one lock. A pool that is created
inside a sample has a lock of its own, because that sample holds the shared one until it returns.

Tested by ``tests/integration/engine/parent/test_thread_pool.py``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.order.global_generators import preserved_generators, watching_state_reads


class GeneratorLock:
    """A shared or exclusive lock around user code."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_shared = 0
        self._is_exclusive = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock exclusively. The generators are restored afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive and not self._num_shared)
            self._is_exclusive = True
        try:
            with _holding(), preserved_generators(), watching_state_reads():
                yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock together with other threads. No thread sets the generators."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            self._num_shared += 1
        try:
            with _holding(), watching_state_reads():
                yield
        finally:
            with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()


class _Held(threading.local):
    count = 0


_held = _Held()
"""The number of locks that this thread holds."""


@contextmanager
def _holding() -> Iterator[None]:
    _held.count += 1
    try:
        yield
    finally:
        _held.count -= 1


_shared_lock = GeneratorLock()


def lock_for_pool() -> GeneratorLock:
    """Return the lock for a new pool: the shared one, or a new one inside a sample."""
    return GeneratorLock() if _held.count else _shared_lock


def abandon(lock: GeneratorLock) -> None:
    """Give later pools a new lock, because a thread that does not return may hold this one."""
    global _shared_lock
    if lock is _shared_lock:
        _shared_lock = GeneratorLock()


if hasattr(os, "register_at_fork"):  # a thread may hold the lock, and is missing in the child
    os.register_at_fork(after_in_child=lambda: abandon(_shared_lock))
