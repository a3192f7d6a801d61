"""``python -m penstock`` and ``penstock`` as programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.legacy

MAX_MODULES = 600  # torch alone adds 1,100
ALONE = "import sys; from penstock.cli import main; sys.argv = ['penstock']; main()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_the_overview_imports_little_and_no_torch() -> None:
    result = run("-X", "importtime", "-m", "penstock")
    assert result.returncode == 0, result.stderr
    assert "requested  8 -> safe" in result.stdout
    assert "\x1b" not in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "penstock.cli.overview" in imported
    assert not {"torch", "numpy"} & imported
    assert len(imported) < MAX_MODULES


def test_the_command_alone_shows_its_help() -> None:
    result = run("-c", ALONE)
    told = result.stdout + result.stderr
    assert "Usage: penstock" in told
    assert "requested" not in told


def test_with_arguments_the_module_is_the_command() -> None:
    assert run("-m", "penstock", "--version").stdout.startswith("penstock ")
