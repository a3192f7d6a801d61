"""A plan without a loader is measured on the dataset and leaves the user's generators unchanged."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock
from penstock.planning.sample_timing import (
    is_iterable_only,
    measure_workload,
    num_bytes,
    spread_indices,
    summarize_timings,
    time_samples,
)

pytestmark = pytest.mark.legacy


class Slow:
    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.num_loaded = 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> Any:
        self.num_loaded += 1
        time.sleep(self.sample_s)
        random.random()
        return torch.zeros(100)


def test_without_a_dataset_the_machine_alone_speaks() -> None:
    plan = penstock.plan(batch_size=8)
    assert plan.num_workers.source == "rule"
    assert plan.slot_memory.value is None


def test_a_slow_dataset_gets_workers_and_the_plan_says_it_was_measured() -> None:
    plan = penstock.plan(Slow(0.02), batch_size=4)
    assert plan.num_workers.value >= 1
    assert plan.num_workers.source == "measured"


def test_measuring_ends_in_time_and_leaves_the_generators_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    data = Slow(0.1)
    work = measure_workload(data)
    assert data.num_loaded <= 6
    assert work.busy_share is not None
    assert work.busy_share < 0.5
    assert work.sample_bytes == 400
    assert random.random() == expected


def test_what_the_dataset_raises_is_raised() -> None:
    class Bad:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            raise KeyError("no label")

    with pytest.raises(KeyError, match="no label"):
        penstock.plan(Bad())


def test_iterable_and_in_memory_datasets_are_known_without_a_sample() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("must not be read")

    assert penstock.plan(Stream()).num_workers.value == 1
    data = torch.utils.data.TensorDataset(torch.zeros(10, 2))
    assert "memory" in penstock.plan(torch.utils.data.Subset(data, [1, 2])).num_workers.reason
    assert not is_iterable_only([1])
    assert is_iterable_only({1})


def test_indices_are_spread_and_none_comes_twice() -> None:
    assert list(spread_indices(0, 5)) == []
    assert list(spread_indices(1, 5)) == [0]
    assert sorted(spread_indices(3, 5)) == [0, 1, 2]
    indices = list(spread_indices(1_000, 100))
    assert len(set(indices)) == 100
    assert all(any(lo <= i < lo + 100 for i in indices) for lo in range(0, 1000, 100))


def test_exceptions_are_told_and_not_counted_in_the_timing() -> None:
    def load(index: int) -> bytes:
        if index == 1:
            raise ValueError(index)
        return b"12345"

    timed = list(time_samples(load, range(3), limit_s=60.0))
    assert [type(item.error) for item in timed] == [type(None), ValueError, type(None)]
    timing = summarize_timings(timed)
    assert timing is not None
    assert (timing.num_samples, timing.sample_bytes) == (2, 5)
    assert summarize_timings(timed[1:2]) is None


def test_waiting_is_told_from_working_on_a_busy_machine() -> None:
    def work(index: int) -> int:
        return sum(range(30_000))

    working = summarize_timings(time_samples(work, range(100), limit_s=60.0))
    waiting = summarize_timings(
        time_samples(lambda index: time.sleep(0.005), range(10), limit_s=60.0)
    )
    assert working is not None
    assert waiting is not None
    assert working.busy_share > 0.8
    assert waiting.busy_share < 0.3


def test_a_limit_of_nothing_still_loads_what_must_be_loaded() -> None:
    assert len(list(time_samples(lambda i: i, range(10), limit_s=0.0, at_least=3))) == 3


def test_bytes_are_counted_in_nested_samples() -> None:
    assert num_bytes((torch.zeros(2, 3), {"a": [b"xy", 1.5]}, None)) == 24 + 2 + 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": -1},
        {"num_workers": "many"},
        {"batch_size": -3},
        {"prefetch_factor": 0},
        {"pool": "swimming"},
        {"start_method": "slowly"},
        {"randomness": "none"},
    ],
)
def test_what_no_loader_takes_has_no_plan(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(penstock.errors.BadArgument, match=f"{name}=.* is not valid for a loader"):
        penstock.plan(range(10), **wrong)
