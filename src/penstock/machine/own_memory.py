"""Measures the memory of this process, when the loader is imported and later (Linux).

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
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read())
    except OSError:
        return None
    return None if found is None else OwnMemory(int(found[1]) * 1024, len(sys.modules))


AT_IMPORT = own_memory()
"""The memory when this module was imported: torch and, in most programs, no data yet."""
