"""Command-line front end of the benchmarks: options, turns, tables, targets, result files."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from measure import Case, Pace, Row, run_case
from penstock.cli.loader_timing import Summary
from penstock.machine.collect import machine as facts
from record import describe_machine, describe_versions, save, today

QUICK = Pace(warm_up_s=0.1, window_s=0.3, num_images_in_memory=4_000)


Cases = Mapping[str, Callable[[Pace], Case]]


def run(name: str, question: str, cases: Cases, arguments: Sequence[str]) -> int:
    """Measure, print, and save. Returns the exit status.

    Args:
        name: File name of the benchmark without its extension. Result files start with it.
        question: Description shown by ``--help``.
        cases: The cases, by the letter for ``--only``.
    """
    options = _parse(name, question, cases, arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    machine, versions = describe_machine(), describe_versions()
    _print_heading(console, machine, versions)
    pace = QUICK if options.quick else Pace()
    if options.window:
        pace = replace(pace, window_s=options.window)
    repeats = options.repeats or (2 if options.quick else 5)
    command = shlex.join(["python", f"benchmarks/{name}.py", *arguments])
    content = {"benchmark": name, "date": today(), "command": command}
    content |= {"machine": machine, "versions": versions}
    records, num_missed = [], 0
    for key in options.only:
        case = cases[key](pace)
        with console.status("") as status:
            rows = run_case(case, repeats, lambda name: status.update(f"({key}) {name}"))  # noqa: B023
        _print_case(console, case, rows)
        num_missed += sum(row.is_missed for row in rows)
        records.append(_as_record(case, rows))
        if options.save:  # after each case, so that an interrupted run keeps its results
            path = save(options.save, {**content, "cases": records})
    console.print(f"Targets missed: {num_missed}")
    if options.save:
        console.print(f"Saved as benchmarks/results/{path.name}")
    return 1 if options.check and num_missed else 0


def _parse(name: str, question: str, cases: Cases, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=question)
    parser.add_argument(
        "--only",
        type=partial(_keys, cases),
        default=[*cases],
        metavar=",".join(cases),
        help="cases to run",
    )
    parser.add_argument("--repeats", type=_count, help="turns of each contender (default 5)")
    parser.add_argument("--window", type=float, metavar="S", help="measuring time (default 1.5 s)")
    parser.add_argument("--quick", action="store_true", help="smoke test: 2 short turns")
    parser.add_argument(
        "--save", type=_name, metavar="NAME", help=f"write results/{name}-NAME.json"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args(arguments)


def _keys(cases: Cases, text: str) -> list[str]:
    keys = [key.strip() for key in text.split(",")]
    unknown = [key for key in keys if key not in cases]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(cases)}")
    return keys


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid name; use a name such as my-laptop"
        )
    return text


def _as_record(case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "case": case.key,
        "title": case.title,
        "unit": case.unit,
        "rows": [row.as_record() for row in rows],
    }


def _print_heading(console: Console, machine: dict[str, Any], versions: dict[str, str]) -> None:
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} usable cores, {machine['memory_gib']} GiB, "
        f"{machine['os']}"
    )
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()))
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > facts().usable_cores / 2:
        console.print(f"Other programs are running (load {os.getloadavg()[0]:.1f}): expect noise.")


def _print_case(console: Console, case: Case, rows: Sequence[Row]) -> None:
    table = Table(title=f"({case.key}) {case.title}", title_justify="left")
    table.add_column("")
    for heading in (case.unit, "spread", "ratio", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("target")
    for row in rows:
        median, spread = _format(row.summary)
        ratio, ratio_spread = _format(row.ratio) if row.ratio else ("", "")
        table.add_row(row.name, median, spread, ratio and f"{ratio}x", ratio_spread, _verdict(row))
    console.print()
    console.print(table)
    for against in sorted({row.against for row in rows if row.against}):
        names = [row.name for row in rows if row.against == against]
        console.print(f"  ratio against {against}: {'; '.join(names)}")


def _format(summary: Summary) -> tuple[str, str]:
    digits = 0 if summary.median >= 100 else 2 if summary.median >= 0.1 else 3
    low, median, high = (
        f"{value:,.{digits}f}" for value in (summary.low, summary.median, summary.high)
    )
    return median, f"{low}..{high}"


def _verdict(row: Row) -> str:
    return row.target.verdict(row.ratio.median) if row.target and row.ratio else ""
