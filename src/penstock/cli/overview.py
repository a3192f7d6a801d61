"""``python -m penstock``: prints an overview of this platform and the safe numbers of workers.

It does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import __version__
from penstock.cli.sections import main_facts, make_console, print_section
from penstock.machine.collect import machine
from penstock.machine.facts import Machine
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice
from penstock.planning.safety import tabulate_safe_workers

NAMES = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
NEXT_STEPS = (
    ("penstock doctor", "problems on this machine, with fixes"),
    ("penstock demo", "what Penstock does, beside PyTorch's loader, in a minute"),
    ("penstock --help", "all commands"),
)


def show_overview() -> None:
    """Print the overview of this machine."""
    print_overview(make_console(), machine())


def print_overview(console: Console, facts: Machine) -> None:
    """Print the overview. Tables are drawn only on a terminal."""
    print_section(console, f"Penstock {__version__}", _rows(facts))
    _print_workers(console, tabulate_safe_workers(facts))
    print_section(console, "Next steps", NEXT_STEPS)


def _rows(facts: Machine) -> Iterable[tuple[str, str]]:
    plan = make_plan(facts, LoaderRequest(), Workload())
    yield "platform", f"{NAMES.get(facts.os, facts.os)} ({facts.os})"
    yield "is Windows", str(facts.os == "win32")
    yield from main_facts(facts)
    yield "start method", _said(plan.start_method)
    yield "recommended workers", _said(plan.num_workers)


def _said(choice: Choice) -> str:
    return f"{choice.value} ({choice.reason})"


def _print_workers(console: Console, table: dict[int, Choice]) -> None:
    console.print(Text("num_workers", style="bold"), soft_wrap=True)
    if console.is_terminal:
        drawn = Table("requested", "safe", "reason")
        for asked, safe in table.items():
            style = "green" if safe.value == asked else "yellow"
            drawn.add_row(str(asked), Text(str(safe.value), style=style), safe.reason)
        console.print(drawn)
    else:
        for asked, safe in table.items():
            line = f"  requested {asked:>2} -> safe {safe.value:>2}  ({safe.reason})"
            console.print(Text(line), soft_wrap=True)
    console.print()
