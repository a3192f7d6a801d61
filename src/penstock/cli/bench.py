"""``penstock bench``: measures how fast a dataset loads with different numbers of workers.

bench_dataset      opens the dataset: SCRIPT:NAME, a folder of images, or generated images
bench_measurement  times each stage, then each number of workers
bench_report       prints a table, and writes JSON or an HTML page with plots
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
from penstock.errors import BadArgument, BadTarget
from penstock.machine.collect import machine

MAX_WORKERS = 1024
"""Higher numbers are treated as a typo."""


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_argument(
        "target",
        nargs="?",
        metavar="[SCRIPT:NAME | FOLDER]",
        help="A dataset or loader, or a folder of images. By default, images are generated.",
    )
    parser.add_script_arguments()
    parser.add_value(
        "--batch-size", "N", number(int, 1), "Batch size. By default, the loader's, or 32."
    )
    parser.add_value(
        "--workers",
        "N,N,...",
        worker_counts,
        "Numbers of workers to try. By default, up to twice the number of cores.",
    )
    parser.add_value(
        "--seconds", "S", number(float, 0.1, 600), "Seconds to measure each setting.", default=2.0
    )
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="FILE",
        help="Write a .json or .html file. Can be repeated.",
    )


def execute(options: argparse.Namespace) -> None:
    """Measure the dataset, print the results, and write the files."""
    _check(options)
    console, here = Console(), machine()
    workers = options.workers or default_workers(here.usable_cores)
    columns = (BarColumn(), TextColumn("{task.description}"))
    with (
        open_dataset(options.target, options.arguments) as source,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(workers) + 2)
        try:
            result = measure(
                source,
                batch_size=options.batch_size or source.batch_size,
                workers=workers,
                seconds=options.seconds,
                tell=lambda step: progress.update(task, description=step, advance=1),
            )
        except SystemExit as ended:
            raise BadTarget(
                f"a sample ended the program with exit code {ended.code}",
                remedy=f"penstock doctor {source.name}, which names the sample",
            ) from None
    bench_report.print_result(console, result)
    facts: dict[str, Any] = {"cpu": here.cpu_model, "cores": here.usable_cores, "os": here.os}
    for path in options.out:
        make_text = bench_report.make_page if path.endswith(".html") else bench_report.dump
        Path(path).write_text(make_text(result, facts), encoding="utf-8")
        console.print(f"Wrote {path}", markup=False, highlight=False)


def _check(options: argparse.Namespace) -> None:
    """Reject invalid options before the measurements, which take minutes."""
    for path in options.out:
        if not path.endswith((".json", ".html")):
            raise BadArgument(
                f"--out {path} must end in .json or .html", remedy="penstock bench --out b.html"
            )
        folder = Path(path).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path).is_dir():
            why = "cannot be written" if folder.is_dir() else f"folder {folder} does not exist"
            raise BadArgument(f"--out {path}: {why}", remedy="penstock bench --out b.html")
    most = max(options.workers or (0,))
    if most > MAX_WORKERS:
        raise BadArgument(
            f"--workers {most} must be at most {MAX_WORKERS}",
            remedy="penstock bench --workers 0,1,2,4",
        )


def default_workers(cores: int) -> tuple[int, ...]:
    """Return the numbers of workers to try: powers of two up to the cores, and twice the cores.

    More workers than cores help datasets that wait for I/O.

    Example:
        >>> default_workers(6)
        (0, 1, 2, 4, 6, 12)
    """
    powers = {1 << place for place in range(1, cores.bit_length()) if 1 << place < cores}
    return tuple(sorted({0, 1, cores, 2 * cores, *powers}))
