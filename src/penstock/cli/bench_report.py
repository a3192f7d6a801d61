"""Output of ``penstock bench``: a table, JSON, and an HTML page with plots.

Tested by ``tests/integration/cli/test_bench.py``.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.bench_measurement import BenchResult, WorkersRate
from penstock.planning.quantities import count

_SCOPE = (
    "This is the fastest of these settings for endless epochs without a training step. The plan of "
    'num_workers="auto" also counts your step, the length of an epoch and the start of workers.'
)


def print_result(console: Console, result: BenchResult) -> None:
    """Print the table and the recommended line of code."""
    for stage in result.stages:
        line = f"{stage.name}: {stage.sample_ms:.3g} ms per sample. {stage.note}".rstrip()
        console.print(line, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("workers", "samples/s", "noise", "predicted", "of the ceiling"):
        table.add_column(column, justify="right")
    chosen = result.recommended
    for run in result.runs:
        predicted = "" if run.predicted is None else f"{run.predicted:,.0f}"
        share = run.rate / result.ceiling if result.ceiling else 0.0
        noise = "" if run.noise is None else f"±{run.noise:.0%}"
        style = "bold green" if run is chosen else ""
        row = (str(run.workers), f"{run.rate:,.0f}", noise, predicted, f"{share:.0%}")
        table.add_row(*row, style=style)
    console.print(table)
    if result.warning:
        console.print(f"Note: {result.warning}", markup=False, highlight=False)
    at_most = f"Ceiling, with samples in memory and {count(chosen.workers, 'worker')}: "
    console.print(f"{at_most}{result.ceiling:,.0f} samples/s", highlight=False)
    console.print(f"Recommended: {result.line}", markup=False, highlight=False)
    console.print(_SCOPE, markup=False, highlight=False)


def dump(result: BenchResult, machine: dict[str, Any]) -> str:
    """Return the result as JSON."""
    content = {
        "name": result.name,
        "batch_size": result.batch_size,
        "machine": machine,
        "stages": [asdict(stage) for stage in result.stages],
        "ceiling": result.ceiling,
        "trials": [asdict(run) for run in result.runs],
        "recommended": result.line,
        "warning": result.warning,
    }
    return json.dumps(content, indent=2) + "\n"


def make_page(result: BenchResult, machine: dict[str, Any]) -> str:
    """Return a self-contained HTML page with the plot, the stages, and the best run's timeline."""
    from penstock.trace import html as render_html

    facts = ", ".join(f"{key} {value}" for key, value in machine.items())
    timeline = "" if result.timeline is None else render_html.frame(result.timeline.to_html())
    warning = f"<p>{html.escape(result.warning)}</p>" if result.warning else ""
    stages = "".join(
        f"<li>{html.escape(stage.name)}: {stage.sample_ms:.3g} ms per sample. "
        f"{html.escape(stage.note)}</li>"
        for stage in result.stages
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Penstock bench</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}}
text{{font:12px system-ui,sans-serif;fill:currentColor}}code{{font-size:14px}}</style>
<h1>{html.escape(result.name)}</h1>
<p>{html.escape(facts)}. Batch size {result.batch_size}.</p>
<p>Recommended: <code>{html.escape(result.line)}</code></p>
{warning}<ul>{stages}</ul>
{_plot(result.runs, result.ceiling)}
<h2>The recommended run</h2>
{timeline}
</html>
"""


def _plot(runs: list[WorkersRate], ceiling: float) -> str:
    """Return an SVG plot of rates: measured bars, predicted marks, and the ceiling."""
    most = max([ceiling, *(run.rate for run in runs), 1e-9])
    wide, high, left = 90 * len(runs) + 60, 260, 50
    parts = []
    for place, run in enumerate(runs):
        x, top = left + 90 * place, 220 * (1 - run.rate / most) + 20
        parts.append(
            f'<rect x="{x}" y="{top:.0f}" width="50" height="{240 - top:.0f}" fill="#3b82f6"/>'
            f'<text x="{x + 25}" y="{top - 5:.0f}" text-anchor="middle">{run.rate:,.0f}</text>'
            f'<text x="{x + 25}" y="256" text-anchor="middle">{run.workers} workers</text>'
        )
        if run.predicted is not None:
            mark = 220 * (1 - min(run.predicted, most) / most) + 20
            parts.append(f'<path d="M{x - 6} {mark:.0f}h62" stroke="#f59e0b" stroke-width="3"/>')
    level = 220 * (1 - ceiling / most) + 20
    parts.append(
        f'<path d="M{left - 20} {level:.0f}H{wide}" stroke="#22c55e" stroke-dasharray="6 4"/>'
        f'<text x="{left - 20}" y="{level - 5:.0f}">ceiling {ceiling:,.0f} samples/s</text>'
    )
    title = "<title>Samples per second by number of workers (orange: predicted)</title>"
    return (
        f'<svg viewBox="0 0 {wide} {high}" width="{wide}" role="img">{title}{"".join(parts)}</svg>'
    )
