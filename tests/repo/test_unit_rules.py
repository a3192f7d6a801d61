"""The process guard of tests/unit fails unit tests that start a process or sleep."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import TESTS


@pytest.mark.parametrize(
    ("line", "is_allowed"),
    [
        ("import subprocess; subprocess.run(['true'])", False),
        ("import os; os.fork()", False),
        ("import time; time.sleep(0.001)", False),
        ("import threading; threading.Event().wait(0.001)", True),
    ],
)
def test_a_unit_test_that_starts_a_process_or_sleeps_fails(
    tmp_path: Path, line: str, is_allowed: bool
) -> None:
    shutil.copy(TESTS / "unit" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {line}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) is is_allowed, ended.stdout
    assert ("move it to tests/integration" in ended.stdout) is not is_allowed
