"""How many cores this process may use: affinity, and whatever kind of cgroup there is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.machine.host import can_start_python, usable_cores

pytestmark = pytest.mark.legacy

MANY = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let affinity allow many, so that the cgroup is what limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MANY)), raising=False)


def cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("100001 100000\n", 2),
        ("50000 100000\n", 1),
        ("max 100000\n", MANY),
        ("max\n", MANY),
        ("6400000 100000", MANY),
        ("9900000 100000", MANY),
        ("rubbish\n", MANY),
        ("", MANY),
        ("x y z\n", MANY),
        ("200000 0\n", MANY),
        ("-1 100000\n", MANY),
    ],
)
def test_cgroup_v2(tmp_path: Path, text: str, cores: int) -> None:
    assert usable_cores(cgroup(tmp_path, cpu_dot_max=text)) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [
        ("300000", "100000", 3),
        ("250000", "100000", 3),
        ("10000", "100000", 1),
        ("-1", "100000", MANY),
        ("0", "100000", MANY),
        ("100000", "0", MANY),
        ("rubbish", "100000", MANY),
        ("", "", MANY),
    ],
)
def test_cgroup_v1(tmp_path: Path, quota: str, period: str, cores: int) -> None:
    folder = cgroup(tmp_path, cpu__cpu_dot_cfs_quota_us=quota, cpu__cpu_dot_cfs_period_us=period)
    assert usable_cores(folder) == cores


def test_v2_is_asked_before_v1(tmp_path: Path) -> None:
    folder = cgroup(
        tmp_path,
        cpu_dot_max="100000 100000",
        cpu__cpu_dot_cfs_quota_us="500000",
        cpu__cpu_dot_cfs_period_us="100000",
    )
    assert usable_cores(folder) == 1


def test_without_a_cgroup_affinity_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(tmp_path / "missing") == MANY
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert usable_cores(tmp_path / "missing") == 2


def test_a_file_that_may_not_be_read_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").mkdir()  # reading it is an OSError
    assert usable_cores(tmp_path) == MANY


def test_without_affinity_the_count_of_cores_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


def test_a_frozen_application_cannot_start_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_start_python()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_start_python()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "")
    assert not can_start_python()
