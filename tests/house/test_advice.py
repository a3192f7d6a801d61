"""Is docs/advice.md true: does every row say what becomes of the advice, and do its tests exist?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "advice.md"
NAMED = re.compile(r"`(\w+\.py)::(test_\w+)`")
HEAD = ["the advice", "here", "what Penstock does", "shown by"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Each part of the page that has a table of advice: its title and the rows."""
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        lines = [cells(line[1:]) for line in part.splitlines() if line.startswith("|")]
        assert lines[0] == HEAD
        yield part.splitlines()[0], lines[2:]


ROWS = [pytest.param(row, id=f"{title}: {row[0][:40]}") for title, rows in tables() for row in rows]


def words() -> set[str]:
    """What the second column may say: the first table of the page."""
    head = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    return {cells(line)[0] for line in head.splitlines() if line.startswith("|")} - {"word", "---"}


def names_in(file: str) -> set[str]:
    return {
        node.name
        for path in (REPO / "tests").rglob(file)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def fault_in(row: list[str]) -> str | None:
    """What is wrong with a row, if anything."""
    if len(row) != 4 or not row[0]:
        return "not four cells"
    _, here, does, shown_by = row
    if here not in words():
        return f"{here!r} is not a word of the page"
    named = NAMED.findall(shown_by)
    if here in ("automatic", "keyword", "doctor", "not needed") and not (does and named):
        return "a claim without a test"
    missing = [name for file, name in named if name not in names_in(file)]
    return f"no such tests: {missing}" if missing else None


def test_there_is_a_table_for_each_of_the_five() -> None:
    assert [len(rows) > 5 for _, rows in tables()] == [True] * 5


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_becomes_of_the_advice_and_what_shows_it(row: list[str]) -> None:
    assert fault_in(row) is None


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (["a", "automatic", "b"], "four cells"),
        (["a", "perhaps", "b", ""], "not a word"),
        (["a", "automatic", "b", ""], "without a test"),
        (["a", "automatic", "b", "`test_advice.py::test_nobody_wrote`"], "no such tests"),
    ],
)
def test_a_row_that_is_wrong_would_be_noticed(row: list[str], fault: str) -> None:
    assert fault in (fault_in(row) or "")


def test_what_is_not_built_is_said_to_be_not_there() -> None:
    words_of = {"store": "pack", "device": "device=", "compute": "compute", "timeline": "timeline"}
    pending = [row for _, rows in tables() for row in rows if row[1] == "not there yet"]
    text = "\n".join(row[2] for row in pending)
    empty = [room for room in words_of if not (REPO / "src" / "penstock" / room).exists()]
    assert [room for room in empty if words_of[room] not in text] == []


def test_the_front_page_of_the_documents_leads_there() -> None:
    assert "(advice.md)" in (REPO / "docs" / "index.md").read_text(encoding="utf-8")
