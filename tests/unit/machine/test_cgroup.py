"""Limits of control groups for this process: both versions, nested groups and odd files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.machine.cgroup import cpu_quota, memory_left_bytes, memory_limit_bytes

pytestmark = pytest.mark.legacy

GIB = 1 << 30


def tree(folder: Path, **files: str) -> Path:
    """Write files below a mount. ``a__b`` means ``a/b``, and ``_dot_`` means a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def member(folder: Path, *lines: str) -> Path:
    path = folder / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_version_2_the_process_s_own_group(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "cgroup",
        user__job__cpu_dot_max="150000 100000\n",
        user__job__memory_dot_max=f"{4 * GIB}\n",
    )
    own = member(tmp_path, "0::/user/job")
    assert cpu_quota(mount, own) == 1.5
    assert memory_limit_bytes(mount, own) == 4 * GIB


def test_version_2_a_parent_may_be_tighter_than_the_own_group(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "cgroup",
        kubepods__cpu_dot_max="max 100000",
        kubepods__pod__cpu_dot_max="200000 100000",
        kubepods__pod__box__cpu_dot_max="800000 100000",
        kubepods__pod__memory_dot_max=str(8 * GIB),
        kubepods__pod__box__memory_dot_max="max",
    )
    own = member(tmp_path, "0::/kubepods/pod/box")
    assert cpu_quota(mount, own) == 2.0
    assert memory_limit_bytes(mount, own) == 8 * GIB


def test_a_neighbour_s_limit_is_not_ours(tmp_path: Path) -> None:
    mount = tree(tmp_path / "cgroup", other__cpu_dot_max="100000 100000")
    assert cpu_quota(mount, member(tmp_path, "0::/mine")) is None


def test_version_1_has_a_path_for_each_controller(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "cgroup",
        cpu__jobs__cpu_dot_cfs_quota_us="300000",
        cpu__jobs__cpu_dot_cfs_period_us="100000",
        memory__box__memory_dot_limit_in_bytes=str(2 * GIB),
        memory__jobs__memory_dot_limit_in_bytes=str(GIB),  # the path of cpu, not of memory
    )
    own = member(tmp_path, "4:memory:/box", "3:cpu,cpuacct:/jobs", "1:name=systemd:/")
    assert cpu_quota(mount, own) == 3.0
    assert memory_limit_bytes(mount, own) == 2 * GIB


def test_in_a_container_the_host_s_path_is_not_there_and_the_mount_is_our_group(
    tmp_path: Path,
) -> None:
    mount = tree(
        tmp_path / "cgroup",
        cpu__cpu_dot_cfs_quota_us="200000",
        cpu__cpu_dot_cfs_period_us="100000",
    )
    own = member(tmp_path, "3:cpu,cpuacct:/docker/0123abcd", "0::/docker/0123abcd")
    assert cpu_quota(mount, own) == 2.0


def test_both_versions_side_by_side(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "cgroup",
        unified__slice__cpu_dot_max="400000 100000",
        memory__memory_dot_limit_in_bytes=str(GIB),
    )
    own = member(tmp_path, "0::/slice", "4:memory:/")
    assert cpu_quota(mount, own) == 4.0
    assert memory_limit_bytes(mount, own) == GIB


def test_a_path_that_leads_out_of_the_mount_is_not_followed(tmp_path: Path) -> None:
    tree(tmp_path, outside__cpu_dot_max="100000 100000")
    mount = tree(tmp_path / "cgroup", cpu_dot_max="300000 100000")
    assert cpu_quota(mount, member(tmp_path, "0::/../outside")) == 3.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n", "max", "max 100000", "rubbish", "1 2 3", "-1 100000", "0 100000"),
        *("100000 0", "100000 -5", "1.5 1.0", "100000", "\u0661 100", "0x10 100000", "nan nan"),
    ],
)
def test_an_odd_quota_is_no_limit(tmp_path: Path, text: str) -> None:
    assert cpu_quota(tree(tmp_path, cpu_dot_max=text), tmp_path / "missing") is None


@pytest.mark.parametrize(
    "text", ["", "max\n", "-1", "0", "rubbish", "9223372036854771712", "9" * 5000, "1e9"]
)
@pytest.mark.parametrize("name", ["memory_dot_max", "memory__memory_dot_limit_in_bytes"])
def test_an_odd_memory_limit_is_no_limit(tmp_path: Path, name: str, text: str) -> None:
    assert memory_limit_bytes(tree(tmp_path, **{name: text}), tmp_path / "missing") is None


def test_a_file_that_cannot_be_read_is_no_limit_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "job" / "cpu.max").mkdir(parents=True)  # reading it raises OSError
    (tmp_path / "cpu.max").write_bytes(b"\xff\xfe 100000")
    own = member(tmp_path, "0::/job")
    assert cpu_quota(tmp_path, own) is None
    tree(tmp_path, cpu_dot_max="500000 100000")
    assert cpu_quota(tmp_path, own) == 5.0


@pytest.mark.parametrize(
    "line", ["", "rubbish", "0:", "0::", "0::relative", "::::", "\x00", "0::/a\x00b"]
)
def test_an_odd_membership_leaves_the_mount_itself(tmp_path: Path, line: str) -> None:
    mount = tree(tmp_path / "cgroup", cpu_dot_max="200000 100000")
    assert cpu_quota(mount, member(tmp_path, line)) == 2.0


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path / "none") is None
    assert memory_limit_bytes(tmp_path / "none", tmp_path / "none") is None


def test_what_is_left_is_the_limit_less_what_is_held_and_not_cached(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "cgroup",
        pod__memory_dot_max=str(8 * GIB),
        pod__memory_dot_current=str(5 * GIB),
        pod__memory_dot_stat=f"anon 1\ninactive_file {2 * GIB}\nodd\n",
        pod__box__memory_dot_max="max",
        pod__box__memory_dot_current=str(GIB),
    )
    assert memory_left_bytes(mount, member(tmp_path, "0::/pod/box")) == 5 * GIB
    assert memory_left_bytes(mount, member(tmp_path, "0::/other")) is None


def test_version_1_has_names_of_its_own_for_what_is_held(tmp_path: Path) -> None:
    mount = tree(
        tmp_path / "cgroup",
        memory__box__memory_dot_limit_in_bytes=str(4 * GIB),
        memory__box__memory_dot_usage_in_bytes=str(6 * GIB),
        memory__box__memory_dot_stat=f"inactive_file 5\ntotal_inactive_file {GIB}",
    )
    assert memory_left_bytes(mount, member(tmp_path, "4:memory:/box")) == 0  # never negative
