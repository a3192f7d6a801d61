"""Counts how often modules are reloaded.

A fork server that imported a module before it was reloaded is replaced.

Tested by ``tests/faults/engine/parent/test_fork_server.py``.
"""

from __future__ import annotations

import sys
from typing import Any

num_reloads: dict[str, int] = {}
"""Number of reloads of each module, as far as counted."""
_latest_specs: dict[str, Any] = {}


def count_all_reloads() -> None:
    """Count for all modules. Every reload after this call is noticed."""
    for name in list(sys.modules):
        if getattr(sys.modules.get(name), "__spec__", None) is not None:
            count_reloads(name)


def count_reloads(name: str) -> int:
    """Return how often a module was reloaded. Each ``reload`` gives it a new spec."""
    if name not in sys.modules:  # only workers need it
        return 0
    spec = sys.modules[name].__spec__
    if _latest_specs.setdefault(name, spec) is not spec:
        _latest_specs[name] = spec
        num_reloads[name] += 1
    return num_reloads.setdefault(name, 0)
