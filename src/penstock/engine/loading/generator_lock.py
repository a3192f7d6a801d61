"""A lock for worker threads, which share the global random generators.

exclusive()   one thread runs user code: its sample's generators are set, and put back afterwards
shared()      any number of threads run samples that draw nothing from the global generators

Samples that have drawn nothing so far may run together, because no thread sets a generator
meanwhile. If one draws after all, its run is loaded again under the exclusive lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.order.global_generators import counting_state_reads, preserved_generators


class GeneratorLock:
    """A shared or exclusive lock around user code."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_shared = 0
        self._is_exclusive = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No other thread runs user code; the generators are put back afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive and not self._num_shared)
            self._is_exclusive = True
        try:
            with preserved_generators(), counting_state_reads():
                yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """No thread sets generators; others may hold the shared lock, too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            self._num_shared += 1
        try:
            with counting_state_reads():
                yield
        finally:
            with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()
