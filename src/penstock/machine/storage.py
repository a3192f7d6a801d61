"""What does a file lie on, and how fast is that? Memory, flash, a spinning disk, or the network.

On Linux the way down is::

    path -> mount (/proc/self/mountinfo) -> block device (/sys/dev/block) -> disk
                                             partition -> its disk
                                             dm-0 (LVM, encryption) -> its slaves
                                             md0 (RAID) -> its members; the slowest counts
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.machine.disks import Disk, find_disk

MOUNTINFO = Path("/proc/self/mountinfo")
SYS = Path("/sys")

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_NETWORK = frozenset(
    {
        "9p",
        "afpfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.ceph",
        "fuse.glusterfs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    }
)
_INTERNET = frozenset(
    {
        "davfs",
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.davfs",
        "fuse.gcsfuse",
        "fuse.goofys",
        "fuse.juicefs",
        "fuse.mount-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "webdav",
    }
)
_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}

# Fastest first. Random reads of small files are what a loader does, and what this order is for.
_RANKS: dict[tuple[str, bool], int] = {
    ("ram", False): 1,
    ("nvme", True): 2,
    ("nvme", False): 3,
    ("ssd", True): 4,
    ("ssd", False): 5,
    ("spinning", True): 6,
    ("spinning", False): 7,
    ("network", False): 8,
}
_INTERNET_RANK = 9

_ADVICE = {
    "ram": "Nothing is faster; it counts against this machine's memory.",
    "nvme": "Fast enough for millions of small files.",
    "ssd": "Good. An NVMe drive reads small files several times faster.",
    "spinning": "Random reads cost about 10 ms each: pack the samples into few large files, or "
    "copy them to an SSD.",
    "network": "Every file opened is a question to another machine: pack the samples into few "
    "large files, or copy them to a disk of this machine.",
    "unknown": "This system does not say what it is made of.",
}
_VIRTUAL_ADVICE = "A virtual disk: what it lies on is known to the host only, so measure it."
_INTERNET_ADVICE = "Every file opened is a request over the internet: copy the data here first."


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What a path lies on.

    Args:
        kind: ``"ram"``, ``"nvme"``, ``"ssd"``, ``"spinning"``, ``"network"`` or ``"unknown"``.
        device: As the system names it: ``"nvme0n1"``, ``"server:/export"``; ``""`` if unknown.
        rank: 1 is fastest (memory), 9 slowest (the internet); None where the kind is unknown.
        is_virtual: Is it a disk that a host lends, of which nobody here can know more?
    """

    kind: str
    device: str = ""
    filesystem: str = ""
    rank: int | None = None
    advice: str = ""
    is_raid: bool = False
    is_virtual: bool = False


@dataclass(frozen=True)
class Mount:
    """One line of ``mountinfo``."""

    point: str
    number: str
    filesystem: str
    source: str
    options: str


def storage_of(
    path: str | os.PathLike[str], *, mountinfo: Path = MOUNTINFO, sys_root: Path = SYS
) -> Storage:
    """What does ``path`` lie on? It need not exist yet.

    Example:
        >>> storage_of("s3://bucket/train").rank
        9
        >>> storage_of(".").kind in {"ram", "nvme", "ssd", "spinning", "network", "unknown"}
        True
    """
    name = os.fspath(path)
    if "://" in name and not name.startswith("file://"):
        return _internet(name.partition("://")[2].partition("/")[0], "")
    if name.startswith(("\\\\", "//")) and sys.platform == "win32":
        return _describe("network", name.lstrip("\\/").partition("\\")[0], "")
    if sys.platform != "linux" and mountinfo == MOUNTINFO:
        return _elsewhere(name)
    mount = _mount_of(os.path.realpath(name), _read_mounts(mountinfo))
    if mount is None:
        return _describe("unknown", "", "")
    if mount.filesystem == "overlay":
        return _under_overlay(mount, mountinfo, sys_root)
    return _on_mount(mount, sys_root)


def _read_mounts(mountinfo: Path) -> list[Mount]:
    """The mounts of this process, in the order in which they were made."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if dash and len(left) >= 6 and len(right) >= 2:
            mounts.append(
                Mount(_unescape(left[4]), left[2], right[0], _unescape(right[1]), right[-1])
            )
    return mounts


def _unescape(text: str) -> str:
    for escape, character in _ESCAPES.items():  # the backslash itself comes last
        text = text.replace(escape, character)
    return text


def _mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount with the longest point above ``path``; of two on one point the later hides."""
    best = None
    for mount in mounts:
        prefix = mount.point.rstrip("/") + "/"
        is_above = path == mount.point or path.startswith(prefix)
        if is_above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _under_overlay(mount: Mount, mountinfo: Path, sys_root: Path) -> Storage:
    """A container's own files lie where the host keeps the upper layer, if that is visible."""
    options = dict(option.partition("=")[::2] for option in mount.options.split(","))
    upper = _unescape(options.get("upperdir", ""))
    below = _mount_of(os.path.realpath(upper), _read_mounts(mountinfo)) if upper else None
    # On the host every path of it exists; in the container the path is the host's and does not.
    if below is None or below.filesystem == "overlay" or not os.path.exists(upper):
        return _describe("unknown", mount.source, "overlay")
    return _on_mount(below, sys_root)


def _on_mount(mount: Mount, sys_root: Path) -> Storage:
    filesystem = mount.filesystem
    if filesystem in _MEMORY:
        return _describe("ram", mount.source, filesystem)
    if filesystem in _INTERNET:
        return _internet(mount.source, filesystem)
    if filesystem in _NETWORK:
        return _describe("network", mount.source, filesystem)
    disk = find_disk(mount.number, mount.source, sys_root)
    return _describe(disk.kind, disk.name or mount.source, filesystem, disk)


def _describe(kind: str, device: str, filesystem: str, disk: Disk | None = None) -> Storage:
    is_raid = disk is not None and disk.is_raid
    is_virtual = disk is not None and disk.is_virtual
    return Storage(
        kind=kind,
        device=device,
        filesystem=filesystem,
        rank=_RANKS.get((kind, is_raid)),
        advice=_VIRTUAL_ADVICE if is_virtual else _ADVICE[kind],
        is_raid=is_raid,
        is_virtual=is_virtual,
    )


def _internet(device: str, filesystem: str) -> Storage:
    return Storage(
        kind="network",
        device=device,
        filesystem=filesystem,
        rank=_INTERNET_RANK,
        advice=_INTERNET_ADVICE,
    )


def _elsewhere(name: str) -> Storage:
    """What psutil knows on Windows and macOS: the network and memory, not the kind of disk."""
    import psutil

    path = os.path.normcase(os.path.realpath(name))
    best = None
    for partition in psutil.disk_partitions(all=True):
        point = os.path.normcase(partition.mountpoint)
        is_above = path == point or path.startswith(point.rstrip("\\/") + os.sep)
        if is_above and (best is None or len(point) >= len(best.mountpoint)):
            best = partition
    if best is None:
        return _describe("unknown", "", "")
    words = set(best.opts.split(",")) | {best.fstype.lower()}
    if words & _INTERNET:
        return _internet(best.device, best.fstype)
    if "remote" in words or words & _NETWORK:
        return _describe("network", best.device, best.fstype)
    return _describe("ram" if "ramdisk" in words else "unknown", best.device, best.fstype)
