"""Compares the outcome of an epoch of 125 batches after a fault in a worker.

python benchmarks/faults.py --save my-laptop

Every row is a fresh process with a time limit. A process that exceeds it counts as hung.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fault_case import CASES, NUM_BATCHES
from record import describe_machine, describe_versions, save, today

FAULT_CASE = Path(__file__).with_name("fault_case.py")
LIMIT_S = 30.0
TITLES = {
    "kill": "a worker is killed once",
    "kill, caught": "the same, and the loop catches the error and goes on",
    "kill, each time": "a sample kills every worker (on_error='skip')",
    "hang": "a sample hangs for an hour, once (sample_timeout_s=1)",
    "unpicklable": "an exception of a class that cannot be pickled, caught",
    "error": "a sample that cannot be read (on_error='skip')",
}


def run(name: str, case: str) -> dict[str, Any]:
    """Run one loader with one fault, in its own process."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:  # not a pipe, which a hung worker would keep open
        process = subprocess.Popen(
            [sys.executable, str(FAULT_CASE), name, case],
            stdout=said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            outcome: dict[str, Any] = {"ending": f"hangs (ended after {LIMIT_S:.0f} s)"}
        else:
            said.seek(0)
            outcome = json.loads(said.read().splitlines()[-1])
        finally:
            with suppress(ProcessLookupError):  # including its workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"loader": name, **outcome, "seconds": round(time.monotonic() - started, 1)}


def describe(outcome: dict[str, Any]) -> str:
    """Return an outcome in words."""
    if "batches" not in outcome:
        return str(outcome["ending"])
    missing = NUM_BATCHES - outcome["batches"]
    text = f"{outcome['batches']} of {NUM_BATCHES} batches"
    if outcome["ending"] == "error":
        return f"ends with an error after {text}"
    lost = f", {missing} lost" if missing else ""
    missing = outcome["samples_missing"]
    lost += f", {missing} sample{'s' if missing > 1 else ''} missing" if missing else ""
    return text + lost


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", metavar="NAME", help="write results/faults-NAME.json")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table("2 workers", "PyTorch", "Penstock", title="Outcome of an epoch with a fault")
    records = []
    for case in CASES:
        rows = [run(name, case) for name in ("torch", "penstock")]
        table.add_row(TITLES[case], *map(describe, rows))
        records.append({"case": case, "title": TITLES[case], "rows": rows})
    console.print(table)
    if options.save:
        command = " ".join(["python", "benchmarks/faults.py", *arguments])
        content = {"benchmark": "faults", "date": today(), "command": command}
        facts = {"machine": describe_machine(), "versions": describe_versions()}
        path = save(options.save, {**content, **facts, "cases": records})
        console.print(f"Saved as benchmarks/results/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
