"""``penstock.simulate`` predicts runs with different settings from a trace."""

from __future__ import annotations

import math
from typing import Any

import pytest

import penstock
from penstock import Timeline
from penstock.errors import BadArgument
from support import synthetic_traces

pytestmark = pytest.mark.legacy


def trace(**changes: Any) -> Timeline:
    return Timeline(
        synthetic_traces.make_records(**{"num_batches": 200, "step_ms": 1.0, **changes})
    )


def test_a_run_imagined_as_it_was_comes_out_as_it_was() -> None:
    real = trace()
    assert penstock.simulate(real).account.rate == pytest.approx(real.account.rate, rel=0.1)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_other_numbers_of_workers_come_out_as_runs_with_them(num_workers: int) -> None:
    real = trace(num_workers=num_workers)
    imagined = penstock.simulate(trace(num_workers=2), workers=num_workers)
    assert imagined.account.rate == pytest.approx(real.account.rate, rel=0.1)
    assert len([lane for lane in imagined.lanes if lane.role == "worker"]) == num_workers


def test_cores_that_others_held_are_not_counted_on() -> None:
    def with_queueing(share: float) -> float:
        records = synthetic_traces.make_records(num_batches=80, cores=4, cpu_share=1.0 - share)
        for lane in records["lanes"][1:]:
            lane["spans"] = [
                span._replace(b=int((span.end_ns - span.start_ns) * share)) if span.rows else span
                for span in lane["spans"]
            ]
        return penstock.simulate(Timeline(records), workers=8).account.rate

    assert with_queueing(0.6) < 0.7 * with_queueing(0.0)


def test_changes_work_in_the_right_direction() -> None:
    real = trace()
    rate = penstock.simulate(real).account.rate
    assert penstock.simulate(real, faster_decode=2.0).account.rate > 1.5 * rate
    assert penstock.simulate(real, packed=True).account.rate > 3 * rate
    assert penstock.simulate(real, step_ms=100.0).account.rate < 0.5 * rate
    assert penstock.simulate(real, workers=0).account.rate < 0.6 * rate
    assert penstock.simulate(real, workers=8, cores=2).account.rate < 1.2 * rate


def test_an_imagined_run_is_a_timeline_like_any_other() -> None:
    imagined = penstock.simulate(trace(), workers=3)
    assert imagined.facts["imagined"] is True
    assert "worker 2" in imagined.draw(80)
    assert imagined.verdict.cause == "decode"
    assert "imagined" in imagined.to_html()


@pytest.mark.parametrize(
    "settings",
    [
        *({"workers": -1}, {"prefetch": 0}, {"batch_size": 1.5}, {"cores": 0}, {"num_batches": 0}),
        *({"workers": 10**6}, {"batch_size": 10**9}, {"device_prefetch": -1}, {"step_ms": -1}),
        *({"step_ms": math.nan}, {"step_ms": math.inf}, {"faster_decode": "2"}),
        *({"faster_decode": 0}, {"faster_decode": math.nan}),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=r"it must be (an integer|a positive|a non-neg)"):
        penstock.simulate(trace(), **settings)


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(BadArgument, match=r"expected a loader, .*, got list"):
        penstock.simulate([1, 2])
