"""Measures the memory of a dataset with four workers. See benchmarks/README.md.

python benchmarks/memory.py --only strings --repeats 1 --save my-laptop
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from measure import Target
from memory_case import CONTENDERS, NUM_WORKERS
from penstock.cli.loader_timing import Summary
from record import describe_machine, describe_versions, save, today

CASE = Path(__file__).parent / "memory_case.py"
MAX_FIRST_BATCH_S = 3.0
LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Question:
    """One kind of data, with its contenders."""

    title: str
    length: int
    contenders: tuple[str, ...]
    target: Target


QUESTIONS = {
    "strings": Question(
        title="5 million strings of 35 characters",
        length=5_000_000,
        contenders=(
            *("torch-fork", "torch-spawn", "torch-spawn-shared-list", "penstock-fork-server"),
            *("penstock-spawn", "penstock-fork-server-plain-list"),
        ),
        target=Target(bound=1.2, is_ceiling=True),
    ),
    "array": Question(
        title="an array of 1 GiB",
        length=262_144,
        contenders=(
            *("torch-fork", "torch-spawn", "penstock-fork-server", "penstock-spawn"),
            "penstock-fork-server-one-copy",
        ),
        target=Target(bound=2.1, is_ceiling=True),
    ),
}
BOUND = ("penstock-fork-server", "penstock-spawn")
"""Contenders with a target. The others are for comparison."""


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and save. Returns the exit status."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    records, num_missed = [], 0
    for key in options.only:
        question = QUESTIONS[key]
        length = question.length // (50 if options.quick else 1)
        rows = []
        for name in question.contenders:
            with console.status(f"({key}) {name}"):
                rows.append(_measure(key, name, length, options.repeats, question.target))
        _print(console, question, rows)
        num_missed += sum(row["is_met"] is False for row in rows)
        records.append({"case": key, "title": question.title, "length": length, "rows": rows})
    console.print(f"Targets missed: {num_missed}")
    if options.save:
        content = {
            "benchmark": "memory",
            "date": today(),
            "command": shlex.join(["python", "benchmarks/memory.py", *arguments]),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "cases": records,
        }
        console.print(f"Saved as benchmarks/results/{save(options.save, content).name}")
    return 1 if options.check and num_missed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/memory.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[*QUESTIONS], metavar="strings,array"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each contender (default 1)")
    parser.add_argument("--quick", action="store_true", help="smoke test: a fiftieth of the data")
    parser.add_argument("--save", metavar="NAME", help="write results/memory-NAME.json")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    options = parser.parse_args(arguments)
    unknown = [key for key in options.only if key not in QUESTIONS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(QUESTIONS)}")
    return options


def _measure(key: str, name: str, length: int, repeats: int, target: Target) -> dict[str, Any]:
    """Return a row: the memory of the data in copies, and the time to the first batch."""
    samples = []
    for _ in range(repeats):
        empty, full = (_run(key, name, length, content) for content in ("empty", "full"))
        multiple = (full["pss_bytes"] - empty["pss_bytes"]) / full["one_copy_bytes"]
        samples.append({"multiple": multiple, "full": full, "empty": empty})
    multiple = Summary.of([sample["multiple"] for sample in samples]).median
    first_s = Summary.of([sample["full"]["first_batch_s"] for sample in samples]).median
    is_met = None
    if name in BOUND:
        is_met = target.is_met(multiple) and first_s < MAX_FIRST_BATCH_S
    return {
        "contender": name,
        "multiple": multiple,
        "first_batch_s": first_s,
        "samples": samples,
        "target": f"{target}, first batch under {MAX_FIRST_BATCH_S:g} s" if name in BOUND else None,
        "is_met": is_met,
    }


def _run(key: str, name: str, length: int, content: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", str(CASE), key, name, str(length), content]
    shown = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S
    ).stdout
    figures: dict[str, float] = json.loads(shown)
    return figures


def _print(console: Console, question: Question, rows: Sequence[dict[str, Any]]) -> None:
    one_copy = rows[-1]["samples"][0]["full"]["one_copy_bytes"]
    title = f"{question.title}, {NUM_WORKERS} workers; one flat copy is {one_copy / 1e6:,.0f} MB"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("memory, MB", "copies", "first batch, s", "for the data", "epoch, s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("target")
    for row in rows:
        full, empty = row["samples"][0]["full"], row["samples"][0]["empty"]
        verdict = {None: "", True: ": ok", False: ": missed"}[row["is_met"]]
        table.add_row(
            row["contender"],
            f"{(full['pss_bytes'] - empty['pss_bytes']) / 1e6:,.0f}",
            f"{row['multiple']:.2f}x",
            f"{row['first_batch_s']:.2f}",
            f"{full['first_batch_s'] - empty['first_batch_s']:+.2f}",
            f"{full['epoch_s']:.1f}",
            f"{row['target'] or ''}{verdict}",
        )
    console.print()
    console.print(table)


if __name__ == "__main__":
    assert all(name in CONTENDERS for each in QUESTIONS.values() for name in each.contenders)
    sys.exit(main(sys.argv[1:]))
