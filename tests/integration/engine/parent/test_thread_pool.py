"""Threads keep the bits: samples that draw run one at a time, other samples run in parallel."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, rng
from penstock.engine.loading.generator_lock import GeneratorLock
from support.datasets import Draws, Samples, assert_same, collect

pytestmark = pytest.mark.legacy


class Crowd:
    """Counts the samples that are loaded at the same time, and their maximum."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = 0

    def enter(self, seconds: float = 0.01) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(seconds)
        with self.lock:
            self.now -= 1


def load_in_threads(draw_one: Any) -> tuple[int, DataLoader[Any]]:
    """Load one epoch. Returns the maximum number of parallel samples, and the loader."""
    crowd = Crowd()

    def load(index: int) -> float:
        crowd.enter()
        return float(draw_one())

    loader = DataLoader(Samples(load, 96), batch_size=4, num_workers=4, pool="thread", seed=0)
    assert len(list(loader)) == 24
    return crowd.most, loader


@pytest.mark.parametrize(
    ("name", "draw_one", "is_together"),
    [
        ("nothing", lambda: 0.0, True),
        ("rng()", lambda: rng().random(), True),
        ("random", lambda: random.random(), False),
        ("numpy", lambda: np.random.rand(), False),
        ("torch", lambda: torch.rand(1).item(), False),
    ],
)
def test_samples_run_at_once_unless_they_draw_from_what_all_share(
    name: str, draw_one: Any, is_together: bool
) -> None:
    most, loader = load_in_threads(draw_one)
    assert (most > 1) == is_together
    assert any("one at a time" in note for note in loader.plan.notes) != is_together


@pytest.mark.parametrize("draw_one", [lambda: rng().random(), lambda: random.random()])
def test_the_bits_are_those_of_no_worker(draw_one: Any) -> None:
    def epochs(**arguments: Any) -> list[Any]:
        dataset = Samples(lambda i: (i, float(draw_one())), 80)
        loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=3, **arguments)
        return [collect(loader) for _ in range(2)]

    assert_same(epochs(num_workers=4, pool="thread"), epochs())


def test_a_late_draw_among_silent_threads_is_done_right() -> None:
    def load(index: int) -> tuple[int, float]:
        time.sleep(0.0005)
        return index, random.random() if index >= 100 else 0.0

    def epoch(**arguments: Any) -> list[Any]:
        return collect(DataLoader(Samples(load, 160), batch_size=8, seed=1, **arguments))

    for _ in range(3):
        assert_same(epoch(num_workers=4, pool="thread"), epoch())


def test_samples_of_every_generator_have_the_same_bits_in_threads() -> None:
    def epoch(**arguments: Any) -> list[Any]:
        return collect(DataLoader(Draws(60), batch_size=5, shuffle=True, seed=9, **arguments))

    assert_same(epoch(num_workers=3, pool="thread"), epoch())


def test_two_loaders_whose_threads_draw_at_the_same_time_keep_their_bits() -> None:
    def load(index: int) -> tuple[int, float, float]:
        first = random.random()
        time.sleep(0.001)  # the threads of the other loader run meanwhile
        return index, first, random.random()

    def make(seed: int, **arguments: Any) -> DataLoader[Any]:
        return DataLoader(Samples(load, 60), batch_size=4, seed=seed, **arguments)

    pairs = list(zip(*(make(seed, num_workers=2, pool="thread") for seed in (1, 2)), strict=True))
    for place, seed in enumerate((1, 2)):
        assert_same([pair[place] for pair in pairs], collect(make(seed)))


def test_a_loader_with_threads_inside_a_sample_of_another_loads() -> None:
    def load(index: int) -> tuple[float, float]:
        inner = DataLoader(
            Samples(lambda i: random.random(), 3), num_workers=1, pool="thread", seed=index
        )
        return random.random(), sum(float(batch) for batch in inner)

    def epoch(**arguments: Any) -> list[Any]:
        return collect(DataLoader(Samples(load, 8), batch_size=2, seed=5, **arguments))

    assert_same(epoch(num_workers=2, pool="thread", timeout=100), epoch())


def test_a_thread_that_never_returns_blocks_no_later_loader() -> None:
    stuck = threading.Event()

    def hang(index: int) -> float:
        if index == 5:
            stuck.wait(200)
        return random.random()

    loader = DataLoader(Samples(hang, 12), batch_size=2, num_workers=1, pool="thread", timeout=0.5)
    with pytest.raises(RuntimeError, match="W02"):
        list(loader)
    after = DataLoader(Samples(lambda i: random.random(), 4), num_workers=1, pool="thread", seed=1)
    try:
        assert len(list(after)) == 4
        assert not stuck.is_set()  # control: the thread is still in its sample
    finally:
        stuck.set()


def test_one_alone_waits_for_those_together_and_the_other_way_round() -> None:
    gate, seen = GeneratorLock(), []

    def shared() -> None:
        with gate.shared():
            seen.append("in")
            time.sleep(0.05)
            seen.append("out")

    def exclusive() -> None:
        with gate.exclusive():
            seen.append("alone")
            time.sleep(0.02)
            seen.append("left")

    threads = [threading.Thread(target=run) for run in (shared, shared, exclusive, shared)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join(10)
    place = seen.index("alone")
    assert seen[place + 1] == "left"
    assert seen[:place].count("in") == seen[:place].count("out")


def test_a_loader_that_is_collected_in_one_of_its_own_threads_ends_cleanly() -> None:
    """The garbage collector runs wherever memory is allocated, including in a worker thread."""
    holder: list[Any] = []
    seen = threading.Event()

    first_batch: set[int] = set()

    def drop(index: int) -> int:
        if index < 2:
            first_batch.add(index)
        # Before that, waiting could keep the first batch from being loaded.
        elif len(first_batch) == 2 and seen.wait(120.0):
            holder.clear()  # the last reference, dropped in its own thread
        return index

    ways: Any = {"num_workers": 2, "pool": "thread", "prefetch_factor": 4}
    holder.append(iter(DataLoader(Samples(drop), batch_size=2, **ways)))
    assert next(holder[0]).tolist() == [0, 1]
    seen.set()
    limit = time.monotonic() + 60.0
    while holder and time.monotonic() < limit:
        time.sleep(0.01)
    assert not holder  # conftest.py checks that no thread or memory is left
