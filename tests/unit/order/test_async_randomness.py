"""Draws of async samples: which generator moved, and what penstock.rng() gives each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock import rng
from penstock.order.async_randomness import AsyncRandomness, describe_draw
from penstock.order.global_generators import preserved_generators, watching_state_reads
from penstock.order.sample_randomness import SampleRandomness

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with preserved_generators(), watching_state_reads():
        yield


class Holder:
    def __init__(self) -> None:
        self.noise = np.random.default_rng(0)


HELD = Holder()

DRAWS: dict[str, Callable[[], Any]] = {
    "Python's random module": random.random,
    "NumPy's numpy.random": np.random.rand,
    "torch's default generator": lambda: torch.rand(1),
    "the state of a global generator": lambda: random.getstate(),
    "dataset.noise (numpy.random.Generator)": HELD.noise.random,
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_is_named(name: str) -> None:
    randomness = AsyncRandomness(0, HELD)
    mark = randomness.mark()
    assert randomness.moved_since(mark) == []
    DRAWS[name]()
    assert randomness.moved_since(mark) == [name]
    assert name in str(describe_draw([name], 3))


def test_draws_that_belong_to_the_sample_are_not_reported() -> None:
    randomness = AsyncRandomness(0, HELD)
    mark = randomness.mark()
    randomness.rng_at(0, 1).generator().random(100)
    random.Random(4).random()
    np.random.default_rng(4).random()
    torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert randomness.moved_since(mark) == []


def test_rng_gives_the_numbers_that_a_sample_without_async_draws() -> None:
    plain = SampleRandomness(7)
    plain.begin(2)
    expected = plain.call(lambda _: rng().random(4).tolist(), 0, 11)
    alone = AsyncRandomness(7, None).rng_at(2, 11)
    assert alone.generator().random(4).tolist() == expected
    other = AsyncRandomness(7, None).rng_at(2, 12)
    assert other.generator().random(4).tolist() != expected
