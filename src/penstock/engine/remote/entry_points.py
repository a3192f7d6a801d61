"""Looks up how a kind of worker starts: threads, forks on request, or a pool on a Ray cluster.

Tested by ``tests/integration/engine/remote/test_ray_pool.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def entry_point(kind: str) -> Callable[..., Any]:
    """Return the entry point of a "thread" or "fork" worker, or the pool of "ray" workers.

    "ray cpus" counts the CPUs of other nodes.
    """
    if kind in ("ray", "ray cpus"):
        from penstock.engine.remote import ray_pool

        return ray_pool.RayPool if kind == "ray" else ray_pool.num_other_cpus
    from penstock.engine.worker.entry import ENTRY_POINTS

    return ENTRY_POINTS[kind]
