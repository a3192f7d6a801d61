"""in_flight="auto": more samples in flight while that is faster, and fewer when it is not."""

from __future__ import annotations

import pytest

from penstock.engine.loading.async_limit import FIRST, AsyncLimit
from penstock.engine.loading.fetch import MOST_IN_FLIGHT
from penstock.engine.loading.hill_climb import MAX_PAUSE_S

pytestmark = pytest.mark.legacy


def run(limit: AsyncLimit, num_samples: int, most: int, *, start_s: float = 0.0) -> float:
    """Load samples of 20 ms from a server that answers at most ``most`` at a time."""
    now_s = start_s
    for _ in range(num_samples):
        now_s += 0.02 / min(limit.value, most)
        limit.note_done(now_s, is_full=True)
    return now_s


def test_waiting_without_a_limit_gets_the_most_and_a_reason() -> None:
    limit = AsyncLimit("auto")
    assert limit.value == FIRST
    run(limit, 2_000, most=1_000)
    assert limit.value == MOST_IN_FLIGHT
    assert limit.reason is not None
    assert str(MOST_IN_FLIGHT) in limit.reason


def test_a_server_that_answers_few_at_a_time_is_not_flooded() -> None:
    limit = AsyncLimit("auto")
    run(limit, 2_000, most=16)
    assert limit.value == 16
    assert limit.reason is not None
    assert "not faster" in limit.reason


def test_samples_that_compute_stay_at_the_first_number() -> None:
    limit = AsyncLimit("auto")
    run(limit, 2_000, most=1)
    assert limit.value == FIRST


def test_a_server_that_recovers_is_noticed_later() -> None:
    limit = AsyncLimit("auto")
    now_s = run(limit, 1_000, most=8)
    assert limit.value == FIRST
    run(limit, int(2 * MAX_PAUSE_S * FIRST / 0.02), most=1_000, start_s=now_s)
    assert limit.value > FIRST


def test_a_slow_training_loop_changes_nothing() -> None:
    limit = AsyncLimit("auto")
    for at_s in range(1_000):
        limit.note_done(float(at_s), is_full=False)
    assert limit.value == FIRST


def test_a_given_number_is_kept() -> None:
    limit = AsyncLimit(5)
    run(limit, 1_000, most=1_000)
    assert (limit.value, limit.reason) == (5, None)
