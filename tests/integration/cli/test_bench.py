"""``penstock bench``: stages, settings, the ceiling, and the recommendation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import bench_measurement, bench_report
from penstock.cli.bench_dataset import BenchDataset, open_dataset
from penstock.cli.bench_measurement import BenchResult, StageTime, WorkersRate, measure
from penstock.errors import BadTarget, MismatchedSamples
from support import command_line

WAIT_S = 0.1
"""Longer than a busy machine delays a process, so that load changes the rates little."""


class Waiting:
    """Samples that sleep, so every worker adds the same throughput."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> float:
        import time

        time.sleep(WAIT_S)
        return float(index)


def test_more_workers_are_recommended_where_they_bring_more() -> None:
    told: list[str] = []
    source = BenchDataset(name="waiting", dataset=Waiting())
    found = measure(source, batch_size=1, workers=(0, 3), seconds=1.0, tell=told.append)
    none, three = found.runs
    assert three.rate > 1.5 * none.rate
    assert found.recommended is three
    assert found.stages[0].sample_ms >= 1e3 * WAIT_S
    assert "waiting" in found.stages[0].note
    assert three.predicted is not None
    assert three.predicted < 3.1 * none.rate  # at most linear
    assert found.timeline is not None
    assert "num_workers" not in found.timeline.verdict.remedy  # only one recommendation
    assert told == ["one sample at a time", "0 workers", "3 workers", told[-1]]


def test_the_ceiling_is_measured_with_the_recommended_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[tuple[type, int]] = []
    original = bench_measurement._run

    def run(dataset: Any, batch_size: int, collate_fn: Any, workers: int, seconds: float) -> Any:
        runs.append((type(dataset.dataset), workers))
        return original(dataset, batch_size, collate_fn, workers, seconds)

    monkeypatch.setattr(bench_measurement, "_run", run)
    source = BenchDataset(name="waiting", dataset=Waiting())
    measure(source, batch_size=1, workers=(0,), seconds=0.2, tell=lambda step: None)
    assert runs == [(Waiting, 0), (list, 0)]


def some_result() -> BenchResult:
    runs = [
        WorkersRate(workers=0, rate=100.0, stall_share=0.9, verdict="<slow>"),
        WorkersRate(workers=2, rate=196.0, stall_share=0.8, verdict="", predicted=190.0),
        WorkersRate(workers=4, rate=200.0, stall_share=0.7, verdict="", predicted=310.0),
    ]
    stages = [StageTime(name="dataset[i]", sample_ms=9.0, note="<b>")]
    return BenchResult(name="<x>", batch_size=8, stages=stages, ceiling=900.0, runs=runs)


def test_the_fewest_workers_that_come_near_the_best_are_recommended() -> None:
    assert some_result().line == "DataLoader(..., batch_size=8, num_workers=2)"


def test_what_is_within_the_noise_is_not_recommended_for_more_workers() -> None:
    noisy = some_result()
    for run in noisy.runs:
        run.noise = 0.45
    assert noisy.recommended.workers == 2  # 100 is less than 0.55 of 200
    noisy.runs[0].rate = 120.0
    assert noisy.recommended.workers == 0
    assert "Rates vary by 45%" in noisy.warning
    assert some_result().warning == ""


def test_more_workers_than_cores_are_not_recommended_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_measurement, "usable_cores", lambda: 2)
    found = some_result()
    found.runs[-1].rate = 400.0
    assert found.recommended.workers == 4
    found.load = "This machine is busy."
    assert found.recommended.workers == 2  # 4 took cores from the other programs
    found.busy_share = 0.05
    assert found.recommended.workers == 4  # samples wait, not for a core


class SometimesNone(Waiting):
    def __getitem__(self, index: int) -> Any:
        return None if index == 7 else float(index)


def test_a_sample_that_is_none_is_named() -> None:
    source = BenchDataset(name="s.py:dataset", dataset=SometimesNone())
    with pytest.raises(MismatchedSamples, match=r"dataset\[7\] returned None"):
        measure(source, batch_size=50, workers=(0,), seconds=0.1, tell=lambda step: None)


def test_the_page_and_the_json_hold_it_all() -> None:
    page = bench_report.make_page(some_result(), {"cores": 2})
    assert "<x>" not in page
    assert "<b>" not in page
    assert page.count("<rect") == 3
    assert "http" not in page
    content = json.loads(bench_report.dump(some_result(), {"cores": 2}))
    assert content["recommended"].endswith("num_workers=2)")
    assert [trial["workers"] for trial in content["trials"]] == [0, 2, 4]


SCRIPT = """
from torch.utils.data import DataLoader
class Numbers:
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return float(i)
loader = DataLoader(Numbers(), batch_size=16)
number = 3
"""


@pytest.fixture
def own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script replace ``__main__``, the path and the arguments for one test only."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.mark.usefixtures("own_main")
def test_a_script_s_loader_is_measured_with_its_batches(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / "bench.json"
    words = ["bench", f"{script}:loader", "--workers", "0", "--seconds", "0.1", "--out", str(out)]
    done = command_line.invoke(*words)
    assert done.exit_code == 0, done.output
    assert "Recommended: DataLoader(..., batch_size=16, num_workers=0)" in done.output
    assert "without a training step" in " ".join(done.output.split())  # unlike the plan
    assert json.loads(out.read_text())["batch_size"] == 16


@pytest.mark.usefixtures("own_main")
def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for target in (f"{script}:number", f"{script}:nothing", str(tmp_path)):
        with pytest.raises(BadTarget), open_dataset(target, ()):
            pass


class Raising(Waiting):
    def __getitem__(self, index: int) -> float:
        raise KeyError("oops")


@pytest.mark.parametrize(
    ("dataset", "words"), [([], "is empty"), (Raising(), r"dataset\[0\] raises KeyError")]
)
def test_a_dataset_that_gives_nothing_is_named(dataset: Any, words: str) -> None:
    with pytest.raises(BadTarget, match=words):
        measure(
            BenchDataset(name="x", dataset=dataset),
            batch_size=4,
            workers=(),
            seconds=0.1,
            tell=print,
        )


class Broken(Raising):
    files = ("cat/0.jpg", "cat/1.jpg")

    def __len__(self) -> int:
        return len(self.files)


@pytest.mark.parametrize(
    ("name", "words"),
    [("photos", r"In: cat/0\.jpg$"), ("s.py:ds", r"In: .*\n  Try: penstock doctor s\.py:ds")],
)
def test_a_file_that_is_broken_is_named(name: str, words: str) -> None:
    source = BenchDataset(name=name, dataset=Broken())
    with pytest.raises(BadTarget, match=words):
        measure(source, batch_size=2, workers=(0,), seconds=0.1, tell=lambda step: None)


def test_a_folder_that_is_not_there_is_said_to_be_missing() -> None:
    done = command_line.invoke("bench", "no such folder")
    assert done.exit_code == 2
    assert "'no such folder' is neither a folder nor a script" in done.output


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--out", "no such folder/b.html"), "folder no such folder does not exist"),
        (("--workers", "0,100000"), "must be at most 1024"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_measured(
    option: tuple[str, str], words: str
) -> None:
    done = command_line.invoke("bench", "train.py:dataset", *option)
    assert done.exit_code == 2
    assert words in done.output
