"""``penstock demo``, shortened: faults, races, a training, and a page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.data
from rich.console import Console

from penstock import DataLoader
from penstock.cli import demo, demo_faults
from support.datasets import Numbers

SHORT = """
import sys
from penstock.cli import demo, main
demo.NUM_TURNS, demo.WARM_UP_S, demo.WINDOW_S, demo.MAX_STEP_S = 1, 0.05, 0.1, 0.1
try:
    main(["demo", "--seconds", "1", "--workers", "1", "--images", "32", "--page", sys.argv[1]])
finally:
    assert "torch" in sys.modules
    assert "torch._dynamo" not in sys.modules, "its import takes 5 s"
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    page = tmp_path_factory.mktemp("demo") / "demo.html"
    command = [sys.executable, "-c", SHORT, str(page)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, page


def part_of(printed: str, step: int) -> str:
    return printed.partition(f"\n{step}. ")[2].partition(f"\n{step + 1}. ")[0]


def test_the_bits_are_the_same_and_those_of_pytorch_are_not(shown: tuple[str, Path]) -> None:
    bits = part_of(shown[0], 1)
    ours, theirs = (
        next(line.split() for line in bits.splitlines() if line.split()[:1] == [name])
        for name in ("Penstock", "PyTorch")
    )
    assert len(set(ours[1:4])) == 1
    assert len(set(theirs[1:4])) > 1  # the control
    assert ours[4:] == ["the", "same", "bits"]
    assert theirs[4:] == ["different", "bits"]


def test_a_killed_worker_and_a_broken_file_end_only_the_epoch_of_pytorch(
    shown: tuple[str, Path],
) -> None:
    same = part_of(shown[0], 1).partition("Penstock")[2].split()[0]
    killed, broken = part_of(shown[0], 2), part_of(shown[0], 3)
    assert f"Penstock  160 of 160 images, checksum {same}" in killed
    assert "PyTorch   stopped after" in killed
    assert "RuntimeError: DataLoader worker" in killed
    assert "Penstock  159 of 160 images" in broken
    assert "80.z" in broken
    assert "PyTorch   stopped after" in broken


def test_it_ends_with_the_verdict_and_a_page_for_the_browser(shown: tuple[str, Path]) -> None:
    printed, page = shown
    assert printed.count("images/s, first batch after") == 4
    end = part_of(printed, 5)
    assert "loss" in end
    assert "batches" in end or "waits" in end, end
    assert end.rstrip().endswith(f"Open {page} in a browser to zoom into every batch")
    content = page.read_text(encoding="utf-8")
    assert content.lstrip().lower().startswith("<!doctype html>")
    assert "http://" not in content.replace("http://www.w3.org", "")


class Complaints(Numbers):
    """Numbers whose loading writes to stderr, as a dying worker does."""

    def __getitem__(self, index: int) -> torch.Tensor:
        os.write(2, b"a complaint\n")
        return super().__getitem__(index)


def test_what_workers_of_pytorch_write_to_stderr_is_discarded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    dataset = Complaints(8)
    for _ in torch.utils.data.DataLoader(dataset, num_workers=1):  # the control
        pass
    assert "a complaint" in capfd.readouterr().err
    for _ in demo_faults._make("PyTorch", dataset, 1, {}):
        pass
    assert not capfd.readouterr().err


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
