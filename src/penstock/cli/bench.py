"""``penstock bench``: measures how fast a dataset loads here, and with which settings.

bench_dataset      what is loaded: SCRIPT:NAME, a folder of images, or images made here
bench_measurement  times each stage, then each number of workers
bench_report       a table, JSON, and a page with plots
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from penstock.cli import bench_report
from penstock.cli.bench_dataset import open_dataset
from penstock.cli.bench_measurement import measure
from penstock.cli.parser import CommandParser, number, worker_counts
from penstock.errors import BadArgument
from penstock.machine.collect import machine

MAX_WORKERS = 1024
"""Beyond this, a slip of the finger."""


def add_arguments(parser: CommandParser) -> None:
    """Called from: :mod:`penstock.cli.parser`."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="[SCRIPT:NAME | FOLDER]",
        help="A dataset or loader, or a folder of pictures; without: pictures made here.",
    )
    parser.add_script_arguments()
    parser.add_value(
        "--batch-size", "N", number(int, 1), "Samples in a batch; the loader's, or 32."
    )
    parser.add_value(
        "--workers",
        "N,N,...",
        worker_counts,
        "Numbers of workers to try; by default, up to twice the cores.",
    )
    parser.add_value(
        "--seconds", "S", number(float, 0.1, 600), "How long to measure each setting.", default=2.0
    )
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="Write a .json or .html file; can be given several times.",
    )


def execute(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    _check(options)
    console, here = Console(), machine()
    workers = options.workers or default_workers(here.usable_cores)
    columns = (BarColumn(), TextColumn("{task.description}"))
    with (
        open_dataset(options.target, options.arguments) as source,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(workers) + 2)
        result = measure(
            source,
            batch_size=options.batch_size or source.batch_size,
            workers=workers,
            seconds=options.seconds,
            tell=lambda step: progress.update(task, description=step, advance=1),
        )
    bench_report.print_result(console, result)
    facts: dict[str, Any] = {"cpu": here.cpu_model, "cores": here.usable_cores, "os": here.os}
    for path in options.out:
        make_text = bench_report.make_page if path.endswith(".html") else bench_report.dump
        Path(path).write_text(make_text(result, facts), encoding="utf-8")
        console.print(f"Written: {path}", markup=False, highlight=False)


def _check(options: argparse.Namespace) -> None:
    """Refuse now what would fail after minutes of measuring."""
    for path in options.out:
        if not path.endswith((".json", ".html")):
            raise BadArgument(f"--out {path}: .json or .html", remedy="penstock bench --out b.html")
        folder = Path(path).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path).is_dir():
            why = "cannot be written" if folder.is_dir() else f"there is no folder {folder}"
            raise BadArgument(f"--out {path}: {why}", remedy="penstock bench --out b.html")
    most = max(options.workers or (0,))
    if most > MAX_WORKERS:
        raise BadArgument(
            f"--workers {most}: {MAX_WORKERS} at most", remedy="penstock bench --workers 0,1,2,4"
        )


def default_workers(cores: int) -> tuple[int, ...]:
    """Numbers of workers to try: powers of two up to the cores, and beyond for those that wait.

    Example:
        >>> default_workers(6)
        (0, 1, 2, 4, 6, 12)
    """
    powers = {1 << place for place in range(1, cores.bit_length()) if 1 << place < cores}
    return tuple(sorted({0, 1, cores, 2 * cores, *powers}))
