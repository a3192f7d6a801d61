"""Runs the scenarios of ``support.ray_scenarios`` in a program of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.paths import TESTS

Findings = Callable[[str], dict[str, Any]]


def run_scenarios(folder: Path, limit_s: float, *names: str) -> Findings:
    """Run scenarios, and return a function from a scenario to what it found.

    Args:
        limit_s: Reached only by a hang. The scenarios that have ended by then count.
        names: None: all that belong to the leg.
    """
    command = [sys.executable, "-m", "support.ray_scenarios", *names]
    environ = {**os.environ, "PENSTOCK_TEST_CLUSTER": uuid.uuid4().hex}
    environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    output = folder / "output.txt"
    with output.open("w") as file:
        program = subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT)
        try:
            program.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            program.kill()
            program.wait()
    text = output.read_text("utf-8", "replace")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"scenario"')]
    by_name = {line["scenario"]: line for line in lines}

    def found(name: str) -> dict[str, Any]:
        assert name in by_name, f"the program ended with {program.returncode}: {text[-4000:]}"
        assert "failure" not in by_name[name], by_name[name]["failure"]
        return by_name[name]

    return found
