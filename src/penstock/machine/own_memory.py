"""Measures the memory of this process, after its imports and later (Linux).

Tested by ``tests/faults/engine/parent/test_clean_process.py``.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple


class OwnMemory(NamedTuple):
    """The anonymous memory of this process and the number of its modules."""

    num_bytes: int
    num_modules: int


def own_memory() -> OwnMemory | None:
    """Return the memory in use, or None if the kernel does not tell."""
    try:
        with open("/proc/self/status", "rb") as status:
            found = re.search(rb"RssAnon:\s+(\d+) kB", status.read())
    except OSError:
        return None
    return None if found is None else OwnMemory(int(found[1]) * 1024, len(sys.modules))


def note_imports() -> None:
    """Note the memory now: torch has been imported, and most programs have no data yet."""
    global _after_imports
    _after_imports = own_memory()


def memory_after_imports() -> OwnMemory | None:
    """Return the memory when :func:`note_imports` was called."""
    return _after_imports


_after_imports: OwnMemory | None = None
