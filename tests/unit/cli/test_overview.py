"""The machine overview that ``python -m penstock`` prints."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from penstock.cli.overview import print_overview
from penstock.machine.facts import Machine
from penstock.planning.safety import tabulate_safe_workers
from support.paths import MACHINES

pytestmark = pytest.mark.legacy

NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))
LINE = re.compile(r"^  requested +(\d+) -> safe +(\d+)  \(.+\)$", re.MULTILINE)


def machine(name: str) -> Machine:
    return Machine.from_json((MACHINES / f"{name}.json").read_text(encoding="utf-8"))


def shown(facts: Machine, *, is_watched: bool = False) -> str:
    stream = io.StringIO()
    print_overview(Console(file=stream, force_terminal=is_watched, width=100), facts)
    return stream.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_has_its_platform_its_workers_and_the_table(name: str) -> None:
    facts = machine(name)
    text = shown(facts)
    table = tabulate_safe_workers(facts)
    assert [(int(a), int(b)) for a, b in LINE.findall(text)] == [
        (asked, safe.value) for asked, safe in table.items()
    ]
    assert list(table) == [0, 1, 2, 4, 8]
    assert f"({facts.os})" in text
    assert re.search(r"recommended workers  [1-9]\d* \(", text)
    assert "penstock --help" in text
    assert "\x1b" not in text


def test_windows_is_called_so_and_keeps_its_workers() -> None:
    text = shown(machine("windows-no-gpu"))
    assert re.search(r"platform +Windows \(win32\)", text)
    assert re.search(r"is Windows +True", text)
    assert ("8", "0") not in LINE.findall(text)


def test_a_person_who_watches_gets_colours_and_a_table() -> None:
    text = shown(machine("linux-vm-2-cores"), is_watched=True)
    assert "\x1b[" in text
    assert "requested" in text
    assert not LINE.search(text)
