"""Control group limits of this process (cgroup version 1, version 2, or both).

Any group between the process's group and the root can set a limit. The tightest one applies::

    /sys/fs/cgroup            <- the mount; in a container often the process's own group already
      kubepods                  cpu.max: max
        pod17                   cpu.max: 400000 100000   <- 4 cores for the pod
          container             cpu.max: max             <- the group in /proc/self/cgroup

A file that is missing, unreadable or malformed counts as no limit. Assuming a limit that does not
exist would waste the machine, and the kernel enforces the real limits anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from penstock.machine.kernel_files import parse_count, read_fields, read_text

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_NO_MEMORY_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page below 2**63."""


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU quota of this process in cores, or None without a limit.

    Example:
        >>> quota = cpu_quota()
        >>> quota is None or quota > 0
        True
    """
    groups = groups_above("cpu", mount, membership)
    quotas = [_cpu_quota_of(version, group) for version, group in groups]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the memory limit of this process's groups, or None without a limit.

    Example:
        >>> limit = memory_limit_bytes()
        >>> limit is None or limit > 0
        True
    """
    groups = groups_above("memory", mount, membership)
    limits = [memory_limit_of(version, group) for version, group in groups]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_left_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how much more memory this process's groups can allocate, or None without a limit.

    Example:
        >>> left = memory_left_bytes()
        >>> left is None or left >= 0
        True
    """
    found = []
    for version, group in groups_above("memory", mount, membership):
        limit, used = memory_limit_of(version, group), _memory_used_by(version, group)
        if limit is not None and used is not None:
            found.append(max(0, limit - used))
    return min(found, default=None)


def groups_above(
    controller: str, mount: Path = MOUNT, membership: Path = MEMBERSHIP
) -> Iterator[tuple[int, Path]]:
    """Yield the version and folder of each group that may contain this process.

    Each hierarchy starts with the process's own group. Some of the folders may not exist.

    Example:
        >>> here = groups_above("memory", Path("/sys/fs/cgroup"), Path("/no/such/file"))
        >>> [(version, group.as_posix()) for version, group in here]
        [(2, '/sys/fs/cgroup'), (2, '/sys/fs/cgroup/unified'), (1, '/sys/fs/cgroup/memory')]
    """
    paths = _own_groups(membership)
    ways = [
        (2, mount, paths.get("", "/")),
        (2, mount / "unified", paths.get("", "/")),  # where version 1 is also mounted
        (1, mount / controller, paths.get(controller, "/")),
    ]
    for version, top, own in ways:
        yield from ((version, group) for group in _upwards(top, own))


def memory_limit_of(version: int, group: Path) -> int | None:
    """Return the limit that a group itself sets, or None."""
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    limit = parse_count(read_text(group / name))  # "max" gives None
    return limit if limit and limit < _NO_MEMORY_LIMIT else None


def _memory_used_by(version: int, group: Path) -> int | None:
    """Return a group's memory use, without the cached files that the kernel can drop."""
    name = "memory.current" if version == 2 else "memory.usage_in_bytes"
    used = parse_count(read_text(group / name))
    if used is None:
        return None
    field = "inactive_file" if version == 2 else "total_inactive_file"
    cached = parse_count(read_fields(group / "memory.stat").get(field, "")) or 0
    return max(0, used - cached)


def _own_groups(membership: Path) -> dict[str, str]:
    """Return the path of this process's group per controller. Version 2 has the key ``""``."""
    paths = {}
    for line in read_text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and path.startswith("/"):
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _upwards(top: Path, own: str) -> Iterator[Path]:
    """Yield the group ``own`` below ``top``, its parents, and ``top`` itself.

    In a container the path may be the host's path, which is not visible here. Then only ``top``
    exists, and it is the container's group. A path with ``..`` is outside the mount.
    """
    parts = PurePosixPath(own).parts[1:]
    if ".." in parts:
        parts = ()
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _cpu_quota_of(version: int, group: Path) -> float | None:
    """Return the CPU quota that a group itself sets, in cores, or None."""
    if version == 2:
        quota_us, _, period_us = read_text(group / "cpu.max").partition(" ")
    else:
        quota_us = read_text(group / "cpu.cfs_quota_us")
        period_us = read_text(group / "cpu.cfs_period_us")
    quota, period = parse_count(quota_us), parse_count(period_us)
    return quota / period if quota and period else None
