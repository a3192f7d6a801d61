"""Properties of a simulated run that hold for any times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.errors import BadTrace
from penstock.trace.accounting import make_account
from penstock.trace.model import make_model
from penstock.trace.record import Kind, Record
from penstock.trace.simulator import (
    Cost,
    MeasuredCosts,
    SimulatedRun,
    SimulationSettings,
    measure_costs,
    predict_rate,
    simulate_run,
)
from support import synthetic_traces

pytestmark = pytest.mark.legacy


def imagine(
    rows: tuple[Cost, ...] = (Cost(0.0, 0.01),), step_s: float = 0.0, **settings: Any
) -> SimulatedRun:
    costs = MeasuredCosts(rows=rows, steps=(Cost(0.0, step_s),), part_rows=4, part_s=0.0)
    given = {"num_workers": 2, "batch_rows": 4, "num_batches": 100, "cores": 4.0, **settings}
    return simulate_run(costs, SimulationSettings(**given))


def parts_of(run: SimulatedRun) -> list[Record]:
    return [part for lane in run.workers for part in lane]


def deliveries_of(run: SimulatedRun) -> list[Record]:
    """Return the deliveries of the training process, without its own loading."""
    return [record for record in run.main if record.kind == Kind.BATCH]


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_samples_that_wait_need_no_cores(num_workers: int) -> None:
    assert imagine(num_workers=num_workers, cores=1).rate == pytest.approx(
        100 * num_workers, rel=0.1
    )


@pytest.mark.parametrize(("num_workers", "cores"), [(1, 4), (4, 4), (8, 4), (4, 1)])
def test_samples_that_compute_share_the_cores(num_workers: int, cores: int) -> None:
    run = imagine((Cost(0.01, 0.0),), num_workers=num_workers, cores=cores)
    assert run.rate == pytest.approx(100 * min(num_workers, cores), rel=0.1)


def test_a_long_step_is_the_limit_whatever_the_workers() -> None:
    for num_workers in (2, 8):
        run = imagine(step_s=0.1, num_workers=num_workers)
        assert run.rate == pytest.approx(4 / 0.1, rel=0.05)


def test_a_step_that_computes_takes_a_core_from_the_workers() -> None:
    rows = (Cost(0.01, 0.0),)

    def rate(step: Cost) -> float:
        costs = MeasuredCosts(rows=rows, steps=(step,), part_rows=4)
        settings = SimulationSettings(num_workers=2, batch_rows=4, num_batches=100, cores=2)
        return simulate_run(costs, settings).rate

    assert rate(Cost(0.015, 0.0)) < 0.9 * rate(Cost(0.0, 0.015))


def test_batches_are_delivered_in_order_and_all_of_them() -> None:
    rows = (Cost(0.0, 0.001), Cost(0.0, 0.05))
    run = imagine(rows, num_workers=3, num_batches=50)
    assert [batch.batch for batch in deliveries_of(run)] == list(range(50))
    assert sum(part.rows for part in parts_of(run)) == 200


def test_without_workers_each_batch_is_loaded_when_it_is_asked_for() -> None:
    run = imagine((Cost(0.004, 0.006),), num_workers=0, step_s=0.01)
    assert run.rate == pytest.approx(4 / 0.05, rel=0.01)
    loads = [record for record in run.main if record.kind != Kind.BATCH]
    assert [load.batch for load in loads] == [batch.batch for batch in deliveries_of(run)]
    for load, batch in zip(loads, deliveries_of(run), strict=True):
        assert batch.start_ns == load.start_ns < load.end_ns <= batch.end_ns


def test_no_worker_does_two_things_at_once_and_nothing_is_early() -> None:
    run = imagine((Cost(0.002, 0.003),), num_workers=3, num_batches=40)
    for lane in run.workers:
        for one, other in itertools.pairwise(lane):
            assert one.end_ns <= other.start_ns
    loaded_ns: dict[int, int] = {}
    for part in parts_of(run):
        loaded_ns[part.batch] = max(part.end_ns, loaded_ns.get(part.batch, 0))
    for batch in deliveries_of(run):
        assert batch.start_ns + batch.a >= loaded_ns[batch.batch]


def test_no_more_batches_are_under_way_than_the_depth_allows() -> None:
    run = imagine(step_s=0.05, depth=2, num_workers=2, num_batches=40, can_split=False)
    taken_ns = {batch.batch: batch.start_ns + batch.a for batch in deliveries_of(run)}
    for part in parts_of(run):
        if part.batch >= 4:
            assert part.start_ns >= taken_ns[part.batch - 4]


def test_a_deeper_queue_rides_out_a_slow_sample() -> None:
    rows = (*[Cost(0.0, 0.002)] * 60, Cost(0.0, 0.3))
    shallow = imagine(rows, step_s=0.008, depth=1, num_batches=400, num_workers=3).rate
    deep = imagine(rows, step_s=0.008, depth=16, num_batches=400, num_workers=3).rate
    assert deep > 1.05 * shallow


def test_the_same_seed_is_the_same_run() -> None:
    rows = (Cost(0.001, 0.001), Cost(0.004, 0.0), Cost(0.0, 0.01))
    assert imagine(rows) == imagine(rows)
    assert imagine(rows) != imagine(rows, seed=1)


@pytest.mark.parametrize("count", [0, 2])
def test_too_short_a_run_is_said_to_be_one(count: int) -> None:
    with pytest.raises(BadTrace, match="too few"):
        measure_costs(make_model(synthetic_traces.make_records(num_batches=count)), 10)


@pytest.mark.parametrize("pause_ms", [0, 400])
def test_predictions_are_at_most_linear_in_what_was_measured(pause_ms: int) -> None:
    """Long pauses now and then are not in the costs, as where other programs come and go."""
    ms = synthetic_traces.MS

    def later(at_ns: int) -> int:
        return at_ns + max(0, at_ns - 1000 * ms) // (100 * ms) * pause_ms * ms

    records = synthetic_traces.make_records(num_batches=60, num_workers=1, step_ms=0.1, cores=8)
    main, worker = records["lanes"]
    worker["spans"] = [
        span._replace(
            start_ns=later(span.start_ns),
            end_ns=later(span.start_ns) + span.end_ns - span.start_ns,
        )
        for span in worker["spans"]
    ]
    for place, span in enumerate(main["spans"]):
        start_ns, end_ns = later(span.start_ns), later(span.end_ns)
        if span.kind == Kind.BATCH:
            more_ns = end_ns - start_ns - (span.end_ns - span.start_ns)
            span = span._replace(a=span.a + more_ns, b=later(span.b) if span.b else 0)
        main["spans"][place] = span._replace(start_ns=start_ns, end_ns=end_ns)
    model = make_model(records)
    measured = make_account(model).rate
    for num_workers in (1, 2, 4):
        predicted = predict_rate(model, num_workers)
        assert predicted is not None
        assert 0.5 * measured < predicted <= 1.001 * num_workers * measured
    costs, settings = measure_costs(model, 100)  # control: without the measured rate
    assert (simulate_run(costs, settings).rate > 2 * measured) is (pause_ms > 0)
