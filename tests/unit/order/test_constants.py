"""Order and randomness equal constants that were computed once.

These tests run on every leg (Python 3.10 with torch 1.13.1 and NumPy 1, and current versions) and
on every architecture: the windows leg runs x86-64 code. A change breaks the reproducibility of
published seeds. It needs a new major version, not a new constant.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from penstock.order.bucketing import BucketedBatches
from penstock.order.global_generators import preserved_generators
from penstock.order.keys import make_key
from penstock.order.rng import rng
from penstock.order.sample_randomness import SampleRandomness
from penstock.order.samplers import SeededOrder, WeightedOrder
from penstock.order.split import split

pytestmark = [pytest.mark.legacy, pytest.mark.windows]


def digest(numbers: Any) -> str:
    """Return the hash of integers, independent of the byte order."""
    return hashlib.sha256(np.asarray(list(numbers), dtype="<i8").tobytes()).hexdigest()[:16]


ORDERS = {
    (10, 0, 0): "a784bb2cf5a6a2fc",
    (10, 0, 1): "2bf324c65a00fda3",
    (10, 1, 0): "fd586102eeff9210",
    (2048, 0, 0): "18af31393006f727",
    (2049, 0, 0): "3d311f17d2f2fb3e",
    (10007, -1, 3): "aa71fc4ff4d4c965",
    (50000, 9223372036854775807, 100): "50eb5a8760b95c4c",
    (1000000, 7, 2): "8e0dd242a855650c",
    (1000000000, 0, 0): "50f131829684cc23",
    (1000000000, 0, 1): "3e4cb95437ed78e7",
    (4611686018427387904, 18446744073709551615, 1099511627776): "21d4710cd3b1d18b",
}


def test_the_key_of_a_seed_and_an_epoch() -> None:
    assert [make_key(0, 0), make_key(1, -1, 7)] == [12035550249420947055, 10242404032080395767]


@pytest.mark.parametrize(("length", "seed", "epoch"), ORDERS)
def test_the_order_of_an_epoch(length: int, seed: int, epoch: int) -> None:
    order = SeededOrder(length, seed=seed, epoch=epoch)
    assert digest(itertools.islice(order, 20_000)) == ORDERS[length, seed, epoch]


def test_the_first_places_of_a_billion() -> None:
    assert list(itertools.islice(SeededOrder(10**9, seed=0), 5)) == [
        297977346,
        799797019,
        576481049,
        117772160,
        960130394,
    ]


def test_a_weighted_order() -> None:
    weights = [(index * 7919) % 101 / 7 for index in range(1000)]
    assert digest(WeightedOrder(weights, seed=3, epoch=1)) == "a8bf1e64a61ee199"


def test_batches_by_length() -> None:
    lengths = [(index * 7919) % 101 for index in range(1000)]
    batches = BucketedBatches(lengths, max_tokens=1000, bucket_batches=4, seed=3, epoch=1)
    assert digest(itertools.chain(*batches)) == "3af922a1223d89db"


def test_a_split() -> None:
    train, test = split(range(5000), [0.8, 0.2], seed=42)
    assert (digest(train.indices), digest(test.indices)) == ("c26e6007aae245f1", "8627b14c9ed5930c")


def augment(_: Any) -> list[int]:
    """Return an augmentation's draws, integers and floats, as bits."""
    return [
        random.getrandbits(62),
        random.randrange(1000),
        int(random.random() * 2**53),
        int(np.random.randint(0, 1000)),
        int(np.random.rand() * 2**53),
        int(torch.randint(0, 1000, (1,))),
        int(torch.rand(1).item() * 2**24),
        int(rng().integers(0, 1000)),
        int(rng().random() * 2**53),
    ]


AUGMENTATIONS = {
    (0, 0, 0): "3d0766077fd3a583",
    (0, 1, 0): "85ff34c97097ec16",
    (1, 0, 0): "25c552cebe4803d0",
    (-1, 3, 1000): "2181371489ef12e4",
    (9223372036854775807, 2147483648, 1099511627776): "67a1166ed7c7d693",
}


@pytest.mark.parametrize(("seed", "epoch", "position"), AUGMENTATIONS)
def test_what_a_sample_draws(seed: int, epoch: int, position: int) -> None:
    with preserved_generators():
        randomness = SampleRandomness(seed)
        randomness.begin(epoch)
        found = [randomness.call(augment, 0, position + step) for step in range(20)]
    assert digest(itertools.chain(*found)) == AUGMENTATIONS[seed, epoch, position]


def test_torch_s_own_shuffle_is_another() -> None:
    generator = torch.Generator().manual_seed(0)
    assert digest(torch.randperm(10, generator=generator).tolist()) != ORDERS[10, 0, 0]
