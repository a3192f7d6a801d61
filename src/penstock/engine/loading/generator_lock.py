"""Which threads may run user code at once? They share the global generators.

exclusive()      one thread: its sample's generators are set, and put back afterwards
shared()   any number: samples that draw nothing from the global generators

Samples that were silent so far may run together, because nobody sets anything meanwhile; if one
draws after all, its run is loaded again, alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.order.global_generators import counting_state_reads, preserved_generators


class GeneratorLock:
    """A lock for one or for many."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_together = 0
        self._is_alone = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else runs user code; the caller's generators are as before afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._num_together)
            self._is_alone = True
        try:
            with preserved_generators(), counting_state_reads():
                yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Nobody sets generators; others may run, too."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._num_together += 1
        try:
            with counting_state_reads():
                yield
        finally:
            with self._changed:
                self._num_together -= 1
                self._changed.notify_all()
