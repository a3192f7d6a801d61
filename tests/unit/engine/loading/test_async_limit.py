"""in_flight="auto": more samples in flight while that is faster, and fewer when it is not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from penstock.engine.loading.async_limit import FIRST, MOST, AsyncLimit
from penstock.engine.loading.fetch import EXPECTED_IN_FLIGHT
from penstock.engine.loading.hill_climb import MAX_PAUSE_S

pytestmark = pytest.mark.legacy
resource = pytest.importorskip("resource")  # POSIX


@pytest.fixture(autouse=True)
def file_limit() -> Iterator[int]:
    """Allow as many open files as possible. Returns how many are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
    run(limit, 20_000, most=10_000)
    assert limit.value == MOST > EXPECTED_IN_FLIGHT
    assert limit.reason is not None
    assert f"{MOST} async samples" in limit.reason


@pytest.mark.parametrize("most", [64, 128, 256])
def test_the_number_rises_as_long_as_each_raise_pays(most: int) -> None:
    limit = AsyncLimit("auto")
    run(limit, 10 * 2 * most, most=most)
    assert limit.value == most


def test_the_limit_of_open_files_ends_the_search_with_a_reason(file_limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 * file_limit, hard))
    limit = AsyncLimit("auto")
    run(limit, 2_000, most=1_000)
    assert limit.value == FIRST  # more than twice as many files may not be opened
    assert limit.reason is not None
    assert f"of {3 * file_limit} (ulimit -n)" in limit.reason


def test_a_batch_of_getitems_is_the_first_number_if_it_is_larger() -> None:
    limit = AsyncLimit("auto")
    limit.fit(24)
    assert limit.value == 24
    for done in range(40):  # twice as many batches take as long
        limit.note_done(done * 0.02 * 24 / limit.value, 24, is_full=True)
    assert limit.value > 24
    given = AsyncLimit(5)
    given.fit(24)
    assert given.value == 5


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
        limit.note_done(float(at_s), is_full=at_s % 3 == 0)
    assert limit.value == FIRST


def test_a_given_number_is_kept() -> None:
    limit = AsyncLimit(5)
    run(limit, 1_000, most=1_000)
    assert (limit.value, limit.reason) == (5, None)
