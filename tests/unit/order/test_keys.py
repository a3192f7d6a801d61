"""Keys of seeds and epochs, and the hash that makes them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from penstock.errors import BadArgument
from penstock.options import check_seed
from penstock.order.keys import make_key, mix64, splitmix64

pytestmark = pytest.mark.legacy


def test_seeds_epochs_and_streams_have_keys_of_their_own() -> None:
    parts = itertools.product(range(4), [*range(-20, 20), 2**63, 2**63 - 1], range(40))
    keys = [make_key(*part) for part in parts]
    assert len(set(keys)) == len(keys)


def test_a_negative_seed_is_the_unsigned_one_of_the_same_bits_as_in_torch() -> None:
    assert make_key(0, -1) == make_key(0, 2**64 - 1)
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (-1, 2**64 - 1)]
    assert torch.equal(*states)


def test_the_hash_of_arrays_is_the_hash_of_numbers() -> None:
    counters = np.array([0, 1, 2**40], dtype=np.uint64)
    golden = 0x9E3779B97F4A7C15
    expected = [mix64(77 + golden * (counter + 1)) for counter in (0, 1, 2**40)]
    assert splitmix64(77, counters).tolist() == expected


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30, 1.0, "1", None])
def test_seeds_that_torch_refuses_are_refused_here(seed: object) -> None:
    with pytest.raises(BadArgument, match="seed="):
        check_seed("seed", seed)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63), np.int64(-5), True])
def test_seeds_that_torch_takes_are_taken_here(seed: int) -> None:
    assert check_seed("seed", seed) == seed
    assert type(check_seed("seed", seed)) is int
