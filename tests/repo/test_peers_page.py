"""docs/peers.md agrees with the results file."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from support.paths import REPO

PAGE = REPO / "docs" / "peers.md"


def load_report() -> Any:
    path = REPO / "benchmarks" / "rivals" / "report.py"
    spec = importlib.util.spec_from_file_location("rivals_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> tuple[str, dict[str, Any]]:
    first = PAGE.read_text("utf-8").splitlines()[0]
    found = re.fullmatch(r"<!-- from (benchmarks/results/(peers-[\w.-]+\.json)) -->", first)
    assert found, "the page does not name its file of results"
    return found.group(2), json.loads((REPO / found.group(1)).read_text("utf-8"))


def test_the_page_is_what_its_results_make(results: tuple[str, dict[str, Any]]) -> None:
    name, content = results
    assert load_report().render(content, name) == PAGE.read_text("utf-8")


def test_another_figure_would_make_another_page(results: tuple[str, dict[str, Any]]) -> None:
    name, content = results
    changed = json.loads(json.dumps(content))
    row = next(row for row in changed["tables"][0]["rows"] if "median" in row)
    row["median"] *= 2
    assert load_report().render(changed, name) != PAGE.read_text("utf-8")


def test_every_peer_has_a_row_in_every_table(results: tuple[str, dict[str, Any]]) -> None:
    """A peer that does not install, or lacks a feature, has a row that says so."""
    _, content = results
    for table in content["tables"]:
        assert {row["peer"] for row in table["rows"]} == set(content["peers"]), table["key"]


def test_a_loss_is_called_one() -> None:
    rows = [
        {"contender": name, "peer": peer, "median": value, "low": value, "high": value}
        for name, peer, value in (("Other", "torch", 2.0), ("Penstock", "penstock", 1.0))
    ]
    for row in rows:
        row["samples"] = [row["median"]] * 3
    table = {"title": "t", "unit": "samples/s", "is_less_better": False, "rows": rows}
    report = load_report()
    assert report.compare(table) == (0.5, "behind")
    assert "**behind**" in "\n".join(report._verdicts([table]))
    few = [{**row, "samples": row["samples"][:1]} for row in rows]
    assert report.compare({**table, "rows": few}) == (0.5, "too few turns")
    assert report.compare({**table, "rows": rows[::-1], "is_less_better": True}) == (2.0, "ahead")
