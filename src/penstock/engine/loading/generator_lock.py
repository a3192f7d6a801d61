"""A lock for worker threads, which share the global random generators.

exclusive()   one thread runs user code, with its sample's generators, which are restored afterwards
shared()      any number of threads run samples that do not draw from the global generators

Samples that have not drawn so far can run concurrently, because no thread sets a generator during
that time. If one does draw, its run is loaded again under the exclusive lock.

Tested by ``tests/integration/engine/parent/test_thread_pool.py``.
"""

from __future__ import annotations

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
            with preserved_generators(), watching_state_reads():
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
            with watching_state_reads():
                yield
        finally:
            with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()
