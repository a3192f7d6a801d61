"""Every row of docs/seeds.md states a result, and the tests that it names exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from support.paths import REPO

PAGE = REPO / "docs" / "seeds.md"
NAMED = re.compile(r"`(\w+\.py)::(test_\w+)`")
RESULTS = re.compile(r"`([\w-]+\.json)`")
HEADS = (
    ["advice", "status", "with Penstock", "shown by"],
    ["number", "status", "measured with Penstock", "shown by"],
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield each table of a section of the page, without its header."""
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", flags=re.MULTILINE):
        lines = [cells(line) for line in block.splitlines()]
        assert lines[0] in HEADS, lines[0]
        yield lines[2:]


def parts() -> dict[str, list[list[str]]]:
    """Return the rows of each section, by title."""
    found = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.splitlines()[0]: [row for rows in tables(part) for row in rows] for part in found}


ROWS = [(title, row) for title, rows in parts().items() for row in rows]


def words() -> set[str]:
    """Return the allowed values of the second column, from the first table of the page."""
    head = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    return {cells(line)[0] for line in head.splitlines() if line.startswith("|")} - {"word", "---"}


@functools.cache
def names_in(file: str) -> frozenset[str]:
    return frozenset(
        node.name
        for path in (REPO / "tests").rglob(file)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    )


def fault_in(row: list[str]) -> str | None:
    """Return the problem with a row, or None."""
    if len(row) != 4 or not all(row):
        return "not four cells"
    _, here, does, shown_by = row
    if here not in words():
        return f"{here!r} is not a word of the page"
    named = NAMED.findall(shown_by)
    if not named:
        return "a claim without a test"
    missing = [name for file, name in named if name not in names_in(file)]
    if missing:
        return f"no such tests: {missing}"
    files = RESULTS.findall(does)
    if here == "measured" and not files:
        return "a figure without its file"
    gone = [name for name in files if not (REPO / "benchmarks" / "results" / name).exists()]
    return f"no such results: {gone}" if gone else None


def test_there_are_rows_for_each_of_the_five() -> None:
    assert [len(rows) > 10 for rows in parts().values()] == [True] * 5


def test_every_row_says_what_becomes_of_it_and_what_shows_that() -> None:
    faults = {f"{title}: {row[0]}": fault_in(row) for title, row in ROWS}
    assert {row: fault for row, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (["a", "automatic", "b"], "four cells"),
        (["a", "perhaps", "b", "c"], "not a word"),
        (["a", "automatic", "b", "c"], "without a test"),
        (["a", "automatic", "b", "`test_seeds.py::test_nobody_wrote`"], "no such tests"),
        (["a", "measured", "9", "`test_seeds.py::test_no_row_twice`"], "without its file"),
        (["a", "measured", "`no.json`", "`test_seeds.py::test_no_row_twice`"], "no such results"),
    ],
)
def test_a_row_that_is_wrong_would_be_noticed(row: list[str], fault: str) -> None:
    assert fault in (fault_in(row) or "")


def test_no_row_twice() -> None:
    assert len({(title, row[0]) for title, row in ROWS}) == len(ROWS)


def test_the_front_page_of_the_documents_leads_there() -> None:
    assert "(seeds.md)" in (REPO / "docs" / "index.md").read_text(encoding="utf-8")
