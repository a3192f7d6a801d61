"""A loader displays its plan, its bottleneck and its timeline in a notebook, and nothing else."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock import DataLoader
from support import scripts

HOSTILE = "<img src=x onerror=alert(1)>"
TAGS = {"div", "strong", "br", "code", "details", "summary", "table", "tr", "th", "td", "iframe"}


class Elements(HTMLParser):
    """Collects tags, attributes and the visible text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, str] = {}
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update({name: value or "" for name, value in attributes})

    def handle_data(self, data: str) -> None:
        self.text += data


def make_dataset(name: str) -> Any:
    methods = {"__len__": lambda self: 64, "__getitem__": lambda self, index: index}
    return type(name, (), methods)()


def test_a_loader_shows_its_plan_its_verdict_and_its_timeline() -> None:
    loader: Any = DataLoader(make_dataset("Photos"), batch_size=4)
    for _ in loader:
        pass
    shown = Elements(loader._repr_html_())
    assert "DataLoader of Photos" in shown.text
    assert loader.metrics().verdict.sentence[:20] in shown.text
    assert loader.plan.num_workers.reason in shown.text
    assert "iframe" in shown.tags
    assert "Photos" in shown.attributes["srcdoc"]


def test_a_loader_that_has_not_run_shows_its_plan() -> None:
    shown = Elements(DataLoader(range(8))._repr_html_())  # type: ignore[arg-type]
    assert "Bottleneck" not in shown.text
    assert "recorded" not in shown.text
    assert "start method" in shown.text
    assert "iframe" not in shown.tags


def test_names_of_the_user_are_text_and_nothing_is_loaded_from_elsewhere() -> None:
    loader: Any = DataLoader(make_dataset(HOSTILE), batch_size=4)
    for _ in loader:
        pass
    shown = Elements(loader._repr_html_())
    assert HOSTILE in shown.text
    assert shown.tags <= TAGS
    assert set(shown.attributes) == {"srcdoc", "sandbox", "style", "title"}
    assert shown.attributes["sandbox"] == "allow-scripts"
    page = Elements(shown.attributes["srcdoc"])
    assert "img" not in page.tags
    assert "default-src 'none'" in shown.attributes["srcdoc"]
    assert "src" not in page.attributes
    assert page.attributes["href"] == "data:,"  # the icon
    assert "img" in Elements(f"<div>{HOSTILE}</div>").tags  # the parser would notice it


NOTEBOOK = """
import json, sys
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

notebook = new_notebook(cells=[new_code_cell(sys.stdin.read())])
NotebookClient(notebook, kernel_name="python3", timeout=240).execute()
print(json.dumps([output["data"] for output in notebook.cells[0].outputs]))
"""
CELL = """
from penstock import DataLoader
loader = DataLoader(list(range(64)), batch_size=4, num_workers=1)
for batch in loader:
    pass
display(loader.timeline())
loader
"""


@pytest.mark.slow
def test_jupyter_displays_a_loader_and_a_timeline(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    result = scripts.run(NOTEBOOK, tmp_path, stdin=CELL)
    assert result.returncode == 0, result.stderr
    timeline, loader = json.loads(result.stdout.splitlines()[-1])
    assert timeline["text/html"].startswith("<iframe")
    assert "DataLoader of list" in Elements(loader["text/html"]).text
    assert "Timeline(16 batches" in timeline["text/plain"]
