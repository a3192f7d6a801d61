"""benchmarks/peers.py runs with two contenders and tiny sizes in this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO


@pytest.mark.slow
def test_two_loaders_take_turns_and_a_peer_that_is_not_installed_has_a_row(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    script = str(REPO / "benchmarks" / "peers.py")
    options = ["--here", "--quick", "--only", "numbers", "--contenders", "torch,penstock,ffcv"]
    ended = subprocess.run(
        [sys.executable, script, *options, "--rows", "PyTorch;Penstock", "--home", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    _, *tables = ended.stdout.split("\n\n")
    assert len(tables) == 5  # transport, tiny samples, first and later batches, memory
    for table in tables:
        rows = {line[2:42].strip(): line[43:] for line in table.splitlines()[1:]}
        assert {"PyTorch", "Penstock", "FFCV"} <= set(rows)
        assert "No module named 'ffcv'" in rows["FFCV"]
        assert all(" to " in rows[name] for name in ("PyTorch", "Penstock")), table


@pytest.mark.slow
def test_one_process_for_all_turns_gives_rates_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    script = str(REPO / "benchmarks" / "peers.py")
    options = ["--here", "--quick", "--keep", "--only", "numbers", "--contenders", "torch,penstock"]
    ended = subprocess.run(
        [sys.executable, script, *options, "--rows", "PyTorch;Penstock", "--home", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    _, *tables = ended.stdout.split("\n\n")
    assert len(tables) == 2  # transport and tiny samples, without first batches and memory
    for table in tables:
        rows = {line[2:42].strip(): line[43:] for line in table.splitlines()[1:]}
        assert all(" to " in rows[name] for name in ("PyTorch", "Penstock")), table
