"""The test runner: a flaky test fails the run unless it is quarantined with a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO

FLAKY = """
from pathlib import Path

def test_flaky():
    marker = Path("has_run")
    is_first = not marker.exists()
    marker.touch()
    assert not is_first

def test_steady():
    pass
"""
NAME = "tests/test_it.py::test_flaky"


def run(
    folder: Path, *, quarantine: str = "", tests: str = FLAKY
) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(tests)
    (folder / "tests" / "quarantine.txt").write_text(quarantine)
    command = [sys.executable, str(REPO / "tools" / "run_pytest.py"), "cache", "-q", "tests"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_test_that_passes_when_repeated_fails_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 1, ended.stdout
    assert f"== FLAKY: {NAME}" in ended.stdout


def test_a_quarantined_test_is_reported_and_does_not_fail_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path, quarantine=f"# comment\n{NAME}  # the clock is coarse\n")
    assert ended.returncode == 0, ended.stdout
    assert f"== FLAKY, quarantined (the clock is coarse): {NAME}" in ended.stdout


@pytest.mark.parametrize("quarantine", [f"{NAME}  # never fixed\n", ""])
def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path, quarantine: str) -> None:
    ended = run(tmp_path, quarantine=quarantine, tests="def test_flaky():\n    assert False\n")
    assert ended.returncode == 1


def test_a_run_without_failures_is_not_repeated(tmp_path: Path) -> None:
    ended = run(tmp_path, tests="def test_flaky():\n    pass\n")
    assert ended.returncode == 0
    assert "Once more" not in ended.stdout


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, quarantine=f"{NAME}\n")
    assert ended.returncode == 1
    assert "has no reason" in ended.stderr
