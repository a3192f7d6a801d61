"""``penstock demo``, shortened: it trains, races, prints its findings, and writes a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from penstock import DataLoader
from penstock.cli import demo
from support.datasets import Numbers

SHORT = """
import sys
from penstock.cli import demo, main
demo.NUM_TURNS, demo.WARM_UP_S, demo.WINDOW_S = 1, 0.05, 0.1
main(["demo", "--seconds", "1", "--workers", "1", "--images", "32", "--page", sys.argv[1]])
"""


def show(page: Path) -> str:
    command = [sys.executable, "-c", SHORT, str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_ends_with_the_verdict_and_a_page_for_the_browser(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    printed = show(page)
    assert "images per second" in printed
    story, _, end = printed.partition("Timeline of the training")
    assert "loss" in story
    assert "batches" in end or "waits" in end, end
    assert end.rstrip().endswith(f"Open {page} in a browser to zoom into every batch")
    content = page.read_text(encoding="utf-8")
    assert content.lstrip().lower().startswith("<!doctype html>")
    assert "http://" not in content.replace("http://www.w3.org", "")


def test_a_page_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(Numbers(8), batch_size=2)
    for _ in loader:
        pass
    page = tmp_path / "no such folder" / "demo.html"
    demo._show_timeline(loader.timeline(), page, Console())
    told = capsys.readouterr().out.rpartition("The HTML page could not be written: ")[2]
    assert str(page) in told
    assert "the folder does not exist" in told.partition(str(page))[2]
