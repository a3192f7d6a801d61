"""``python -m penstock`` and ``penstock``, alone, as programs."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.legacy

MAX_S = 1.0
NUM_TRIES = 5  # a busy machine is slow now and then; a program that imports torch always is
ALONE = "import sys; from penstock.cli import main; sys.argv = ['penstock']; main()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_overview_comes_within_a_second_and_without_torch() -> None:
    for _ in range(NUM_TRIES):
        start_s = time.perf_counter()
        result = run("-X", "importtime", "-m", "penstock")
        took_s = time.perf_counter() - start_s
        if took_s < MAX_S:
            break
    assert result.returncode == 0, result.stderr
    assert "requested  8 -> safe" in result.stdout
    assert "\x1b" not in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "penstock.cli.overview" in imported
    assert not {"torch", "numpy"} & imported
    assert took_s < MAX_S


def test_the_command_alone_shows_its_help() -> None:
    result = run("-c", ALONE)
    told = result.stdout + result.stderr
    assert "Usage: penstock" in told
    assert "requested" not in told


def test_with_arguments_the_module_is_the_command() -> None:
    assert run("-m", "penstock", "--version").stdout.startswith("penstock ")
