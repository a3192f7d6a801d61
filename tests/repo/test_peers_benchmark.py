"""benchmarks/peers.py runs with two contenders and tiny sizes in this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import REPO


def run_peers(home: Path, *options: str) -> list[str]:
    """Run the benchmark of numbers, and return the tables that it prints."""
    options = ("--here", "--quick", "--only", "numbers", "--rows", "PyTorch;Penstock", *options)
    ended = subprocess.run(
        [sys.executable, str(REPO / "benchmarks" / "peers.py"), *options, "--home", str(home)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPO / "src")},
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\n\n")[1:]


@pytest.mark.slow
def test_two_loaders_take_turns_and_a_peer_that_is_not_installed_has_a_row(tmp_path: Path) -> None:
    tables = run_peers(tmp_path, "--contenders", "torch,penstock,ffcv")
    assert len(tables) == 5  # transport, tiny samples, first and later batches, memory
    for table in tables:
        rows = {line[2:42].strip(): line[43:] for line in table.splitlines()[1:]}
        assert {"PyTorch", "Penstock", "FFCV"} <= set(rows)
        assert "No module named 'ffcv'" in rows["FFCV"]
        assert all(" to " in rows[name] for name in ("PyTorch", "Penstock")), table


@pytest.mark.slow
def test_one_process_for_all_turns_gives_rates_only(tmp_path: Path) -> None:
    tables = run_peers(tmp_path, "--keep", "--contenders", "torch,penstock")
    assert len(tables) == 2  # transport and tiny samples, without first batches and memory
    for table in tables:
        rows = {line[2:42].strip(): line[43:] for line in table.splitlines()[1:]}
        assert all(" to " in rows[name] for name in ("PyTorch", "Penstock")), table
