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


REASONS = {
    "system": "needs Linux on x86-64 or arm64",
    "root": "needs root, to build and enter build/windows",
    "mirror": "apt has no Debian mirror",
    "namespaces": "namespaces and mounts are not permitted here",
    "network": "the Debian mirror or the package index does not answer",
}


def run_without(missing: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in an almost empty folder, on a machine that lacks something."""
    (folder / "tools").mkdir(exist_ok=True)
    answers = {
        "id": "echo 1000" if missing == "root" else "echo 0",
        "uname": "echo Darwin"
        if missing == "system"
        else "[ $1 = -s ] && echo Linux || echo x86_64",
        "apt-get": "" if missing == "mirror" else "echo 'Debian|Debian|main|somewhere'",
        "unshare": f"exit {int(missing == 'namespaces')}",
        "tools/windows_tree.sh": f"exit {75 if missing == 'network' else 3}",
    }
    for name, line in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    if not (folder / "requirements").exists():
        (folder / "requirements").symlink_to(REPO / "requirements")
    environ = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SKIP_NOTE": str(folder / "note"),
    }
    return subprocess.run(
        [str(LEG), *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script")
@pytest.mark.parametrize("command", ["test", "build"])
@pytest.mark.parametrize("missing", REASONS)
def test_where_it_cannot_run_it_is_skipped_in_one_line(
    missing: str, command: str, tmp_path: Path
) -> None:
    ended = run_without(missing, tmp_path, command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"windows: skipped ({REASONS[missing]})\n"
    assert (tmp_path / "note").read_text() == f"{REASONS[missing]}\n"
    assert not (tmp_path / "build" / "windows" / "ready").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script")
def test_control_a_build_that_fails_for_another_reason_is_a_failure(tmp_path: Path) -> None:
    assert run_without("nothing", tmp_path, "test").returncode == 3
    assert not (tmp_path / "note").exists()
    wrong = run_without("nothing", tmp_path, "no-such-command")
    assert (wrong.returncode, wrong.stdout) == (2, "")


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
