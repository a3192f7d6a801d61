"""Facts about the host: how many cores this process may use, and whether it can start Pythons."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores this process may really use: affinity and the cgroup's quota, at least 1.

    Example:
        >>> usable_cores() >= 1
        True
    """
    try:
        cores = len(os.sched_getaffinity(0))  # type: ignore[attr-defined, unused-ignore]
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, min(cores, quota)) if quota else max(1, cores)


def _cgroup_quota(cgroup: Path) -> int | None:
    """Whole cores that cgroup v2 or v1 allows, rounded up; None without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()[:2]
        if limit == "max":
            return None
        return -(-int(limit) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        limit_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return -(-limit_us // period_us) if limit_us > 0 and period_us > 0 else None


def can_start_python() -> bool:
    """Is there an interpreter to start? Not in a frozen application."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)
