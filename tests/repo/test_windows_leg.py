"""``make test-windows`` says in one line why it cannot run, and installs pinned files only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO

LEG = REPO / "tools" / "windows_leg.sh"
REQUIREMENTS = sorted((REPO / "requirements").glob("windows*.txt"))


def run_as(user: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in an empty folder, with an ``id`` that names this user."""
    (folder / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (folder / "id").chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [str(LEG), *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script")
def test_without_root_it_is_skipped_in_one_line(tmp_path: Path) -> None:
    ended = run_as("1000", tmp_path, "test")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"windows: skipped \(needs [^\n]+\)\n", ended.stdout)
    assert not (tmp_path / "build").exists()
    control = run_as("1000", tmp_path, "no-such-command")
    assert (control.returncode, control.stdout) == (2, "")


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text("utf-8").splitlines() if line[:1].isalpha()]
    return dict(line.split(" ")[0].split("==") for line in lines)


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_file_of_the_leg_is_named_with_its_hash(path: Path) -> None:
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line), line


def test_its_versions_are_those_of_the_core_leg() -> None:
    core = (REPO / "constraints" / "core.txt").read_text("utf-8")
    for name, version in pins(REPO / "requirements" / "windows.txt").items():
        assert re.search(rf"^{name}=={re.escape(version)}( ;|$)", core, re.MULTILINE), name


CLEAN = 'mount -t tmpfs none build/mounted && make clean; echo "ended with $?"'


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="mounts need root")
def test_make_clean_refuses_a_tree_with_mounts(tmp_path: Path) -> None:
    shutil.copy(REPO / "Makefile", tmp_path)
    for name in ("build/mounted", "src", "tests", "benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CLEAN]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "ended with" not in ended.stdout or "mount:" in ended.stderr:
        pytest.skip(f"mounts are not permitted here: {ended.stderr}")
    assert "ended with 2" in ended.stdout
    assert "something is mounted under build" in ended.stderr
    assert (tmp_path / "build").exists()
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, check=True)
    assert not (tmp_path / "build").exists()  # control: without the mount it is removed
