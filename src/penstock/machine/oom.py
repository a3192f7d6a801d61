"""Counts the kernel's OOM kills between two points in time and finds the limit that was hit.

The kernel counts OOM kills in the victim's control group and in ``/proc/vmstat`` before it sends
the signal, so the kill of a dead process has always been counted. A second counter, of how often a
group hit its limit, shows which group set the limit::

    pod17       memory.max: 2 GiB   memory.events: oom 1, oom_kill 1   <- its limit was hit
      box       memory.max: max     memory.events: oom 0, oom_kill 1   <- the victim was here

If our group counts a kill but no group hit its limit, the machine ran out of memory. A kill that
only ``/proc/vmstat`` counts happened in another container and is ignored. A file that is missing or
malformed counts as no kill.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from penstock.machine.cgroup import MEMBERSHIP, MOUNT, groups_above, memory_limit_of
from penstock.machine.kernel_files import parse_count, read_fields, read_text
from penstock.named_tuple import NamedTuple

VMSTAT = Path("/proc/vmstat")


class OomKills(NamedTuple):
    """OOM kills between two counts.

    Args:
        kind: ``"cgroup"``: a control group hit its limit. ``"host"``: the machine ran out of
            memory. None: the kernel killed none of our processes.
        num_kills: Number of killed processes.
        limit_bytes: The group's limit or the machine's memory. None if unknown.
    """

    kind: Literal["cgroup", "host"] | None = None
    num_kills: int = 0
    limit_bytes: int | None = None

    def __str__(self) -> str:
        if self.kind is None:
            return ""
        kills = "1 kill" if self.num_kills == 1 else f"{self.num_kills} kills"
        size = "" if self.limit_bytes is None else _size(self.limit_bytes)
        if self.kind == "cgroup":
            where = "in this control group" + (f" (limit {size})" if size else "")
        else:
            where = "on this machine" + (f" ({size} of memory)" if size else "")
        return f"killed by the kernel's OOM killer: {kills} {where}"


class GroupCount(NamedTuple):
    """The counters of one control group.

    Args:
        num_kills: OOM kills of its members. None if the kernel does not count them.
        num_refusals: How often the group hit its own limit. None if the kernel does not count it.
    """

    group: str
    num_kills: int | None
    num_refusals: int | None
    limit_bytes: int | None


class OomCount(NamedTuple):
    """The kernel's counters at one point in time.

    Example:
        >>> before = OomCount.now()
        >>> OomCount.now().since(before).kind is None
        True
    """

    groups: tuple[GroupCount, ...] = ()
    num_host_kills: int | None = None
    host_bytes: int | None = None

    @classmethod
    def now(
        cls, mount: Path = MOUNT, membership: Path = MEMBERSHIP, vmstat: Path = VMSTAT
    ) -> OomCount:
        """Read the counters. Takes a fraction of a millisecond and never raises."""
        counts = (_count(*place) for place in groups_above("memory", mount, membership))
        return cls(
            groups=tuple(count for count in counts if count is not None),
            num_host_kills=_counts(vmstat).get("oom_kill"),
            host_bytes=_host_bytes(),
        )

    def since(self, before: OomCount) -> OomKills:
        """Return the kills since ``before`` that may have hit one of our processes.

        Example:
            >>> def count(kills, refusals):
            ...     box = GroupCount(group="/box", num_kills=kills, num_refusals=refusals,
            ...                      limit_bytes=2 << 30)
            ...     return OomCount(groups=(box,))
            >>> print(count(3, 9).since(count(2, 8)))
            killed by the kernel's OOM killer: 1 kill in this control group (limit 2.0 GiB)
        """
        in_group = self._kills_in_group_since(before)
        if in_group is None:  # no counter covers only our processes
            num_kills = _growth(self.num_host_kills, before.num_host_kills) or 0
        else:
            num_kills = in_group
        if num_kills <= 0:
            return OomKills()
        limit = None if in_group is None else self._limit_in_the_way_since(before)
        if limit is not None:
            return OomKills(kind="cgroup", num_kills=num_kills, limit_bytes=limit)
        return OomKills(kind="host", num_kills=num_kills, limit_bytes=self.host_bytes)

    def _kills_in_group_since(self, before: OomCount) -> int | None:
        """Return the kills that the lowest counting group counted, or None if no group counts."""
        for count in self.groups:
            if count.num_kills is not None:
                earlier = before._count_of(count.group)
                return None if earlier is None else _growth(count.num_kills, earlier.num_kills)
        return None

    def _limit_in_the_way_since(self, before: OomCount) -> int | None:
        """Return the lowest limit that was hit. Version 2 adds a group's counts to its parents."""
        for count in self.groups:
            earlier = before._count_of(count.group)
            if count.limit_bytes is None or earlier is None:
                continue
            refusals = _growth(count.num_refusals, earlier.num_refusals)
            if refusals is None or refusals > 0:
                return count.limit_bytes
        return None

    def _count_of(self, group: str) -> GroupCount | None:
        return next((count for count in self.groups if count.group == group), None)


def _count(version: int, group: Path) -> GroupCount | None:
    if version == 2:
        events = _counts(group / "memory.events")
        kills, refusals = events.get("oom_kill"), events.get("oom")
    else:
        kills = _counts(group / "memory.oom_control").get("oom_kill")
        refusals = parse_count(read_text(group / "memory.failcnt"))
    if kills is None and refusals is None:
        return None
    return GroupCount(
        group=str(group),
        num_kills=kills,
        num_refusals=refusals,
        limit_bytes=memory_limit_of(version, group),
    )


def _counts(path: Path) -> dict[str, int | None]:
    return {name: parse_count(value) for name, value in read_fields(path).items()}


def _growth(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # the call or the name does not exist
        return None


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
