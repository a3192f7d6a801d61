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
def results() -> dict[str, dict[str, Any]]:
    first = PAGE.read_text("utf-8").splitlines()[0]
    found = re.fullmatch(
        r"<!-- from benchmarks/results/: ((?:peers-[\w.-]+\.json(?:, )?)+) -->", first
    )
    assert found, "the page does not name its files of results"
    names = found.group(1).split(", ")
    return {
        name: json.loads((REPO / "benchmarks" / "results" / name).read_text("utf-8"))
        for name in names
    }


def test_the_page_is_what_its_results_make(results: dict[str, dict[str, Any]]) -> None:
    assert load_report().render(results) == PAGE.read_text("utf-8")


def test_another_figure_would_make_another_page(results: dict[str, dict[str, Any]]) -> None:
    for name in results:
        changed = json.loads(json.dumps(results))
        report = load_report()
        row = report.find_best(changed[name]["tables"][0], True)
        row["median"] *= 2
        assert report.render(changed) != PAGE.read_text("utf-8")


def test_every_peer_has_a_row_in_every_table(results: dict[str, dict[str, Any]]) -> None:
    """A peer that does not install, or lacks a feature, has a row that says so."""
    for content in results.values():
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
