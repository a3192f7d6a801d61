"""Runs the commands of documents and compares them with what the documents say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import typed_commands


def type_documents(
    texts: list[str], folders: list[Path], limit_s: float = 240
) -> list[list[dict[str, Any]]]:
    """Run the commands of each document and return their outcomes."""
    jobs = [
        {"folder": str(folder), "steps": typed_commands.steps_of(text)}
        for text, folder in zip(texts, folders, strict=True)
    ]
    plan = folders[0] / "jobs.json"
    plan.write_text(json.dumps(jobs), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "default", typed_commands.__file__, str(plan)],
        env={**os.environ, "PYTHONHASHSEED": "0", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / "typed.json").read_text("utf-8")) for folder in folders]


def faults_of(typed: list[dict[str, Any]]) -> list[str]:
    """Describe the commands whose status or output differs from the document."""
    faults = []
    for one in typed:
        missing = [line for line in one["shown"] if line.strip() and line not in one["said"]]
        if one["status"] not in one["status_expected"] or (missing and one["is_last"]):
            faults.append(f"$ {one['command']}\n{one['said']}\nstatus {one['status']}: {missing}")
    return faults
