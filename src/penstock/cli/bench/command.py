"""``penstock bench``, from what was typed to what is printed and written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from penstock.cli.bench import report
from penstock.cli.bench.measuring import Findings, measure
from penstock.cli.bench.subject import Subject, open_subject
from penstock.errors import BadArgument
from penstock.machine.collect import machine

MAX_WORKERS = 1024
"""Beyond this, a slip of the finger."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the person asked for.

    Args:
        workers: Numbers to try; empty: powers of two up to the cores, and beyond for those that
            wait.
        out: A file for the findings: ``.json`` or ``.html``.
    """

    target: str | None = None
    arguments: tuple[str, ...] = ()
    batch_size: int | None = None
    workers: tuple[int, ...] = ()
    seconds: float = 2.0
    out: tuple[str, ...] = ()


def run_bench(options: BenchOptions) -> None:
    """Measure, print, write."""
    _check(options)
    console = Console()
    here = machine()
    facts: dict[str, Any] = {"cpu": here.cpu_model, "cores": here.usable_cores, "os": here.os}
    with open_subject(options.target, options.arguments) as subject:
        findings = _measure_shown(console, subject, options, here.usable_cores)
    report.print_findings(console, findings)
    for path in options.out:
        text = (
            report.make_page(findings, facts)
            if path.endswith(".html")
            else report.dump(findings, facts)
        )
        Path(path).write_text(text, encoding="utf-8")
        console.print(f"Written: {path}", markup=False, highlight=False)


def _check(options: BenchOptions) -> None:
    """What would fail after minutes of measuring is refused now."""
    for path in options.out:
        if not path.endswith((".json", ".html")):
            raise BadArgument(f"--out {path}: .json or .html", remedy="penstock bench --out b.html")
        folder = Path(path).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path).is_dir():
            why = "cannot be written" if folder.is_dir() else f"there is no folder {folder}"
            raise BadArgument(f"--out {path}: {why}", remedy="penstock bench --out b.html")
    if max(options.workers, default=0) > MAX_WORKERS:
        raise BadArgument(
            f"--workers {max(options.workers)}: {MAX_WORKERS} at most",
            remedy="penstock bench --workers 0,1,2,4",
        )


def _measure_shown(
    console: Console, subject: Subject, options: BenchOptions, cores: int
) -> Findings:
    workers = options.workers or default_workers(cores)
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(workers) + 2)

        def tell(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return measure(
            subject,
            batch_size=options.batch_size or subject.batch_size,
            workers=workers,
            seconds=options.seconds,
            tell=tell,
        )


def default_workers(cores: int) -> tuple[int, ...]:
    """Numbers of workers to try.

    Example:
        >>> default_workers(6)
        (0, 1, 2, 4, 6, 12)
    """
    found = {0, 1, cores, 2 * cores}
    count = 2
    while count < cores:
        found.add(count)
        count *= 2
    return tuple(sorted(found))
