"""Permutations are bijections with inverses and partitions, for any length, key and shard."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.bucketing import BucketedBatches
from penstock.order.keys import make_key
from penstock.order.permutation import Permutation
from penstock.order.samplers import SeededOrder
from penstock.order.split import split

pytestmark = pytest.mark.legacy

SEEDS = st.integers(-(2**63), 2**64 - 1)
EPOCHS = st.integers(0, 2**63 - 1)
LENGTHS = st.one_of(st.integers(0, 50), st.integers(0, 9000))
ANY_LENGTHS = st.one_of(LENGTHS, st.integers(1, 2**62), st.integers(0, 62).map(lambda n: 2**n))


@given(length=LENGTHS, seed=SEEDS, epoch=EPOCHS)
def test_the_shuffle_of_any_length_is_a_bijection(length: int, seed: int, epoch: int) -> None:
    shuffle = Permutation(length, make_key(0, seed, epoch))
    found = shuffle.at(np.arange(length))
    assert np.array_equal(np.sort(found), np.arange(length))


@given(data=st.data(), length=ANY_LENGTHS, seed=SEEDS, epoch=EPOCHS)
def test_the_inverse_leads_back_at_any_length(
    data: Any, length: int, seed: int, epoch: int
) -> None:
    if not length:
        return
    shuffle = Permutation(length, make_key(0, seed, epoch))
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    found = shuffle.at(np.array(places, dtype=np.int64)).tolist()
    assert found == [shuffle.index_at(place) for place in places]
    assert all(0 <= index < length for index in found)
    assert [shuffle.position_of(index) for index in found] == places
    assert [shuffle.index_at(shuffle.position_of(place)) for place in places] == places


@given(
    length=st.integers(0, 300),
    seed=SEEDS,
    world_size=st.integers(1, 20),
    batch_size=st.integers(1, 20),
    start=st.integers(0, 300),
    shuffle=st.booleans(),
)
def test_shards_partition_what_is_left_of_the_epoch(
    length: int, seed: int, world_size: int, batch_size: int, start: int, shuffle: bool
) -> None:
    start = min(start, length)
    whole = list(SeededOrder(length, seed=seed, shuffle=shuffle))
    shards = {
        (drop_last, padding): [
            SeededOrder(
                length,
                seed=seed,
                shuffle=shuffle,
                rank=rank,
                world_size=world_size,
                batch_size=batch_size,
                drop_last=drop_last,
                padding=padding,
            ).starting_at(start)
            for rank in range(world_size)
        ]
        for drop_last, padding in ((False, False), (True, False), (False, True))
    }
    for orders in shards.values():
        for order in orders:
            found = list(order)
            assert len(order) == len(found)
            assert [order[place] for place in range(len(order))] == found
            positions = [order.global_position(place) for place in range(len(order))]
            assert [whole[position % length] for position in positions] == found
    assert sorted(itertools.chain(*shards[False, False])) == sorted(whole[start:])
    num_whole = (length - start) // (world_size * batch_size)
    assert {len(order) for order in shards[True, False]} == {num_whole * batch_size}
    assert len({len(order) for order in shards[False, True]}) == 1
    padded = list(itertools.chain(*shards[False, True]))
    assert set(padded) >= set(whole[start:])
    assert len(padded) - (length - start) < world_size


@given(
    global_batch=st.sampled_from([12, 24]),
    one=st.sampled_from([1, 2, 3]),
    other=st.sampled_from([4, 6, 12]),
    num_steps=st.integers(0, 5),
    length=st.integers(0, 200),
)
def test_another_number_of_ranks_loads_the_same_global_batches(
    global_batch: int, one: int, other: int, num_steps: int, length: int
) -> None:
    def steps(world_size: int) -> list[list[int]]:
        size = global_batch // world_size
        orders = [
            list(SeededOrder(length, rank=rank, world_size=world_size, batch_size=size))
            for rank in range(world_size)
        ]
        num = max(-(-len(order) // size) for order in orders)
        return [
            [index for order in orders for index in order[step * size : step * size + size]]
            for step in range(num)
        ]

    assert steps(one) == steps(other)


@given(
    lengths=st.lists(st.integers(0, 60), max_size=200),
    max_tokens=st.one_of(st.none(), st.integers(60, 300)),
    bucket_batches=st.integers(1, 10),
    seed=SEEDS,
    world_size=st.integers(1, 5),
)
def test_batches_by_length_hold_every_sample_once(
    lengths: list[int],
    max_tokens: int | None,
    bucket_batches: int,
    seed: int,
    world_size: int,
) -> None:
    batches = list(
        itertools.chain.from_iterable(
            BucketedBatches(
                lengths,
                batch_size=7 if max_tokens is None else None,
                max_tokens=max_tokens,
                bucket_batches=bucket_batches,
                seed=seed,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        )
    )
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        longest = max(lengths[index] for index in batch)
        assert longest * len(batch) <= (max_tokens or 7 * 60)


@given(
    length=st.integers(0, 3000),
    weights=st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(any),
    seed=SEEDS,
)
def test_parts_partition_any_dataset(length: int, weights: list[int], seed: int) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    parts = split(range(length), fractions, seed=seed)
    assert sorted(itertools.chain(*(part.indices for part in parts))) == list(range(length))
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * length) <= 2
