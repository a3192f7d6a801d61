"""Cached samples with random draws: their values, and the generator state after reading."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import cached
from penstock.errors import BadStore
from penstock.order.sample_randomness import SampleRandomness, UnexpectedDraw

pytestmark = pytest.mark.legacy


def draw_random() -> float:
    """Draw a number. A bound method would be pickled with a copy of its generator."""
    return random.random()


DRAWS: dict[str, Callable[[], float]] = {
    "random": draw_random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "normal": lambda: np.random.normal(),
    "torch": lambda: torch.rand(()).item(),
    "rng": lambda: penstock.rng().random(),
}


class Noise:
    """Samples that draw, from index ``first`` on."""

    def __init__(self, draw: Callable[[], float] = draw_random, first: int = 0) -> None:
        self.draw, self.first = draw, first

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> float:
        return self.draw() if index >= self.first else index / 64


class Own(Noise):
    """Samples that draw from a generator held by the dataset."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        super().__init__()

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


def drawn() -> list[float]:
    """Draw from every generator twice, because a normal variate can be cached."""
    return [draw() for name, draw in DRAWS.items() if name != "rng" for _ in range(2)]


def drawn_after(read: Callable[[], Any]) -> list[float]:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    random.gauss(0, 1), np.random.normal()
    read()
    return drawn()


@pytest.mark.parametrize("draw", [name for name in DRAWS if name != "rng"])
def test_reading_a_cache_moves_no_generator(draw: str) -> None:
    data = cached(Noise(DRAWS[draw]), "ram")
    expected = drawn_after(lambda: None)
    assert drawn_after(lambda: data[7]) == expected  # computed
    assert drawn_after(lambda: data[7]) == expected  # read from the cache
    assert drawn_after(lambda: Noise(DRAWS[draw])[7]) != expected  # without a cache


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_frozen_is_a_function_of_the_index(draw: str) -> None:
    ahead, back = (cached(Noise(DRAWS[draw]), "ram") for _ in range(2))
    samples = [ahead[index] for index in range(60)]
    assert [back[index] for index in reversed(range(60))] == samples[::-1]
    assert len(set(samples)) == 60
    assert cached(Noise(DRAWS[draw]), "ram", seed=1)[7] != samples[7]


def test_without_a_cache_it_depends_on_who_asks_first() -> None:
    data = Noise()
    random.seed(0)
    samples = [data[index] for index in range(60)]
    random.seed(0)
    assert [data[index] for index in reversed(range(60))] != samples[::-1]


def test_a_dataset_that_begins_to_draw_late_is_treated_alike() -> None:
    late, early = (cached(Noise(first=first), "ram") for first in (40, 0))
    expected = drawn_after(lambda: None)
    for index in range(60):
        assert drawn_after(lambda index=index: late[index]) == expected
    assert [late[index] for index in range(40, 60)] == [early[index] for index in range(40, 60)]


def test_a_sample_that_fails_leaves_the_generators_as_they_were() -> None:
    def draw_and_fail() -> float:
        assert random.random() < 0
        return 0.0

    class Failing(Noise):
        def __getitem__(self, index: int) -> float:
            return draw_and_fail() if index == 7 else super().__getitem__(index)

    data = cached(Failing(), "ram")

    def read() -> None:
        with pytest.raises(AssertionError):
            data[7]

    assert drawn_after(read) == drawn_after(lambda: None)


def test_the_dataset_s_own_generators_are_set_and_put_back(tmp_path: Path) -> None:
    source = Own()
    before = source.rng.bit_generator.state
    data = cached(source, tmp_path / "cache")
    samples = [data[index] for index in range(60)]
    assert source.rng.bit_generator.state == before
    assert len(set(samples)) == 60
    again = cached(Own(), tmp_path / "cache")  # recognized as the same, although it has no seed
    assert again.num_ready == 60
    other = cached(Own(), "ram")
    assert [other[index] for index in reversed(range(60))] == samples[::-1]


def test_a_cache_of_another_seed_is_refused_if_samples_draw(tmp_path: Path) -> None:
    cached(Noise(), tmp_path / "drawn")
    with pytest.raises(BadStore, match="a different dataset"):
        cached(Noise(), tmp_path / "drawn", seed=1)
    cached(Noise(first=60), tmp_path / "calm")
    cached(Noise(first=60), tmp_path / "calm", seed=1)


class Sum(Noise):
    """Adds draws to the sample of another dataset."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getitem__(self, index: int) -> float:
        self.first_draw = random.random()
        return self.first_draw + 10 * self.inner[index] + 100 * random.random()


def test_caches_inside_each_other_draw_different_numbers() -> None:
    inner = cached(Noise(), "ram")
    outer = cached(Sum(inner), "ram")
    sample, drawn_inside = outer[7], inner[7]
    assert outer.dataset.first_draw != drawn_inside
    filled = cached(Noise(), "ram")
    for index in range(60):
        filled[index]
    assert cached(Sum(filled), "ram")[7] == sample
    assert cached(Sum(cached(Noise(), "ram")), "ram")[7] == sample


def test_a_dataset_may_read_its_own_cache() -> None:
    class Chain(Noise):
        data: Any = None

        def __getitem__(self, index: int) -> float:
            before = self.data[index - 1] if index % 10 and self.data is not None else 0.0
            return before + random.random()

    def chain(indices: Any) -> list[float]:
        source = Chain()
        source.data = data = cached(source, "ram")
        for index in indices:
            data[index]
        return [data[index] for index in range(60)]

    assert chain(range(60)) == chain(reversed(range(60)))


def test_a_pickled_cache_computes_the_same(tmp_path: Path) -> None:
    data = cached(Noise(), tmp_path / "a")
    copy = pickle.loads(pickle.dumps(data))
    other = cached(Noise(), tmp_path / "b")
    assert copy[7] == other[7]
    assert data.num_ready == 4  # the copy writes to the same files


def test_while_other_threads_load_no_generator_is_set_and_a_draw_is_told() -> None:
    data = cached(Noise(first=40), "ram")
    loader = SampleRandomness(0)
    loader.skip_observation()
    loader.begin_unseeded(is_shared=True)
    assert data[7] == 7 / 64
    loader.end_unseeded()
    assert data.num_ready == 4
    loader.begin_unseeded(is_shared=True)
    with pytest.raises(UnexpectedDraw):
        data[47]
    with pytest.raises(UnexpectedDraw):
        loader.end_unseeded()
    assert data.num_ready == 4  # its draws belong to no index
    assert data[47] == cached(Noise(first=40), "ram")[47]


def test_a_sample_s_rng_goes_on_as_if_nothing_had_been_computed() -> None:
    data = cached(Noise(DRAWS["rng"]), "ram")

    def sample(index: int) -> list[float]:
        return [penstock.rng().random(), data[index], penstock.rng().random()]

    randomness = SampleRandomness(0)
    computed, found = (randomness.call(sample, 7, 3) for _ in range(2))
    assert computed == found
    assert len(set(computed)) == 3
