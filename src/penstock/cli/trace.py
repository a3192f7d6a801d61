"""``penstock trace``: shows, opens, converts and compares traces."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import CommandParser, number, percent
from penstock.errors import BadArgument

if TYPE_CHECKING:
    from penstock.trace.timeline import Timeline

_TRACE: dict[str, Any] = {"metavar": "TRACE", "help": "A trace file (.json or .json.gz)."}


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    commands = parser.add_commands()

    def add(name: str, execute: Any, summary: str, example: str) -> CommandParser:
        command: CommandParser = commands.add_parser(
            name, help=summary, description=summary, example=f"penstock trace {name} {example}"
        )
        command.set_defaults(execute=execute)
        return command

    show = add("show", _show, "Draw a trace in the terminal, with the verdict.", "run.json")
    show.add_argument("file", **_TRACE)
    show.add_value(
        "--from", "S", number(float, 0), "Start time in seconds.", dest="first", default=0.0
    )
    show.add_value("--to", "S", float, "End time in seconds.", dest="last")
    show.add_value(
        "--width", "N", number(int, 40, 1000), "Width in columns. By default, the terminal's."
    )
    show.add_argument("--json", action="store_true", help="Print JSON.")
    show_page = "Open a trace in the browser. The page works offline."
    add("open", _open, show_page, "run.json").add_argument("file", **_TRACE)
    export = add("export", _export, "Convert a trace to a different format.", "run.json run.html")
    export.add_argument("file", **_TRACE)
    export.add_argument(
        "out", metavar="OUT", help="Output file: .html, .perfetto.json.gz, .json or .json.gz."
    )
    compare = add("compare", _compare, "Compare two runs.", "before.json after.json")
    compare.add_argument("before", metavar="BEFORE", help="The trace of the first run.")
    compare.add_argument("after", metavar="AFTER", help="The trace of the second run.")
    compare.add_argument("--json", action="store_true", help="Print JSON.")
    compare.add_value(
        "--fail-if",
        "slower:N%",
        _slower,
        "Exit with status 1 if the second run is slower by more than this, beyond the noise.",
        dest="max_slower",
    )


def _slower(text: str) -> float:
    word, _, share = text.partition(":")
    if word != "slower":
        raise argparse.ArgumentTypeError(f"{text!r} must be slower:N%, such as slower:5%")
    return percent(share)


def _show(options: argparse.Namespace) -> None:
    from rich.console import Console

    from penstock.trace.terminal import print_run, render
    from penstock.trace.timeline import Timeline

    timeline = Timeline.load(options.file)
    if options.json:
        sys.stdout.write(json.dumps(_as_dict(timeline), indent=2, default=str) + "\n")
        return
    console = Console(width=options.width)
    total_s = timeline.model.total_ns * 1e-9
    first, end_s = options.first, total_s
    if options.last is not None:
        end_s = min(options.last, total_s)
    if total_s and not first < end_s:
        raise BadArgument(
            f"--from {first:g} --to {end_s:g} is empty: the trace covers 0 to {total_s:.4g} s",
            remedy=f"penstock trace show {options.file} --from 0 --to {total_s:.4g}",
        )
    drawing = render(timeline.model, console.width, first_s=first, last_s=end_s)
    print_run(console, drawing, timeline.say(), soft_wrap=True)


def _as_dict(timeline: Timeline) -> dict[str, object]:
    account = {key: value for key, value in vars(timeline.account).items() if key != "slowest"}
    account["workers"] = [vars(worker) for worker in timeline.account.workers]
    return {
        "facts": timeline.facts,
        "verdict": vars(timeline.verdict),
        "account": {**account, "rate": timeline.account.rate},
        "notes": timeline.model.notes,
    }


def _open(options: argparse.Namespace) -> None:
    from penstock.trace.timeline import Timeline

    timeline = Timeline.load(options.file)
    folder = Path(tempfile.mkdtemp(prefix="penstock-trace-"))
    page = folder / f"{Path(options.file).name.split('.')[0] or 'trace'}.html"
    timeline.save(page)
    print(page)
    if not webbrowser.open(page.as_uri()):
        print("No browser could be started. Open the file in a browser.", file=sys.stderr)


def _export(options: argparse.Namespace) -> None:
    from penstock.trace.timeline import Timeline

    timeline = Timeline.load(options.file)
    timeline.save(options.out)
    num_bytes = Path(options.out).stat().st_size
    print(f"{options.out}: {num_bytes:,} bytes, {timeline.model.num_spans:,} spans")


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from penstock.trace.accounting import compare
    from penstock.trace.regression import MIN_BATCHES, measure_slowdown
    from penstock.trace.timeline import Timeline

    before, after = Timeline.load(options.before), Timeline.load(options.after)
    lines = compare(before.account, after.account)
    slowdown = measure_slowdown(before.model, after.model)
    if slowdown is None and options.max_slower is not None:
        raise BadArgument(
            f"--fail-if needs at least {MIN_BATCHES} batches after start-up in both runs, to "
            f"measure the noise: these have {before.num_batches} and {after.num_batches}",
            remedy="record more batches",
        )
    limit = options.max_slower
    is_slower = limit is not None and slowdown is not None and slowdown.is_above(limit)
    if options.json:
        content: dict[str, Any] = {line.what: [line.one, line.other] for line in lines}
        causes = [before.verdict.cause, after.verdict.cause]
        content["cause"], content["is_slower"] = causes, is_slower
        content["slowdown"] = None if slowdown is None else vars(slowdown)
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return int(is_slower)
    table = Table(box=None, pad_edge=False)
    for column in ("", Path(options.before).name, Path(options.after).name, ""):
        table.add_column(column, justify="right" if column else "left")
    marks = {True: "[green]better[/]", False: "[red]worse[/]", None: ""}
    for line in lines:
        row = (line.what, line.shown(line.one), line.shown(line.other), line.change)
        table.add_row(*row[:3], f"{row[3]} {marks[line.is_better]}".strip())
    console = Console()
    console.print(table)
    for name, timeline in ((options.before, before), (options.after, after)):
        console.print(f"{Path(name).name}: {timeline.verdict.sentence}", markup=False)
    if slowdown is not None:
        word = "slower" if slowdown.share > 0 else "faster"
        text = f"{Path(options.after).name} is {abs(slowdown.share):.1%} {word} "
        text += f"(noise: {slowdown.noise:.1%})."
        if slowdown.is_busy:
            text += " Other programs used the cores during one of the runs"
            text += "." if limit is None else f", so the limit of {limit:.1%} was not checked."
        elif limit is not None:
            text += f" The limit is {limit:.1%}: {'failed' if is_slower else 'passed'}."
        console.print(text, markup=False)
    return int(is_slower)
