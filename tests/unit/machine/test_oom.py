"""Out-of-memory kills are attributed from the kernel's counters before and after."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.machine.oom import GroupCount, OomCount, OomKills

pytestmark = pytest.mark.legacy

GIB = 1 << 30


class Tree:
    """A tree of control groups that a test writes."""

    def __init__(self, folder: Path, *membership: str) -> None:
        self.mount = folder / "cgroup"
        self.membership = folder / "membership"
        self.vmstat = folder / "vmstat"
        self.membership.write_text("".join(f"{line}\n" for line in membership))

    def write(self, group: str, **files: str) -> None:
        folder = self.mount / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("memory_", "memory.")).write_text(text)

    def v2(self, group: str, *, oom: int = 0, kills: int = 0, limit: str = "max") -> None:
        events = f"low 0\nhigh 7\nmax 9\noom {oom}\noom_kill {kills}\noom_group_kill 0\n"
        self.write(group, memory_events=events, memory_max=f"{limit}\n")

    def v1(self, group: str, *, failures: int = 0, kills: int = 0, limit: int = 1 << 62) -> None:
        self.write(
            f"memory/{group}",
            memory_oom_control=f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
            memory_failcnt=f"{failures}\n",
            memory_limit_in_bytes=f"{limit}\n",
        )

    def host(self, kills: int) -> None:
        self.vmstat.write_text(f"nr_free_pages 17\noom_kill {kills}\nnuma_hit 3\n")

    def count(self) -> OomCount:
        count = OomCount.now(self.mount, self.membership, self.vmstat)
        return count._replace(host_bytes=24 * GIB)


def test_version_2_a_kill_by_the_own_group_s_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/pod/box")
    tree.v2("pod")
    tree.v2("pod/box", oom=3, kills=2, limit=str(2 * GIB))
    before = tree.count()
    tree.v2("pod", oom=1, kills=1)
    tree.v2("pod/box", oom=4, kills=3, limit=str(2 * GIB))
    found = tree.count().since(before)
    assert found == OomKills(kind="cgroup", num_kills=1, limit_bytes=2 * GIB)
    assert str(found) == (
        "killed by the kernel's OOM killer: 1 kill in this control group (limit 2.0 GiB)"
    )


def test_version_2_a_kill_by_the_limit_of_a_group_above(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/pod/box")
    tree.v2("pod", limit=str(GIB))
    tree.v2("pod/box", limit=str(8 * GIB))
    before = tree.count()
    tree.v2("pod", oom=1, kills=2, limit=str(GIB))
    tree.v2("pod/box", kills=2, limit=str(8 * GIB))
    assert tree.count().since(before) == OomKills(kind="cgroup", num_kills=2, limit_bytes=GIB)


def test_version_2_a_kill_for_want_of_the_machine_s_memory_is_not_the_group_s(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path, "0::/box")
    tree.v2("box", limit=str(2 * GIB))
    tree.host(5)
    before = tree.count()
    tree.v2("box", kills=1, limit=str(2 * GIB))
    tree.host(6)
    found = tree.count().since(before)
    assert found == OomKills(kind="host", num_kills=1, limit_bytes=24 * GIB)
    assert str(found) == (
        "killed by the kernel's OOM killer: 1 kill on this machine (24.0 GiB of memory)"
    )


def test_version_2_a_group_without_the_controller_is_counted_by_the_one_above(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path, "0::/user/session/shell")
    tree.write("user/session/shell", cgroup_procs="")
    tree.v2("user/session", limit=str(GIB))
    before = tree.count()
    tree.v2("user/session", oom=1, kills=1, limit=str(GIB))
    assert tree.count().since(before).kind == "cgroup"


def test_version_1_counts_kills_in_the_victim_s_group_alone(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/pod/box", "1:cpu:/elsewhere", "0::/")
    tree.v1("pod", limit=3 * GIB)
    tree.v1("pod/box")
    before = tree.count()
    tree.v1("pod", failures=40, limit=3 * GIB)
    tree.v1("pod/box", kills=1)
    assert tree.count().since(before) == OomKills(kind="cgroup", num_kills=1, limit_bytes=3 * GIB)


def test_version_1_without_a_limit_it_was_the_machine(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/box")
    tree.v1("box")
    before = tree.count()
    tree.v1("box", kills=1)
    assert tree.count().since(before).kind == "host"


def test_in_a_container_the_mount_is_our_group(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/docker/0123abcd")
    tree.v1(".", limit=GIB)
    before = tree.count()
    tree.v1(".", kills=1, failures=1, limit=GIB)
    assert tree.count().since(before).kind == "cgroup"


def test_a_kill_in_another_group_of_this_machine_is_none_of_ours(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/box")
    tree.v2("box", kills=2, limit=str(GIB))
    tree.host(5)
    before = tree.count()
    tree.host(6)
    after = tree.count()
    assert after.num_host_kills == 6  # control: it is counted
    assert after.since(before) == OomKills()
    assert str(after.since(before)) == ""


def test_a_limit_that_was_met_without_a_kill_is_none(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/box")
    tree.v1("box", limit=GIB)
    before = tree.count()
    tree.v1("box", failures=900, limit=GIB)
    assert tree.count().since(before).kind is None


def test_without_groups_the_machine_s_count_speaks(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.host(5)
    before = tree.count()
    tree.host(7)
    found = tree.count().since(before)
    assert found == OomKills(kind="host", num_kills=2, limit_bytes=24 * GIB)
    assert "2 kills on this machine" in str(found)


def test_a_process_that_moved_to_another_group_is_judged_by_the_machine_s_count(
    tmp_path: Path,
) -> None:
    tree = Tree(tmp_path, "0::/one")
    tree.v2("one")
    tree.v2("two", kills=9)
    tree.host(9)
    before = tree.count()
    tree.membership.write_text("0::/two\n")
    assert tree.count().since(before).kind is None
    tree.host(10)
    assert tree.count().since(before).kind == "host"


@pytest.mark.parametrize(
    "text", ["", "\n", "oom_kill", "oom_kill x", "oom_kill -1", "oom_kill 1e3", "oom_kills 3"]
)
def test_an_odd_file_is_no_kill(tmp_path: Path, text: str) -> None:
    tree = Tree(tmp_path, "4:memory:/box", "0::/box")
    tree.v2("box")
    tree.v1("box")
    tree.host(1)
    before = tree.count()
    tree.write("box", memory_events=text)
    tree.write("memory/box", memory_oom_control=text)
    tree.vmstat.write_text(text)
    assert tree.count().since(before).kind is None
    assert before.since(tree.count()).kind is None


def test_files_that_are_folders_binary_or_missing_are_no_kill(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/box")
    empty = tree.count()
    (tree.mount / "box" / "memory.events").mkdir(parents=True)
    (tree.mount / "memory.events").write_bytes(b"oom_kill \xff\xfe\n\x00oom_kill 9")
    tree.vmstat.mkdir()
    assert tree.count().since(empty) == empty.since(tree.count()) == OomKills()


def test_counts_that_went_down_are_no_kill() -> None:
    def count(kills: int) -> OomCount:
        group = GroupCount(group="/box", num_kills=kills, num_refusals=kills, limit_bytes=GIB)
        return OomCount(groups=(group,), num_host_kills=kills)

    assert count(1).since(count(4)) == OomKills()


@pytest.mark.parametrize(
    ("kills", "text"),
    [
        (OomKills(kind="cgroup", num_kills=2), "2 kills in this control group"),
        (OomKills(kind="host", num_kills=1), "1 kill on this machine"),
        (
            OomKills(kind="cgroup", num_kills=1, limit_bytes=64 << 20),
            "in this control group (limit 64 MiB)",
        ),
    ],
)
def test_what_is_not_known_is_not_said(kills: OomKills, text: str) -> None:
    assert str(kills).endswith(text)
