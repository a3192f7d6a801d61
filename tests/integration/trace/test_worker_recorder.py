"""Trace records of real runs: every part of every batch, in every pool and for every ending."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import DataLoader, Timeline, Tracing
from penstock.errors import BadArgument, BadTrace

WAYS: dict[str, dict[str, Any]] = {
    "process": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "thread": {"num_workers": 2, "pool": "thread"},
    "inline": {"num_workers": 0},
}
COUNT, BATCH_SIZE = 40, 4


class Drawing:
    """Samples that take a millisecond, draw a number, and record a span."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, float]:
        with penstock.span("sleep"):
            time.sleep(0.001)
        return index, random.random()


def batches_of(loader: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in loader]


def spans_of(timeline: Timeline, role: str, kind: str) -> list[Any]:
    lanes = [lane for lane in timeline.lanes if lane.role == role]
    return [span for lane in lanes for span in lane.spans if span.kind == kind]


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_of_every_epoch_is_in_a_part_of_a_batch(way: str) -> None:
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, **WAYS[way])
    for _ in range(2):
        batches_of(loader)
    timeline = loader.timeline()
    role = "main" if way == "inline" else "worker"
    fetches = spans_of(timeline, role, "fetch")
    for pass_ in (0, 1):
        assert sum(span.rows for span in fetches if span.pass_ == pass_) == COUNT
        assert len({span.batch for span in fetches if span.pass_ == pass_}) == COUNT // BATCH_SIZE
    assert timeline.num_batches == 2 * COUNT // BATCH_SIZE
    assert timeline.model.notes == []
    for span in fetches:
        assert span.took_ns >= span.rows * 1e6
    loader.close()


@pytest.mark.parametrize("way", WAYS)
def test_spans_of_the_user_are_in_the_lane_of_whoever_ran_them(way: str) -> None:
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, **WAYS[way])
    batches_of(loader)
    timeline = loader.timeline()
    role = "user" if way == "inline" else "worker"
    named = [span for span in spans_of(timeline, role, "user") if span.name == "sleep"]
    assert len(named) == COUNT
    if way != "inline":
        assert {span.depth for span in named} == {1}
        assert all(span.batch >= 0 for span in named)
    loader.close()


def test_what_was_named_before_the_loader_ran_is_not_its_own() -> None:
    with penstock.span("long ago"):
        pass
    loader = DataLoader(range(8), batch_size=4)
    assert len([batch.tolist() for batch in loader]) == 2
    with penstock.span("just now"):
        pass
    names = {span.name for lane in loader.timeline().lanes for span in lane.spans}
    assert "just now" in names
    assert "long ago" not in names


def test_the_clock_is_one_for_all_processes() -> None:
    """A part is loaded after it was requested and before its batch is delivered."""
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, num_workers=2)
    batches_of(loader)
    timeline = loader.timeline()
    handed = {span.batch: span for span in timeline.model.batches()}
    launch = spans_of(timeline, "main", "launch")[0]
    for span in spans_of(timeline, "worker", "fetch"):
        assert launch.start_ns < span.start_ns < span.end_ns <= handed[span.batch].end_ns


class KillsOnce(Drawing):
    """Its tenth sample kills the worker that loads it, once."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __getitem__(self, index: int) -> tuple[int, float]:
        if index == 10 and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_worker_that_is_killed_leaves_what_it_noted(tmp_path: Path) -> None:
    loader = DataLoader(KillsOnce(tmp_path / "flag"), batch_size=BATCH_SIZE, num_workers=2)
    assert len(batches_of(loader)) == COUNT // BATCH_SIZE
    timeline = loader.timeline()
    (unfinished,) = (span for span in spans_of(timeline, "worker", "fetch") if span.is_open)
    assert unfinished.batch == 10 // BATCH_SIZE
    killed = next(lane for lane in timeline.lanes if unfinished in lane.spans)
    assert len(set(killed.pids)) == 2
    assert any("never ended" in note for note in timeline.model.notes)
    assert loader.num_restarts == 1


def test_samples_are_noted_one_by_one_when_that_is_asked_for() -> None:
    loader = DataLoader(
        Drawing(), batch_size=BATCH_SIZE, num_workers=2, trace=Tracing(samples=True)
    )
    batches_of(loader)
    samples = spans_of(loader.timeline(), "worker", "sample")
    assert len(samples) == COUNT
    plain = DataLoader(Drawing(), batch_size=BATCH_SIZE, num_workers=2)
    batches_of(plain)
    assert spans_of(plain.timeline(), "worker", "sample") == []


@pytest.mark.parametrize("trace", [None, False, Tracing(samples=True, steps=True)])
def test_tracing_changes_no_bit(trace: Any) -> None:
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, seed=3, num_workers=2, trace=trace)
    reference = DataLoader(Drawing(), batch_size=BATCH_SIZE, seed=3, num_workers=0, trace=False)
    assert batches_of(loader) == batches_of(reference)


def test_nothing_is_noted_where_tracing_is_off() -> None:
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, num_workers=2, trace=False)
    batches_of(loader)
    assert loader.timeline().num_batches == 0
    assert loader.metrics().num_batches == 0
    for said in (loader.timeline().verdict.sentence, str(loader.metrics())):
        assert "tracing is off" in said
    with pytest.raises(BadTrace, match="trace=True"):
        penstock.simulate(loader, workers=2)


SCRIPT = """
from penstock import DataLoader
loaders = [DataLoader(range(40), batch_size=4, trace=name) for name in {names!r}]
running = [iter(loader) for loader in loaders]
for _ in range(5):
    for batches in running:
        next(batches)
