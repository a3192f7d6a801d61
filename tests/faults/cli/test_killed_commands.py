"""A killed command leaves no child process and no temporary folder behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.fault

SLOW = """
import time

class Slow:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        open("began", "w").close()
        time.sleep(600)

dataset = Slow()

def make_loader(num_workers=0):
    import penstock
    return penstock.DataLoader(Slow(), num_workers=0)
"""


@pytest.mark.parametrize(
    ("command", "target", "number"),
    [
        ("verify", "make_loader", signal.SIGTERM),
        ("doctor", "dataset", signal.SIGKILL),
    ],
)
def test_a_killed_command_leaves_neither_process_nor_folder(
    command: str, target: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", command, f"slow.py:{target}"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60.0
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=240)
    assert alive == []
    assert list((tmp_path / "temporary").glob("penstock-*")) == []


def test_a_class_of_samples_is_no_loader_for_verify(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    found = subprocess.run(
        [sys.executable, "-m", "penstock", "verify", "slow.py:Slow"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode != 0
    assert "Slow is a dataset, but verify needs a loader" in found.stdout + found.stderr
