"""The metrics of plain records, in which every number is known."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from penstock.trace.diagnosis import CAUSES
from penstock.trace.metrics import Metrics, loader_metrics, make_metrics
from penstock.trace.record import Kind
from penstock.trace.recorder import Recorder
from support import synthetic_traces

pytestmark = pytest.mark.legacy


def metrics_of(**changes: Any) -> Metrics:
    return make_metrics(synthetic_traces.make_records(**changes), {})


def test_times_rates_and_shares_are_those_of_the_records() -> None:
    run = metrics_of(num_workers=1, num_batches=41, fetch_ms=20.0, step_ms=5.0, deliver_ms=0.2)
    assert run.load.p50_s == pytest.approx(0.020)
    assert run.step.p50_s == run.step.p99_s == pytest.approx(0.005)
    assert run.wait.p50_s == pytest.approx(0.0149, abs=1e-4)
    assert run.wait_share == pytest.approx(0.74, abs=0.01)
    assert run.wait_share + run.step_share == pytest.approx(0.99, abs=0.01)
    assert run.samples_per_s == pytest.approx(8 * run.batches_per_s) == pytest.approx(398, abs=2)


def test_one_slow_batch_is_in_the_highest_percentile_only() -> None:
    slow = metrics_of(num_batches=60, slow={41: 40.0})
    assert slow.load.p99_s > 5 * slow.load.p95_s
    even = metrics_of(num_batches=60)
    assert even.load.p99_s == pytest.approx(even.load.p50_s)


@pytest.mark.parametrize(("step_ms", "cause"), [(40.0, "step"), (1.0, "decode")])
def test_the_verdict_is_one_of_the_causes(step_ms: float, cause: str) -> None:
    verdict = metrics_of(num_batches=140, step_ms=step_ms).verdict
    assert verdict.cause == cause
    assert cause in CAUSES
    assert verdict.sentence


def test_all_values_are_plain() -> None:
    plain = make_metrics(
        synthetic_traces.make_records(), {"bad_samples": {"OSError": 2}, "num_hangs": 1}
    ).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["bad_samples"], plain["num_hangs"]) == ({"OSError": 2}, 1)
    assert set(plain) == set(Metrics.__dataclass_fields__)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        metrics_of().num_ready = 3  # type: ignore[misc]


def test_a_loader_that_has_not_run_has_metrics() -> None:
    metrics = loader_metrics(None)
    assert (metrics.num_batches, metrics.samples_per_s, metrics.is_off) == (0, 0.0, True)
    assert metrics.verdict.cause == "nothing"


def deliver(recorder: Recorder, first: int, last: int, took_ns: int) -> None:
    assert recorder.buffer is not None
    for batch in range(first, last):
        start_ns = (batch + 1) * took_ns
        recorder.buffer.add(
            Kind.BATCH,
            start_ns,
            start_ns + took_ns // 2,
            0,
            batch,
            0,
            4,
            0,
            start_ns - took_ns // 2,
        )


def test_only_the_last_seconds_are_read() -> None:
    recorder = Recorder(trace_bytes=256 << 10)
    deliver(recorder, 0, 100, 1_000_000_000)
    (lane,) = recorder.recent_records(30_000_000_000)["lanes"]
    assert lane["spans"]["batch"].tolist() == list(range(69, 100))
    (lane,) = recorder.recent_records(10**18)["lanes"]
    assert len(lane["spans"]) == 100


def test_the_part_is_shorter_where_there_are_many_records(monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.trace.recorder.MAX_RECENT", 200)
    recorder = Recorder(trace_bytes=256 << 10)
    deliver(recorder, 0, 3000, 1_000_000)
    (lane,) = recorder.recent_records(30_000_000_000)["lanes"]
    assert 200 <= len(lane["spans"]) <= 202
    assert lane["spans"]["batch"][-1] == 2999


def test_reading_metrics_takes_nothing_from_the_timeline() -> None:
    recorder = Recorder(trace_bytes=256 << 10)
    deliver(recorder, 0, 10, 1_000_000)
    recorder.recent_records(10**18)
    assert len(recorder.records()["lanes"][0]["spans"]) == 10
