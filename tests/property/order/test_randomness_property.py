"""Randomness is a function of (seed, epoch, position), regardless of earlier draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.global_generators import preserved_generators, watching_state_reads
from penstock.order.sample_randomness import SampleRandomness
from support.datasets import assert_same

pytestmark = pytest.mark.legacy

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)


def draw_both(_: Any) -> Any:
    return random.random(), random.gauss(0, 1), np.random.rand(2), torch.rand(2)


SAMPLES = {
    "nothing": lambda _: 0,
    "torch": lambda _: torch.rand(2),
    "python": lambda _: random.random(),
    "python's gauss": lambda _: random.gauss(0, 1),
    "numpy": lambda _: np.random.rand(2),
    "numpy's normals": lambda _: np.random.standard_normal(3),
    "all": draw_both,
}
WALKS = st.lists(
    st.tuples(st.sampled_from(list(SAMPLES)), st.one_of(st.integers(0, 200), POSITIONS)),
    min_size=1,
    max_size=40,
)


@given(
    seed=SEEDS,
    epoch=st.integers(0, 2**31),
    num_silent=st.sampled_from([0, 20]),
    walk=WALKS,
    noise=st.lists(st.sampled_from([random.random, np.random.rand]), max_size=3),
)
def test_any_walk_over_positions_draws_what_each_alone_would_draw(
    seed: int, epoch: int, num_silent: int, walk: list[tuple[str, int]], noise: list[Any]
) -> None:
    with preserved_generators(), watching_state_reads():
        walker = SampleRandomness(seed)
        walker.begin(epoch)
        for position in range(num_silent):
            walker.call(SAMPLES["nothing"], 0, position)
        for name, position in walk:
            for disturb in noise:  # draws by the caller between two batches
                disturb()
            walker.snapshot()
            found = walker.call(SAMPLES[name], 0, position)
            alone = SampleRandomness(seed)
            alone.begin(epoch)
            assert_same(found, alone.call(SAMPLES[name], 0, position))


@given(seed=SEEDS, epoch=st.integers(0, 100), one=POSITIONS, other=POSITIONS)
def test_two_positions_never_draw_alike(seed: int, epoch: int, one: int, other: int) -> None:
    if one == other:
        return
    with preserved_generators():
        walker = SampleRandomness(seed)
        walker.begin(epoch)
        assert walker.call(SAMPLES["python"], 0, one) != walker.call(SAMPLES["python"], 0, other)


@given(seed=SEEDS, position=st.integers(0, 1000))
def test_the_caller_s_generators_are_as_they_were_afterwards(seed: int, position: int) -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with preserved_generators():
        SampleRandomness(seed).call(draw_both, 0, position)
    assert_same((random.getstate(), np.random.get_state(), torch.get_rng_state()), states)
