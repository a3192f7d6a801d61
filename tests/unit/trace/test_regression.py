"""Alarms on runs whose noise is known."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from penstock.trace.model import TraceModel, make_model
from penstock.trace.regression import (
    MIN_BATCHES,
    Slowdown,
    batch_times,
    measure_slowdown,
    measure_wait,
)
from support import synthetic_traces

pytestmark = pytest.mark.legacy


def run(num_batches: int = 101, *, noise: float = 0.0, seed: int = 0, **changes: Any) -> TraceModel:
    """Return a run whose batches take up to ``noise`` longer or shorter than usual."""
    draw = random.Random(seed).uniform
    slow = {batch: draw(1 - noise, 1 + noise) for batch in range(num_batches)}
    changes = {"num_workers": 1, "num_batches": num_batches, "slow": slow, **changes}
    return make_model(synthetic_traces.make_records(**changes))


def test_the_first_batch_of_an_epoch_is_not_counted() -> None:
    times = batch_times(run(11, fetch_ms=20.0, step_ms=5.0))
    assert len(times) == 10
    assert all(one.took_s == pytest.approx(0.0201) for one in times[:9])  # the last has no step
    assert {one.rows for one in times} == {8}


def test_a_run_of_the_same_speed_is_not_slower() -> None:
    same = measure_slowdown(run(), run())
    assert same is not None
    assert (same.share, same.is_above(0.0)) == (0.0, False)


@pytest.mark.parametrize(("fetch_ms", "is_slower"), [(22.0, True), (20.6, False), (15.0, False)])
def test_a_slowdown_above_the_limit_fails(fetch_ms: float, is_slower: bool) -> None:
    found = measure_slowdown(run(noise=0.05), run(noise=0.05, seed=1, fetch_ms=fetch_ms))
    assert found is not None
    assert found.noise < 0.02
    assert found.is_above(0.05) is is_slower


def test_a_difference_within_the_noise_does_not_fail() -> None:
    """The noise grows with the spread of the run, and covers differences between equal runs."""
    quiet = measure_slowdown(run(noise=0.05), run(noise=0.05, seed=1))
    wild = measure_slowdown(run(noise=0.9), run(noise=0.9, seed=1))
    assert quiet is not None
    assert wild is not None
    assert wild.noise > 5 * quiet.noise
    failures = 0
    for seed in range(1, 41):
        found = measure_slowdown(run(noise=0.9, seed=100 + seed), run(noise=0.9, seed=seed))
        assert found is not None
        failures += found.is_above(0.0)
    assert failures <= 4
    assert not Slowdown(share=0.2, noise=0.3).is_above(0.05)
    assert not Slowdown(share=0.2, noise=0.16).is_above(0.05)
    assert Slowdown(share=0.2, noise=0.1).is_above(0.05)


def drifting(seed: int) -> TraceModel:
    """Return a run whose speed drifts slowly, by up to some 15%."""
    draw = random.Random(seed).gauss
    slow, level = {}, draw(1.0, 0.03)
    for batch in range(201):
        level += 0.01 * (1.0 - level) + draw(0.0, 0.006)
        slow[batch] = level
    return run(201, slow=slow)


def test_the_noise_covers_a_slow_drift() -> None:
    """Batches of a drifting run are alike, so a noise that took them for independent is too small.

    Control: the spread of single batches alone raises alarms.
    """
    num_alarms = num_naive = 0
    for seed in range(0, 80, 2):
        runs = drifting(seed), drifting(seed + 1)
        found = measure_slowdown(*runs)
        assert found is not None
        num_alarms += found.is_above(0.02)
        rates = [[8 / one.took_s for one in batch_times(model)] for model in runs]
        spread = max(statistics.stdev(some) / statistics.fmean(some) for some in rates)
        naive = 1.96 * math.sqrt(2) * spread / math.sqrt(200)
        num_naive += found.share > max(0.02, naive)
    assert num_alarms <= 2
    assert num_naive > 5


@pytest.mark.parametrize(("queued", "is_judged"), [(0.5, False), (0.0, True)])
def test_a_run_beside_other_programs_is_not_judged(queued: float, is_judged: bool) -> None:
    def record(fetch_ms: float) -> TraceModel:
        shares = {"cpu_share": 0.4, "queued_share": queued}
        return make_model(
            synthetic_traces.make_records(num_batches=60, fetch_ms=fetch_ms, **shares)
        )

    found = measure_slowdown(record(20.0), record(30.0))
    assert found is not None
    assert found.share > 0.2
    assert found.is_busy is not is_judged
    assert found.is_above(0.05) is is_judged


def test_a_run_that_is_too_short_has_no_noise() -> None:
    short = run(MIN_BATCHES)  # one of them is the first
    assert measure_wait(short) is None
    assert measure_slowdown(short, run()) is None
    assert measure_slowdown(run(), short) is None
    assert measure_wait(run(MIN_BATCHES + 1)) is not None


def test_the_share_of_waiting_is_that_of_the_loop() -> None:
    loading, working = measure_wait(run(step_ms=5.0)), measure_wait(run(step_ms=40.0))
    assert loading is not None
    assert working is not None
    assert loading.value == pytest.approx(0.74, abs=0.01)
    assert working.value == pytest.approx(0.0, abs=0.01)
