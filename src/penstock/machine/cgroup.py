"""How much of this computer do control groups leave to this process? Version 1, version 2, or both.

A limit may stand on any group between the process's own and the top, and the tightest counts::

    /sys/fs/cgroup            <- the mount; in a container often the process's own group already
      kubepods                  cpu.max: max
        pod17                   cpu.max: 400000 100000   <- 4 cores for the pod
          container             cpu.max: max             <- where /proc/self/cgroup says we are

A file that is missing, unreadable or odd is no limit: to believe in a limit that is not there
would waste a machine, and the scheduler keeps the real ones anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_NO_MEMORY_LIMIT = 1 << 60
"""Version 1 says "no limit" as the largest multiple of a page below 2**63."""


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """How many cores' worth of time may this process use? None without a limit.

    Example:
        >>> quota = cpu_quota()
        >>> quota is None or quota > 0
        True
    """
    return _tightest(_cpu_v1, _cpu_v2, "cpu", mount, membership)


def memory_limit_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """How much memory may this process's groups hold? None without a limit.

    Example:
        >>> limit = memory_limit_bytes()
        >>> limit is None or limit > 0
        True
    """
    limit = _tightest(_memory_v1, _memory_v2, "memory", mount, membership)
    return None if limit is None else int(limit)


def _tightest(
    read_v1: Callable[[Path], float | None],
    read_v2: Callable[[Path], float | None],
    controller: str,
    mount: Path,
    membership: Path,
) -> float | None:
    """The smallest limit on the way from the process's groups to the top of each hierarchy."""
    paths = _own_groups(membership)
    ways = [
        (read_v2, mount, paths.get("", "/")),
        (read_v2, mount / "unified", paths.get("", "/")),  # where version 1 runs beside it
        (read_v1, mount / controller, paths.get(controller, "/")),
    ]
    limits = [read(group) for read, top, own in ways for group in _upwards(top, own)]
    return min((limit for limit in limits if limit is not None), default=None)


def _own_groups(membership: Path) -> dict[str, str]:
    """The path of this process's group, by controller; version 2's is under ``""``."""
    paths = {}
    for line in (_read(membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and path.startswith("/"):
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _upwards(top: Path, own: str) -> Iterator[Path]:
    """The group ``own`` below ``top``, its parents, and ``top`` itself.

    In a container the path may be the host's, which is not visible here: then only ``top`` exists,
    and that is the container's group. A path with ``..`` is outside of what is mounted.
    """
    parts = PurePosixPath(own).parts[1:]
    if ".." in parts:
        parts = ()
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _cpu_v2(group: Path) -> float | None:
    words = (_read(group / "cpu.max") or "").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return _ratio(words[0], words[1])


def _cpu_v1(group: Path) -> float | None:
    quota_us = _read(group / "cpu.cfs_quota_us")
    period_us = _read(group / "cpu.cfs_period_us")
    return None if quota_us is None or period_us is None else _ratio(quota_us, period_us)


def _ratio(quota_us: str, period_us: str) -> float | None:
    quota, period = _count(quota_us), _count(period_us)
    return quota / period if quota and period else None


def _memory_v2(group: Path) -> float | None:
    return _memory(group / "memory.max")


def _memory_v1(group: Path) -> float | None:
    return _memory(group / "memory.limit_in_bytes")


def _memory(path: Path) -> int | None:
    limit = _count(_read(path) or "")
    return limit if limit is not None and limit < _NO_MEMORY_LIMIT else None


def _count(text: str) -> int | None:
    """A count above zero, or None: ``max``, ``-1``, nothing, and rubbish all set no limit."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text[:30]) or None  # longer is no number a kernel writes


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError):  # a name with a zero byte in it is a ValueError
        return None