"""


def test_a_trace_is_written_at_the_end_of_the_program_at_the_latest(tmp_path: Path) -> None:
    names = ["run.json", "run.json.gz", "run.html"]
    (tmp_path / "script.py").write_text(SCRIPT.format(names=names))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in names[:2]:
        assert Timeline.load(tmp_path / name).num_batches == 5
    assert "Penstock timeline" in (tmp_path / "run.html").read_text()
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "script.py"])


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(range(40), batch_size=4, num_workers=1)
    monkeypatch.setenv("PENSTOCK_TRACE", "0")
    assert len([batch.tolist() for batch in loader]) == 10
    assert loader.timeline().num_batches == 0


def test_a_trace_is_there_after_each_epoch_and_after_close(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    loader = DataLoader(range(40), batch_size=4, num_workers=1, trace=path)
    batches_of_numbers = [batch.tolist() for batch in loader]
    assert len(batches_of_numbers) == Timeline.load(path).num_batches == 10
    loader.close()


@pytest.mark.parametrize(
    "trace",
    [
        *(3, "run.txt", "no such folder/run.json", Tracing(file="run.csv"), Tracing(file=5)),  # type: ignore[arg-type]
        *("~/run.json", f"{__file__}/run.json", "x" * 300 + ".json", "\0.json"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_at_once(trace: Any) -> None:
    with pytest.raises(BadArgument, match="trace="):
        DataLoader(range(4), trace=trace)


def test_a_trace_that_cannot_be_written_any_more_ends_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    loader = DataLoader(range(8), batch_size=4, trace=folder / "run.json")
    folder.rmdir()
    with pytest.warns(UserWarning, match="does not exist(?s:.*)continues without") as warned:
        assert len([*loader, *loader]) == 4
    assert len(warned) == 1
    with pytest.raises(BadTrace, match="mkdir -p"):
        loader.timeline().save(folder / "run.html")


def test_parts_that_were_dropped_half_way_make_no_sample_seem_quick() -> None:
    loader = DataLoader(Drawing(), batch_size=8, num_workers=2, persistent_workers=True)
    for _ in range(6):  # each time, the prefetched batches are dropped
        next(iter(loader))
    for _ in loader:
        pass
    timeline = loader.timeline()
    parts = [s for lane in timeline.lanes if lane.role == "worker" for s in lane.top() if s.rows]
    loader.close()
    assert len(parts) >= COUNT // 8
    assert min(part.took_ns / part.rows for part in parts) >= 1_000_000  # the sleep of a sample


def test_two_loaders_that_would_overwrite_each_other_s_trace_are_told(tmp_path: Path) -> None:
    first, second = (DataLoader(range(4), trace=tmp_path / "run.json") for _ in range(2))
    assert len(list(first)) == 4
    with pytest.warns(UserWarning, match="two loaders write their trace"):
        next(iter(second))
    del first, second
    assert len(list(DataLoader(range(4), trace=tmp_path / "run.json"))) == 4  # sequential use


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_is_ready_while_everything_is_waited_for(num_workers: int) -> None:
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, num_workers=num_workers)
    for _ in loader:
        pass
    ready = [reading.value for reading in loader.timeline().model.ready]
    assert sorted(ready)[len(ready) // 2] == 0


def test_long_runs_are_kept_whole_where_a_trace_was_asked_for() -> None:
    count = 9000  # more batches than records in a ring
    loader = DataLoader(torch.arange(count), batch_size=1, trace=True)
    for _ in loader:
        pass
    assert loader.timeline().num_batches == count


def test_the_last_part_of_a_long_run_is_there_where_nobody_asked() -> None:
    loader = DataLoader(torch.arange(9000), batch_size=1)
    for _ in loader:
        pass
    timeline = loader.timeline()
    assert 500 < timeline.num_batches < 9000
    assert max(span.batch for span in timeline.model.batches()) == 8999
    assert any("overwritten" in note for note in timeline.model.notes)


def test_a_loader_says_how_it_does() -> None:
    loader = DataLoader(Drawing(), batch_size=BATCH_SIZE, num_workers=1)
    for place, _ in enumerate(loader):
        time.sleep(0.002)
        if place == 5:
            metrics = loader.metrics()
            assert metrics.num_batches == 6
            assert 0 < metrics.samples_per_s < 1000
            assert 0.0 < metrics.step_share + metrics.wait_share <= 1.001
    assert "samples/s" in str(loader.metrics())


def test_a_loader_that_has_run_can_be_copied_and_pickled() -> None:
    loader = DataLoader(range(8), batch_size=4)
    assert len([batch.tolist() for batch in loader]) == 2
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.timeline().num_batches == 0
        assert len([batch.tolist() for batch in other]) == 2
        assert other.timeline().num_batches == 2
    assert loader.timeline().num_batches == 2


def test_a_loader_that_never_ran_has_an_empty_timeline() -> None:
    loader = DataLoader(range(4))
    assert loader.timeline().num_batches == 0
    assert loader.metrics().num_batches == 0
    assert "No batch was delivered" in str(loader.timeline())


def test_a_notebook_gets_the_page_in_a_frame() -> None:
    loader = DataLoader(range(8), batch_size=4)
    batches = [batch.tolist() for batch in loader]
    assert len(batches) == 2
    shown = loader.timeline()._repr_html_()
    assert shown.startswith('<iframe srcdoc="')
    assert "<script" not in shown.split(">")[0]
    assert shown.count("<") == 2
