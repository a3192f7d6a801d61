"""``penstock trace``: look at a trace, open it as a page, write it in another form, compare two."""

from __future__ import annotations

import json
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import BadArgument

app = typer.Typer(help="Look at traces, as DataLoader(trace=...) and run --trace write them.")

_File = Annotated[str, typer.Argument(metavar="TRACE", help="A .json or .json.gz of ours.")]
_Json = Annotated[bool, typer.Option("--json", help="For a program.")]


@app.command()
def show(
    file: _File,
    first: Annotated[float, typer.Option("--from", min=0.0, help="Seconds.")] = 0.0,
    last: Annotated[float | None, typer.Option("--to", help="Seconds.")] = None,
    width: Annotated[
        int | None, typer.Option(min=40, max=1000, help="Columns; the window's.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Draw it here, as wide as the window, with the verdict."""
    from rich.console import Console

    from penstock.trace.terminal import print_run, render
    from penstock.trace.timeline import Timeline

    timeline = Timeline.load(file)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(timeline), indent=2, default=str) + "\n")
        return
    console = Console(width=width)
    total_s = timeline.model.total_ns * 1e-9
    end_s = total_s if last is None else min(last, total_s)
    if total_s and not first < end_s:
        raise BadArgument(
            f"--from {first:g} --to {end_s:g}: the trace goes from 0 to {total_s:.4g} s",
            remedy=f"penstock trace show {file} --from 0 --to {total_s:.4g}",
        )
    drawing = render(timeline.model, console.width, first_s=first, last_s=end_s)
    print_run(console, drawing, timeline.say(), soft_wrap=True)


def _as_dict(timeline: object) -> dict[str, object]:
    from penstock.trace.timeline import Timeline

    assert isinstance(timeline, Timeline)
    account = {key: value for key, value in vars(timeline.account).items() if key != "slowest"}
    account["workers"] = [vars(worker) for worker in timeline.account.workers]
    return {
        "facts": timeline.facts,
        "verdict": vars(timeline.verdict),
        "account": {**account, "rate": timeline.account.rate},
        "notes": timeline.model.notes,
    }


@app.command("open")
def open_(file: _File) -> None:
    """Open it in the browser, as a page that needs no network."""
    from penstock.trace.timeline import Timeline

    timeline = Timeline.load(file)
    folder = Path(tempfile.mkdtemp(prefix="penstock-trace-"))
    page = folder / f"{Path(file).name.split('.')[0] or 'trace'}.html"
    timeline.save(page)
    typer.echo(str(page))
    if not webbrowser.open(page.as_uri()):
        typer.echo("No browser could be started: open that file in one.", err=True)


@app.command()
def export(
    file: _File,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help=".html, .perfetto.json.gz, .json or .json.gz")
    ],
) -> None:
    """Write it in another form."""
    from penstock.trace.timeline import Timeline

    timeline = Timeline.load(file)
    timeline.save(out)
    typer.echo(f"{out}: {Path(out).stat().st_size:,} bytes, {timeline.model.num_spans:,} spans")


@app.command()
def compare(
    one: Annotated[str, typer.Argument(metavar="BEFORE", help="A trace.")],
    other: Annotated[str, typer.Argument(metavar="AFTER", help="Another.")],
    as_json: _Json = False,
) -> None:
    """Set two runs side by side."""
    from rich.console import Console
    from rich.table import Table

    from penstock.trace.accounting import compare as compare_accounts
    from penstock.trace.timeline import Timeline

    before, after = Timeline.load(one), Timeline.load(other)
    lines = compare_accounts(before.account, after.account)
    if as_json:
        content = {line.what: [line.one, line.other] for line in lines}
        causes = [before.verdict.cause, after.verdict.cause]
        sys.stdout.write(json.dumps({**content, "cause": causes}, indent=2) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", Path(one).name, Path(other).name, ""):
        table.add_column(column, justify="right" if column else "left")
    marks = {True: "[green]better[/]", False: "[red]worse[/]", None: ""}
    for line in lines:
        row = (line.what, line.shown(line.one), line.shown(line.other), line.change)
        table.add_row(*row[:3], f"{row[3]} {marks[line.is_better]}".strip())
    console = Console()
    console.print(table)
    for name, timeline in ((one, before), (other, after)):
        console.print(f"{Path(name).name}: {timeline.verdict.sentence}", markup=False)
