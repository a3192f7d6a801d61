"""What is a block device made of? Followed through partitions, LVM, encryption and RAID.

Linux only, from ``/sys``: nothing is opened, so no rights are needed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_SPEEDS = ("ram", "nvme", "ssd", "spinning", "unknown")  # of several members the slowest counts
_MAX_DEPTH = 8  # RAID under encryption under LVM is three
_VIRTUAL_NAMES = re.compile(r"(vd|xvd)[a-z]+$")
_MEMORY_NAMES = re.compile(r"(ram|zram|pmem)\d")
_VIRTUAL_MODELS = (
    "Amazon Elastic Block Store",  # looks like NVMe and is a network
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
class Disk:
    """A disk, or several that pose as one."""

    name: str = ""
    kind: str = "unknown"
    is_raid: bool = False
    is_virtual: bool = False


def find_disk(number: str, source: str, sys_root: Path) -> Disk:
    """Which disk is behind a mount, by its ``major:minor`` or by the device it was mounted from?

    Btrfs and others give a mount a number of its own, with no device behind it.
    """
    candidates = [sys_root / "dev" / "block" / number]
    if source.startswith("/dev/"):
        device = os.path.basename(os.path.realpath(source))  # /dev/mapper/x is a link to /dev/dm-0
        candidates.append(sys_root / "class" / "block" / device)
    for candidate in candidates:
        if candidate.exists():
            return _disk(Path(os.path.realpath(candidate)), _MAX_DEPTH)
    return Disk()


def _disk(folder: Path, depth: int) -> Disk:
    """The disk whose folder in ``/sys/devices`` this is, or is inside."""
    if (folder / "partition").exists():
        folder = folder.parent
    slaves = _slaves(folder)
    if slaves and depth > 0:
        return _compound(folder, [_disk(slave, depth - 1) for slave in slaves])
    name = folder.name
    if _MEMORY_NAMES.match(name):
        return Disk(name=name, kind="ram")
    model = _read(folder / "device" / "model")
    is_virtual = bool(_VIRTUAL_NAMES.match(name)) or model.startswith(_VIRTUAL_MODELS)
    return Disk(name=name, kind=_kind(folder, is_virtual), is_virtual=is_virtual)


def _kind(folder: Path, is_virtual: bool) -> str:
    rotational = _read(folder / "queue" / "rotational")
    if is_virtual:
        # Hypervisors leave the flag at 1 for whatever they lend; a 0 was set by somebody.
        return "ssd" if rotational == "0" else "unknown"
    if folder.name.startswith("nvme"):
        return "nvme"
    return {"0": "ssd", "1": "spinning"}.get(rotational, "unknown")


def _compound(folder: Path, members: list[Disk]) -> Disk:
    """Several disks, or one in a wrapping, that pose as one."""
    level = _read(folder / "md" / "level")
    return Disk(
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
