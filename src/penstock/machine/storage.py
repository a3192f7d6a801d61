"""Finds the storage behind a path: memory, flash, a spinning disk, or the network.

On Linux the lookup is::

    path -> mount -> block device (/sys/dev/block) -> disk
                       partition -> its disk
                       dm-0 (LVM, encryption) -> its slaves
                       md0 (RAID) -> its members; the slowest counts

No device is opened, so no privileges are needed. On Windows and macOS psutil recognizes network
drives and memory, but not the type of disk.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.machine.kernel_files import read_text

SYS = Path("/sys")

_KINDS: dict[str, set[str]] = {
    "internet": {
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
    },
    "network": {
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
        "remote",  # psutil's mark of a network drive on Windows
    },
    "ram": {"devtmpfs", "ramdisk", "ramfs", "tmpfs"},
}
"""The kind of storage, by filesystem type or mount option."""

# Fastest first, for random reads of small files, which is what a loader does.
_RANKS: dict[tuple[str, bool], int] = {
    ("ram", False): 1,
    ("nvme", True): 2,
    ("nvme", False): 3,
    ("ssd", True): 4,
    ("ssd", False): 5,
    ("spinning", True): 6,
    ("spinning", False): 7,
    ("network", False): 8,
    ("internet", False): 9,
}

_ADVICE = {
    "ram": "The fastest storage. It uses this machine's memory.",
    "nvme": "Fast enough for millions of small files.",
    "ssd": "Good. An NVMe drive reads small files several times faster.",
    "spinning": "Random reads take about 10 ms each. Pack the samples into a few large files, or "
    "copy them to an SSD.",
    "network": "Opening a file takes a network round trip. Pack the samples into a few large "
    "files, or copy them to a local disk.",
    "internet": "Opening a file takes a request over the internet. Copy the data here first.",
    "virtual": "A virtual disk. Its hardware is visible only to the host, so measure its speed.",
    "unknown": "The system does not report the type of this storage.",
}

_SPEEDS = ("ram", "nvme", "ssd", "spinning", "unknown")  # the slowest member counts
_MAX_DEPTH = 8  # RAID under encryption under LVM has a depth of 3
_VIRTUAL_NAMES = re.compile(r"(vd|xvd)[a-z]+$")
_MEMORY_NAMES = re.compile(r"(ram|zram|pmem)\d")
_VIRTUAL_MODELS = (
    "Amazon Elastic Block Store",  # looks like NVMe but is network storage
    "Google PersistentDisk",
    "Msft Virtual Disk",
    "PersistentDisk",
    "QEMU HARDDISK",
    "VBOX HARDDISK",
    "Virtual Disk",
    "Virtual disk",
    "nvme_card-pd",
)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage behind a path.

    Args:
        kind: ``"ram"``, ``"nvme"``, ``"ssd"``, ``"spinning"``, ``"network"`` or ``"unknown"``.
        device: The system's name: ``"nvme0n1"``, ``"server:/export"``. ``""`` if unknown.
        rank: 1 is fastest (memory), 9 slowest (the internet). None if the kind is unknown.
        is_virtual: True for a disk provided by a hypervisor, with unknown hardware behind it.
    """

    kind: str
    device: str = ""
    filesystem: str = ""
    rank: int | None = None
    advice: str = ""
    is_raid: bool = False
    is_virtual: bool = False


@dataclass(frozen=True, kw_only=True)
class _Disk:
    """A disk, or several disks that act as one."""

    name: str = ""
    kind: str = "unknown"
    is_raid: bool = False
    is_virtual: bool = False


_NO_DISK = _Disk()


def storage_of(path: str | os.PathLike[str], *, sys_root: Path = SYS) -> Storage:
    """Return the storage behind ``path``. The path does not need to exist.

    Example:
        >>> storage_of("s3://bucket/train").rank
        9
        >>> storage_of(".").kind in {"ram", "nvme", "ssd", "spinning", "network", "unknown"}
        True
    """
    name = os.fspath(path)
    if "://" in name and not name.startswith("file://"):
        return _describe("internet", name.partition("://")[2].partition("/")[0], "")
    if name.startswith(("\\\\", "//")) and sys.platform == "win32":
        return _describe("network", name.lstrip("\\/").partition("\\")[0], "")
    mount = _mount_above(name)
    if mount is None:
        return _describe("unknown", "", "")
    if mount.fstype == "overlay":
        # A container's files are stored where the host keeps the upper layer. That path exists on
        # the host, but not in the container.
        upper = dict(option.partition("=")[::2] for option in mount.opts.split(",")).get("upperdir")
        below = _mount_above(upper) if upper and os.path.exists(upper) else None
        if below is None or below.fstype == "overlay":
            return _describe("unknown", mount.device, "overlay")
        mount = below
    words = {mount.fstype.lower(), *mount.opts.split(",")}
    for kind, known_words in _KINDS.items():
        if words & known_words:
            return _describe(kind, mount.device, mount.fstype)
    disk = _find_disk(mount, sys_root)
    return _describe(disk.kind, disk.name or mount.device, mount.fstype, disk)


