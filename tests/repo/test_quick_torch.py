"""The import hook for test programs (tests/support/site) changes collections of torch only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, importlib.util, sys, weakref
assert importlib.util.find_spec("torch") is not None  # as libraries do before they import it
assert "torch" not in sys.modules
class Own:
    pass
import torch
print("frozen", gc.get_freeze_count() > 50_000, "enabled", gc.isenabled())
one = Own()
one.itself, reference = one, weakref.ref(one)
del one
gc.collect()
print("collected", reference() is None)
print("loader", "exec_module" in vars(torch.__spec__.loader))
"""


def said(folder: Path, *options: str) -> str:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, *options, str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.legacy
def test_objects_of_torch_are_frozen_and_those_of_the_program_are_collected(tmp_path: Path) -> None:
    expected = "frozen True enabled True\ncollected True\nloader False\n"
    assert said(tmp_path) == expected
    assert said(tmp_path, "-E") == expected.replace("frozen True", "frozen False")  # control
