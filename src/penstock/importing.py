"""Imports modules without garbage collections, and measures the memory after the imports (Linux).

An import creates many objects and no garbage. A full collection that it triggers after
``import torch`` takes 90 ms, twice as long as the import of all modules for workers.
The memory is measured for :mod:`penstock.engine.parent.clean_process`.

Tested by ``tests/faults/engine/parent/test_clean_process.py``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.named_tuple import NamedTuple


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection in the block. Use only around imports.

    Example:
        >>> with importing():
        ...     import json
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


class OwnMemory(NamedTuple):
    """The anonymous memory of this process and the number of its modules."""

    num_bytes: int
    num_modules: int


def own_memory() -> OwnMemory | None:
    """Return the memory in use, or None if the kernel does not tell."""
    try:
        with open("/proc/self/status", "rb") as status:
            fields = status.read().partition(b"RssAnon:")[2].split(None, 1)
    except OSError:
        return None
    return OwnMemory(int(fields[0]) * 1024, len(sys.modules)) if fields else None


def note_imports() -> None:
    """Note the memory now: torch has been imported, and most programs have no data yet."""
    global _after_imports
    _after_imports = own_memory()


def memory_after_imports() -> OwnMemory | None:
    """Return the memory when :func:`note_imports` was called."""
    return _after_imports


_after_imports: OwnMemory | None = None