def _mount_above(name: str) -> Any:
    """Return psutil's record of the mount with the longest mount point above a path, or None.

    If two mounts share a mount point, the later one hides the earlier one.
    """
    import psutil

    path = os.path.normcase(os.path.realpath(name))
    best, best_length = None, -1
    with suppress(OSError):
        for mount in psutil.disk_partitions(all=True):
            point = os.path.normcase(mount.mountpoint)
            is_above = path == point or path.startswith(point.rstrip("\\/") + os.sep)
            if is_above and len(point) >= best_length:
                best, best_length = mount, len(point)
    return best


def _describe(kind: str, device: str, filesystem: str, disk: _Disk = _NO_DISK) -> Storage:
    return Storage(
        kind="network" if kind == "internet" else kind,
        device=device,
        filesystem=filesystem,
        rank=_RANKS.get((kind, disk.is_raid)),
        advice=_ADVICE["virtual" if disk.is_virtual else kind],
        is_raid=disk.is_raid,
        is_virtual=disk.is_virtual,
    )


# -- block devices ---------------------------------------------------------------------------------


def _find_disk(mount: Any, sys_root: Path) -> _Disk:
    """Return the disk behind a mount, by its device number or the device it was mounted from.

    Btrfs and other filesystems use device numbers without a block device behind them.
    """
    candidates = []
    if hasattr(os, "major"):  # not on Windows
        with suppress(OSError):
            candidates.append(sys_root / "dev" / "block" / _device_number(mount.mountpoint))
    if mount.device.startswith("/dev/"):
        device = os.path.basename(os.path.realpath(mount.device))  # /dev/mapper/x links to dm-0
        candidates.append(sys_root / "class" / "block" / device)
    for candidate in candidates:
        if candidate.exists():
            return _disk(Path(os.path.realpath(candidate)), _MAX_DEPTH)
    return _NO_DISK


def _device_number(path: str) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _disk(folder: Path, depth: int) -> _Disk:
    """Return the disk of a folder in ``/sys/devices`` (the disk's own folder or a partition's)."""
    if (folder / "partition").exists():
        folder = folder.parent
    slaves = _slaves(folder)
    if slaves and depth > 0:
        return _compound(folder, [_disk(slave, depth - 1) for slave in slaves])
    name = folder.name
    if _MEMORY_NAMES.match(name):
        return _Disk(name=name, kind="ram")
    model = read_text(folder / "device" / "model")
    is_virtual = bool(_VIRTUAL_NAMES.match(name)) or model.startswith(_VIRTUAL_MODELS)
    return _Disk(name=name, kind=_kind(folder, is_virtual), is_virtual=is_virtual)


def _kind(folder: Path, is_virtual: bool) -> str:
    rotational = read_text(folder / "queue" / "rotational")
    if is_virtual:
        # Hypervisors leave the flag at 1 for any virtual disk. A 0 was set on purpose.
        return "ssd" if rotational == "0" else "unknown"
    if folder.name.startswith("nvme"):
        return "nvme"
    return {"0": "ssd", "1": "spinning"}.get(rotational, "unknown")


def _compound(folder: Path, members: list[_Disk]) -> _Disk:
    """Combine several disks, or one wrapped disk, that act as one."""
    level = read_text(folder / "md" / "level")
    return _Disk(
        name=folder.name,
        kind=max((member.kind for member in members), key=_SPEEDS.index),
        is_raid=level.startswith("raid") or any(member.is_raid for member in members),
        is_virtual=any(member.is_virtual for member in members),
    )


def _slaves(folder: Path) -> list[Path]:
    try:
        entries = sorted((folder / "slaves").iterdir())
    except OSError:
        return []
    return [Path(os.path.realpath(entry)) for entry in entries]
