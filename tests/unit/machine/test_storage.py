"""The storage of a path, from the mounts of real systems and trees like /sys."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.machine import storage
from penstock.machine.storage import Storage, storage_of

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(sys.platform == "win32", reason="the trees are made of symbolic links"),
]

# A workstation: root on NVMe, data on RAID, home on encrypted LVM, a network share, a USB stick.
WORKSTATION = r"""
22 28 0:20 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
24 28 0:5 / /dev rw,nosuid,relatime shared:2 - devtmpfs udev rw,size=32812340k,mode=755
28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
31 24 0:25 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
40 28 9:0 / /data rw,relatime shared:30 - xfs /dev/md0 rw,attr2,inode64,sunit=1024
41 28 253:1 / /home rw,relatime shared:31 - ext4 /dev/mapper/vg-home rw
42 28 0:50 / /mnt/nas rw,relatime shared:32 - nfs4 nas:/export/data rw,vers=4.2,hard
43 28 8:17 / /media/USB\040stick rw,nosuid shared:33 - vfat /dev/sdb1 rw,uid=1000
44 28 0:51 / /mnt/bucket rw,nosuid - fuse.gcsfuse my-bucket rw,user_id=0
45 28 0:52 / /btrfs rw - btrfs /dev/nvme0n1p3 rw,space_cache=v2
46 28 0:53 / /tank rw - zfs tank/data rw,xattr
47 28 259:9 / /scratch rw - xfs /dev/md1 rw
"""


def partition(device: str, mountpoint: str, fstype: str, opts: str) -> Any:
    return SimpleNamespace(device=device, mountpoint=mountpoint, fstype=fstype, opts=opts)


class World:
    """Mounts and a /sys tree that a test fills."""

    def __init__(self, root: Path):
        self.sys_root, self.disks = root / "sys", {}
        self.mounts: list[Any] = []
        self.numbers: dict[str, str] = {}
        (self.sys_root / "dev" / "block").mkdir(parents=True)
        (self.sys_root / "class" / "block").mkdir(parents=True)
        self.mount(WORKSTATION)

    def mount(self, mountinfo: str) -> None:
        """Mount exactly these lines of ``/proc/self/mountinfo``."""
        self.mounts.clear()
        for line in mountinfo.strip().splitlines():
            left, right = (part.split(" ") for part in line.split(" - "))
            point = left[4].replace(r"\040", " ")
            self.mounts.append(partition(right[1], point, right[0], right[-1]))
            self.numbers[point] = left[2]

    def disk(
        self,
        name: str,
        number: str,
        *,
        rotational: str = "0",
        inside: str = "",
        slaves: tuple[str, ...] = (),
        **files: str,
    ) -> None:
        """Add a block device. ``inside`` names the disk of a partition."""
        parent: Path = self.disks[inside] if inside else self.sys_root / "devices" / "block"
        folder = parent / name
        self.disks[name] = folder
        (folder / "slaves").mkdir(parents=True)
        if inside:
            (folder / "partition").write_text("1\n")
        else:
            (folder / "queue").mkdir()
            (folder / "queue" / "rotational").write_text(f"{rotational}\n")
        for file, text in files.items():
            path = folder / file.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for slave in slaves:
            (folder / "slaves" / slave).symlink_to(self.disks[slave])
        (self.sys_root / "dev" / "block" / number).symlink_to(folder)
        (self.sys_root / "class" / "block" / name).symlink_to(folder)

    def of(self, path: str) -> Storage:
        return storage_of(path, sys_root=self.sys_root)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: world.mounts)
    monkeypatch.setattr(storage, "_device_number", world.numbers.__getitem__)
    return world


@pytest.fixture
def workstation(world: World) -> World:
    world.disk("nvme0n1", "259:0")
    world.disk("nvme0n1p2", "259:2", inside="nvme0n1")
    world.disk("nvme0n1p3", "259:3", inside="nvme0n1")
    world.disk("sda", "8:0", rotational="1")
    world.disk("sdb", "8:16", rotational="1")
    world.disk("sdb1", "8:17", inside="sdb")
    world.disk("sdc", "8:32")
    world.disk("sdc1", "8:33", inside="sdc")
    world.disk("md0", "9:0", rotational="1", slaves=("sda", "sdb1"), md__level="raid10\n")
    world.disk("md1", "259:9", slaves=("nvme0n1p3", "sdc1"), md__level="raid0\n")
    world.disk("dm-0", "253:0", slaves=("sdc1",))
    world.disk("dm-1", "253:1", slaves=("dm-0",))
    return world


@pytest.mark.parametrize(
    ("path", "kind", "device", "filesystem", "rank"),
    [
        ("/dev/shm/batch", "ram", "tmpfs", "tmpfs", 1),
        ("/srv/images/1.jpg", "nvme", "nvme0n1", "ext4", 3),
        ("/scratch/x", "ssd", "md1", "xfs", 4),
        ("/home/me/data", "ssd", "dm-1", "ext4", 5),
        ("/data", "spinning", "md0", "xfs", 6),
        ("/media/USB stick/photos", "spinning", "sdb", "vfat", 7),
        ("/mnt/nas/train", "network", "nas:/export/data", "nfs4", 8),
        ("/mnt/bucket/train", "network", "my-bucket", "fuse.gcsfuse", 9),
        ("/btrfs/train", "nvme", "nvme0n1", "btrfs", 3),
        ("/tank/train", "unknown", "tank/data", "zfs", None),
        ("/database/x", "nvme", "nvme0n1", "ext4", 3),  # not below /data
    ],
)
def test_a_workstation(
    workstation: World, path: str, kind: str, device: str, filesystem: str, rank: int | None
) -> None:
    found = workstation.of(path)
    assert (found.kind, found.device, found.filesystem) == (kind, device, filesystem)
    assert found.rank == rank
    assert found.is_raid == path.startswith(("/data/", "/scratch")) or path == "/data"
    assert found.advice


def test_a_raid_is_as_slow_as_its_slowest_member(workstation: World) -> None:
    assert workstation.of("/scratch").kind == "ssd"  # NVMe and SATA together
    workstation.disks["sdc"].joinpath("queue", "rotational").write_text("1")
    assert workstation.of("/scratch").kind == "spinning"


def test_disks_that_are_only_joined_are_no_raid(world: World) -> None:
    world.disk("sda", "8:0", rotational="1")
    world.disk("sdb", "8:16", rotational="1")
    world.disk("md0", "9:0", slaves=("sda", "sdb"), md__level="linear\n")
    found = world.of("/data")
    assert (found.is_raid, found.rank) == (False, 7)


@pytest.mark.parametrize(
    ("rotational", "kind", "rank"),
    [("1", "unknown", None), ("0", "ssd", 5), ("?", "unknown", None)],
)
def test_a_virtual_disk_is_believed_only_when_it_claims_flash(
    world: World, rotational: str, kind: str, rank: int | None
) -> None:
    world.mount("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n")
    world.disk("vda", "254:0", rotational=rotational)
    found = world.of("/srv")
    assert (found.kind, found.rank, found.is_virtual) == (kind, rank, True)
    assert "virtual" in found.advice


def test_a_cloud_s_network_disk_that_poses_as_nvme(world: World) -> None:
    world.disk("nvme0n1", "259:0", device__model="Amazon Elastic Block Store              \n")
    world.disk("nvme0n1p2", "259:2", inside="nvme0n1")
    found = world.of("/srv")
    assert (found.kind, found.is_virtual) == ("ssd", True)


@pytest.mark.parametrize(
    ("filesystem", "kind", "rank"),
    [
        ("tmpfs", "ram", 1),
        ("ramfs", "ram", 1),
        ("cifs", "network", 8),
        ("smb3", "network", 8),
        ("9p", "network", 8),
        ("lustre", "network", 8),
        ("ceph", "network", 8),
        ("beegfs", "network", 8),
        ("fuse.sshfs", "network", 8),
        ("fuse.s3fs", "network", 9),
        ("fuse.rclone", "network", 9),
        ("fuse", "unknown", None),
        ("squashfs", "unknown", None),
    ],
)
def test_file_systems(world: World, filesystem: str, kind: str, rank: int | None) -> None:
    world.mount(f"30 1 0:40 / /x rw - {filesystem} source rw\n")
    assert (world.of("/x/y").kind, world.of("/x/y").rank) == (kind, rank)


# Docker's root as seen inside, in the usual field order. The upper layer's path is on the host.
OVERLAY = (
    "620 480 0:70 / / rw,relatime master:210 - overlay overlay "
    "rw,lowerdir=/l/AAAA:/l/BBBB,upperdir={upper},workdir={upper}/../work\n"
)


def test_an_overlay_lies_where_its_upper_layer_lies_if_that_is_visible(
    world: World, tmp_path: Path
) -> None:
    upper = tmp_path / "layers" / "upper"
    world.disk("nvme0n1", "259:0")
    mounts = f"28 1 259:0 / {tmp_path} rw - ext4 /dev/nvme0n1 rw\n"
    world.mount(OVERLAY.format(upper=upper) + mounts)
    assert world.of("/srv").kind == "unknown"  # the path exists only on the host
    upper.mkdir(parents=True)
    found = world.of("/srv")
    assert (found.kind, found.device, found.rank) == ("nvme", "nvme0n1", 3)


@pytest.mark.parametrize("options", ["rw", "rw,upperdir=", "", "=,=,upperdir"])
def test_an_overlay_without_an_upper_layer_is_unknown(world: World, options: str) -> None:
    world.mount(f"620 480 0:70 / / rw - overlay overlay {options}\n")
    assert (world.of("/srv").kind, world.of("/srv").filesystem) == ("unknown", "overlay")


def test_of_two_mounts_on_one_point_the_later_is_seen(world: World) -> None:
    world.mount("1 0 0:1 / /x rw - nfs server:/a rw\n2 0 0:2 / /x rw - tmpfs tmpfs rw\n")
    assert world.of("/x").kind == "ram"


def test_no_mounts_and_a_missing_sys_are_unknown(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.of("/srv").kind == "unknown"  # the disk is not in /sys
    world.mount("")
    assert world.of("/srv").kind == "unknown"

    def fail(all: bool) -> Any:
        raise OSError("no /proc")

    monkeypatch.setattr(psutil, "disk_partitions", fail)
    assert world.of("/srv").kind == "unknown"


def test_devices_that_are_made_of_each_other_end(world: World) -> None:
    world.disk("md0", "9:0")
    (world.disks["md0"] / "slaves" / "md0").symlink_to(world.disks["md0"])
    assert world.of("/data").kind in {"ssd", "unknown"}


@pytest.mark.parametrize("url", ["s3://bucket/train", "https://example.org/a.tar", "gs://b/c"])
def test_an_address_is_the_internet(url: str) -> None:
    found = storage_of(url)
    assert (found.kind, found.rank) == ("network", 9)


def test_the_ranking() -> None:
    from penstock.machine.storage import _RANKS

    order = [*sorted(_RANKS, key=_RANKS.__getitem__)]
    assert order == [
        ("ram", False),
        ("nvme", True),
        ("nvme", False),
        ("ssd", True),
        ("ssd", False),
        ("spinning", True),
        ("spinning", False),
        ("network", False),
        ("internet", False),
    ]


# Outside Linux, psutil is used.


@pytest.mark.parametrize(
    ("path", "kind", "filesystem"),
    [
        ("/Users/me/data", "unknown", "apfs"),
        ("/Volumes/share/data", "network", "smbfs"),
        ("/Volumes/disk", "ram", "hfs"),
        ("/Volumes/cloud/a", "network", "webdav"),
    ],
)
def test_macos(monkeypatch: pytest.MonkeyPatch, path: str, kind: str, filesystem: str) -> None:
    found = [
        partition("/dev/disk3s1s1", "/", "apfs", "ro,local,rootfs"),
        partition("//me@nas/share", "/Volumes/share", "smbfs", "rw,nosuid"),
        partition("/dev/disk9", "/Volumes/disk", "hfs", "rw,ramdisk"),
        partition("https://dav", "/Volumes/cloud", "webdav", "rw"),
    ]
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    assert (storage_of(path).kind, storage_of(path).filesystem) == (kind, filesystem)


def test_a_windows_share_is_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    found = storage_of(r"\\nas\photos\train")
    assert (found.kind, found.device, found.rank) == ("network", "nas", 8)


def test_this_machine() -> None:
    if sys.platform == "linux" and Path("/dev/shm").is_dir():
        assert storage_of("/dev/shm").kind == "ram"
    assert storage_of(Path(__file__)).advice
