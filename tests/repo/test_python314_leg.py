"""``make test-python314`` says in one line why it cannot run, and its versions are core's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO

LEG = REPO / "tools" / "python314_leg.sh"
LINE = re.compile(r"^([a-z0-9-]+)==([\w.]+)", re.MULTILINE)


def run_without(folder: Path, missing: str) -> subprocess.CompletedProcess[str]:
    """Run the script in an almost empty folder, as a user or on a system that cannot build it."""
    (folder / "tools").mkdir(exist_ok=True)
    answers = {
        "id": "echo 1000" if missing == "root" else "echo 0",
        "uname": "echo Darwin" if missing == "Linux" else "echo Linux",
        "tools/find_python.sh": "",
        "tools/windows_leg.sh": "" if missing == "mirror" else "echo somewhere",
    }
    for name, line in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    for name in ("pyproject.toml", "requirements", "constraints"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPO / name)
    note = folder / "note"
    environ = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SKIP_NOTE": str(note),
    }
    return subprocess.run(
        [str(LEG), "test"], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script")
@pytest.mark.parametrize("missing", ["root", "Linux", "mirror"])
def test_where_it_cannot_run_it_is_skipped_in_one_line(tmp_path: Path, missing: str) -> None:
    ended = run_without(tmp_path, missing)
    assert (ended.returncode, ended.stderr) == (0, "")
    found = re.fullmatch(r"python314: skipped \((needs Python 3.14, or [^\n]+)\)\n", ended.stdout)
    assert found is not None
    assert missing in found[1]
    assert (tmp_path / "note").read_text() == f"{found[1]}\n"
    assert not (tmp_path / "build").exists()


def test_its_versions_are_those_of_the_core_leg_and_torch_is_free() -> None:
    ours = dict(LINE.findall((REPO / "constraints" / "python314.txt").read_text("utf-8")))
    core = set(LINE.findall((REPO / "constraints" / "core.txt").read_text("utf-8")))
    assert set(ours.items()) <= core
    assert "torch" not in ours
    assert "torch" in dict(core)  # control


def test_every_file_of_the_selection_exists() -> None:
    named = re.search(r'SELECTION="([^"]+)"', LEG.read_text("utf-8"))
    assert named is not None
    for name in named[1].split():
        assert (REPO / name).exists(), name
