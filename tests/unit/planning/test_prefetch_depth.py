"""Prefetch depth and the splitting of batches, chosen from measured times."""

from __future__ import annotations

import pytest

from penstock.planning.prefetch_depth import MAX_DEPTH, MIN_DEPTH, PrefetchDepth

pytestmark = pytest.mark.legacy

MS = 1_000_000


def measured(sample_ms: float, *, asked: int | None = None, rows: int = 10) -> PrefetchDepth:
    """Return the timings of two workers that took ``sample_ms`` per sample of one batch."""
    depth = PrefetchDepth(asked, num_workers=2)
    depth.open_batch(rows)
    depth.note(int(sample_ms * MS * rows), rows)
    return depth


@pytest.mark.parametrize(
    ("sample_ms", "expected"), [(10.0, MIN_DEPTH), (0.4, 5), (0.001, MAX_DEPTH)]
)
def test_quick_batches_are_loaded_further_ahead(sample_ms: float, expected: int) -> None:
    depth = measured(sample_ms)
    assert depth.depth == MIN_DEPTH
    depth.adapt(batch_bytes=1000)
    assert depth.depth == expected


def test_large_batches_are_not() -> None:
    depth = measured(0.001)
    depth.adapt(batch_bytes=8 << 20)
    assert depth.depth == MIN_DEPTH


def test_a_depth_that_was_asked_for_stays() -> None:
    depth = measured(0.001, asked=3)
    depth.adapt(batch_bytes=1000)
    assert depth.depth == 3


def test_the_first_batch_and_slow_ones_are_cut_into_parts() -> None:
    new = PrefetchDepth(None, num_workers=4)
    assert new.num_parts(10, is_first=True) == 4
    assert new.num_parts(3, is_first=True) == 3
    assert new.num_parts(10, is_first=False) == 1
    assert measured(0.1).num_parts(10, is_first=True) == 1
    assert measured(10.0).num_parts(10, is_first=False) == 2


def test_many_workers_get_larger_parts_because_each_part_costs_the_training_process() -> None:
    def parts(num_workers: int) -> int:
        depth = PrefetchDepth(None, num_workers)
        depth.open_batch(16)
        depth.note(20 * MS * 16, 16)
        return depth.num_parts(16, is_first=False)

    assert parts(8) == 8
    assert parts(32) == 2
    assert parts(128) == 1


def test_a_moment_is_waited_only_while_many_quick_batches_are_open() -> None:
    assert measured(0.01).nap_s(num_open=3) > 0
    assert measured(0.01).nap_s(num_open=2) == 0
    assert measured(10.0).nap_s(num_open=3) == 0
    assert PrefetchDepth(None, num_workers=2).nap_s(num_open=3) == 0


def test_async_samples_in_flight_get_their_batches_and_as_many_more() -> None:
    depth = PrefetchDepth(None, num_workers=2, in_flight=64)
    assert depth.depth == MIN_DEPTH  # the size of a batch is not known yet
    depth.open_batch(16)
    assert depth.depth == 2 * 64 // 16
    large = PrefetchDepth(None, num_workers=2, in_flight=64)
    large.open_batch(64)
    assert large.depth == 1 + 2
    assert PrefetchDepth(None, num_workers=2).depth == MIN_DEPTH


def test_more_async_samples_get_their_batches_if_these_fit_in_memory() -> None:
    depth = PrefetchDepth(None, num_workers=2, in_flight=64, max_bytes=2 * 2 * 16 * 1000)
    depth.open_batch(16)
    assert depth.raise_in_flight(32, batch_bytes=10**9)  # no raise
    assert depth.depth == 8
    assert not depth.raise_in_flight(128, batch_bytes=1001)
    assert depth.depth == 8
    assert depth.raise_in_flight(128, batch_bytes=1000)
    assert depth.depth == 16


def test_batches_in_parts_need_fewer_in_flight() -> None:
    def in_flight(sample_ms: float, *, asked: int | None = None, can_split: bool = True) -> int:
        depth = PrefetchDepth(asked, num_workers=4, can_split=can_split)
        depth.open_batch(32)
        assert depth.num_batches(4) == 4 * depth.depth  # nothing is measured yet
        depth.note(int(sample_ms * MS * 32), 32)
        depth.adapt(batch_bytes=8 << 20)
        return depth.num_batches(4)

    assert in_flight(10.0) == 4 + 1
    assert in_flight(1.0) == 4 * MIN_DEPTH  # not split
    assert in_flight(10.0, can_split=False) == 4 * MIN_DEPTH
    assert in_flight(10.0, asked=3) == 4 * 3
