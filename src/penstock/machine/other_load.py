"""Measures how much of the cores other programs use, before a measurement they would disturb."""

from __future__ import annotations

import os
import time
from typing import Any

BUSY_SHARE = 0.25
"""From this share of the usable cores on, a machine is called busy."""
_INTERVAL_S = 0.5


def describe_load(cores: int) -> str:
    """Measure for half a second. Returns a sentence if the machine is busy, or an empty text.

    Example:
        >>> describe_load(10_000)  # never busy
        ''
    """
    return say_load(measure_load(), cores)


def say_load(used: float, cores: int) -> str:
    """Return a sentence if other programs use many of the cores.

    Example:
        >>> say_load(1.63, 2).partition(",")[0]
        'This machine is busy: other programs use about 1.6 of its 2 cores'
        >>> say_load(0.1, 2)
        ''
    """
    if used < BUSY_SHARE * cores:
        return ""
    return (
        f"This machine is busy: other programs use about {min(used, cores):.1f} of its {cores} "
        "cores, so rates are lower than on an idle machine, and vary."
    )


def cores_for(num_workers: int, cores: int, used: float) -> float:
    """Return the cores that workers get at most beside programs that use ``used`` cores.

    Processes share the cores evenly. Without workers, the training process loads.

    Example:
        >>> cores_for(1, 2, used=0.0), cores_for(4, 2, used=0.0)
        (1.0, 2.0)
        >>> cores_for(1, 2, used=2.0), cores_for(2, 2, used=2.0)
        (0.6666666666666666, 1.0)
    """
    num_processes = max(1, num_workers)
    return min(float(num_processes), cores * num_processes / max(num_processes + used, cores))


def measure_load(interval_s: float = _INTERVAL_S) -> float:
    """Return the number of this process's cores that other programs keep busy, or 0 if unknown.

    This process sleeps meanwhile, and what its own threads use is not counted.
    """
    try:
        before, own_s = _busy_s(), time.process_time()
        start_s = time.perf_counter()
        time.sleep(interval_s)
        took_s = time.perf_counter() - start_s
        own_s = time.process_time() - own_s
        return max(0.0, (_busy_s() - before - own_s) / took_s)
    except Exception:  # no /proc/stat, for example
        return 0.0


def _busy_s() -> float:
    """Return the busy time of the cores that this process may use, since the machine started."""
    import psutil

    times: list[Any] = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        own = os.sched_getaffinity(0)
        times = [one for number, one in enumerate(times) if number in own] or times
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(
        sum(getattr(one, name) for one in times for name in one._fields if name not in idle)
    )
