"""Looks up how a kind of worker starts: threads, forks on request, or a pool on a Ray cluster.

Tested by ``tests/integration/engine/remote/test_ray_pool.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def entry_point(kind: str) -> Callable[..., Any]:
    """Return the entry point of a "thread" or "fork" worker, or the pool of "ray" workers."""
    if kind == "ray":
        from penstock.engine.remote.ray_pool import RayPool

        return RayPool
    from penstock.engine.worker.entry import ENTRY_POINTS

    return ENTRY_POINTS[kind]
