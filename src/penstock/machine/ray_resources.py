"""CPUs that Ray gave to this process, and CPUs of its cluster. Does not import Ray.

Ray sets no affinity and no quota. A task that uses more CPUs than it has takes them from others.

Tested by ``tests/integration/engine/remote/test_ray_pool.py``.
"""

from __future__ import annotations

import math
import sys
from typing import Any


def num_task_cpus() -> int | None:
    """Return the CPUs of this Ray task or actor, rounded up, at least 1. None outside of Ray."""
    ray = _connected_ray()
    if ray is None:
        return None
    try:
        context = ray.get_runtime_context()
        if context.worker.mode != ray.WORKER_MODE:  # the driver
            return None
        given: dict[str, float] = context.get_assigned_resources()
    except Exception:  # the interface of Ray may change, and the plan must not depend on it
        return None
    # In a placement group, the name is CPU_group_ and the group's id.
    cpus = [num for name, num in given.items() if name == "CPU" or name.startswith("CPU_group")]
    return max(1, math.ceil(max(cpus, default=0)))


def num_cluster_cpus() -> int | None:
    """Return the CPUs of the cluster that this process is connected to. None without one."""
    ray = _connected_ray()
    return None if ray is None else int(ray.cluster_resources().get("CPU", 0)) or None


def _connected_ray() -> Any:
    ray = sys.modules.get("ray")
    is_connected = getattr(ray, "is_initialized", None)  # absent while Ray is being imported
    return ray if is_connected is not None and is_connected() else None
