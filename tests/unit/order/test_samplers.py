"""Orders as samplers for any DataLoader, by rank and from any start."""

from __future__ import annotations

import copy
import itertools
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler

from penstock.errors import BadArgument
from penstock.order.base_order import CHUNK, Order
from penstock.order.ranks import RankShard, find_rank
from penstock.order.samplers import SeededOrder, WeightedOrder

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("length", [0, 1, 10, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_index_comes_once(length: int, shuffle: bool) -> None:
    order = SeededOrder(length, seed=5, shuffle=shuffle)
    found = list(order)
    assert len(order) == len(found) == length
    assert sorted(found) == list(range(length))
    assert (found == list(range(length))) == (not shuffle or length < 2)
    assert all(type(index) is int for index in found[:5])


def test_torch_s_loader_takes_it_as_a_sampler() -> None:
    order = SeededOrder(10, seed=1)
    loader: Any = TorchDataLoader(range(10), batch_size=4, sampler=order)  # type: ignore[arg-type]
    assert torch.cat(list(loader)).tolist() == list(order)
    assert len(loader) == 3


def test_iterating_again_gives_the_same_and_another_epoch_or_seed_something_else() -> None:
    order = SeededOrder(100, seed=1)
    first = list(order)
    assert list(order) == first
    order.set_epoch(1)
    second = list(order)
    assert second != first
    assert list(SeededOrder(100, seed=2)) not in (first, second)
    assert list(SeededOrder(100, seed=1, epoch=1)) == second


def test_torch_s_random_sampler_is_not_a_function_of_anything() -> None:
    sampler = RandomSampler(range(100))
    assert list(sampler) != list(sampler)


def test_an_iteration_that_has_begun_stays_in_its_epoch() -> None:
    order = SeededOrder(3 * CHUNK, seed=1)
    expected = list(order)
    begun = iter(order)
    head = list(itertools.islice(begun, 5))
    order.set_epoch(1)
    assert head + list(begun) == expected


def test_any_place_is_known_alone_and_leads_back() -> None:
    order = SeededOrder(50, seed=3)
    found = list(order)
    for place in range(50):
        assert order[place] == order.index_at(place) == found[place]
        assert order.position_of(found[place]) == place == order.global_position(place)
    assert order[-1] == found[-1]
    for bad in (50, -51):
        with pytest.raises(IndexError):
            order[bad]


def test_a_dataset_stands_for_its_length() -> None:
    assert list(SeededOrder("abc", seed=0)) == list(SeededOrder(3, seed=0))


def test_a_pickled_or_copied_one_is_the_same() -> None:
    order = SeededOrder(10**6, seed=3, rank=1, world_size=2)
    for twin in (pickle.loads(pickle.dumps(order)), copy.deepcopy(order)):
        assert list(itertools.islice(twin, 10)) == list(itertools.islice(order, 10))


def test_a_billion_samples_need_no_memory() -> None:
    tracemalloc.start()
    try:
        order = SeededOrder(10**9, seed=0)
        first = list(itertools.islice(order, 64))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(first)) == 64
    assert peak_bytes < 1_000_000


# -- start positions -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 63, 100])
def test_what_starts_later_is_the_rest(start: int) -> None:
    order = SeededOrder(100, seed=2)
    rest = order.starting_at(start)
    assert list(rest) == list(order)[start:]
    assert (rest.start, len(rest), len(order)) == (start, 100 - start, 100)
    if start < 100:
        assert rest.global_position(0) == start


def test_a_start_outside_is_refused() -> None:
    for start in (-1, 101):
        with pytest.raises(BadArgument, match="position="):
            SeededOrder(100).starting_at(start)


def test_another_number_of_ranks_goes_on_where_the_first_stopped() -> None:
    def global_stream(order: SeededOrder, world_size: int) -> list[int]:
        ranks = [ranked(order, rank, world_size) for rank in range(world_size)]
        size = 12 // world_size
        steps = range(0, len(ranks[0]), size)
        return [index for step in steps for rank in ranks for index in rank[step : step + size]]

    def ranked(order: SeededOrder, rank: int, world_size: int) -> list[int]:
        own = SeededOrder(
            order.length, seed=order.seed, batch_size=12 // world_size, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        return list(own.starting_at(order.start))

    whole = SeededOrder(100, seed=4)
    for world_size in (1, 2, 3, 4):
        assert global_stream(whole, world_size) == list(whole)
    assert global_stream(whole.starting_at(36), 4) == list(whole)[36:]


# -- ranks -----------------------------------------------------------------------------------------


def shards(world_size: int, length: int = 23, **more: Any) -> list[list[int]]:
    ranks = range(world_size)
    return [
        list(SeededOrder(length, seed=9, rank=rank, world_size=world_size, **more))
        for rank in ranks
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 23, 40])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_shards_lose_nothing_and_double_nothing(world_size: int, batch_size: int) -> None:
    parts = shards(world_size, batch_size=batch_size)
    assert sorted(itertools.chain(*parts)) == list(range(23))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_with_drop_last_all_ranks_have_whole_batches_only() -> None:
    parts = shards(3, batch_size=2, drop_last=True)
    assert [len(part) for part in parts] == [6, 6, 6]
    assert len(set(itertools.chain(*parts))) == 18
    assert [len(part) for part in shards(30, drop_last=True)] == [0] * 30


def test_with_padding_the_end_is_filled_from_the_start() -> None:
    parts = shards(4, batch_size=2, padding=True)
    assert [len(part) for part in parts] == [6, 6, 6, 6]
    order = list(SeededOrder(23, seed=9))
    rows = [part[start : start + 2] for start in (0, 2, 4) for part in parts]
    assert list(itertools.chain(*rows)) == [*order, order[0]]
    order3 = list(SeededOrder(3, seed=9))
    padded = itertools.chain(*shards(7, length=3, padding=True))
    assert list(padded) == [*order3, *order3, order3[0]]


def test_more_ranks_than_samples_and_no_samples_at_all() -> None:
    assert sorted(map(len, shards(5, length=2))) == [0, 0, 0, 1, 1]
    assert shards(3, length=0) == shards(3, length=0, padding=True) == [[], [], []]


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
        {"world_size": 0},
        {"batch_size": 0},
        {"drop_last": True, "padding": True},
        {"seed": 2**64},
        {"epoch": -1},
        {"length": -1},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        SeededOrder(**{"length": 10, **arguments})


def test_a_batch_of_a_rank_is_a_run_of_positions() -> None:
    shard = RankShard(length=100, batch_size=4, rank=1, world_size=3)
    positions = shard.positions(0, shard.num_local).tolist()
    for first in range(0, len(positions), 4):
        batch = positions[first : first + 4]
        assert batch == list(range(batch[0], batch[0] + len(batch)))
    assert positions[:4] == [4, 5, 6, 7]


def test_the_rank_is_asked_from_torch_distributed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BadArgument, match="not initialized"):
        find_rank(True, None, None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert find_rank(True, None, None) == (2, 4)


# -- weights ---------------------------------------------------------------------------------------


def test_weights_decide_how_often_an_index_comes() -> None:
    weights = [1.0, 0.0, 3.0, 0.5, 0.0]
    found = np.bincount(list(WeightedOrder(weights, num_samples=90_000, seed=1)), minlength=5)
    assert found[1] == found[4] == 0
    assert np.allclose(found / 90_000, np.array(weights) / 4.5, atol=0.01)


def test_a_weighted_order_is_a_function_of_seed_and_epoch() -> None:
    order = WeightedOrder(np.arange(100), seed=1)
    first = list(order)
    assert first == list(order)
    assert [order[place] for place in range(100)] == first
    assert list(order.starting_at(30)) == first[30:]
    order.set_epoch(1)
    assert list(order) != first
    assert list(WeightedOrder(np.arange(100), seed=2)) != first


def test_a_weighted_order_is_divided_among_ranks() -> None:
    def make(**more: Any) -> Order:
        return WeightedOrder([1, 2, 3, 4], num_samples=10, seed=3, **more)

    parts = [list(make(rank=rank, world_size=2)) for rank in (0, 1)]
    whole = list(make())
    assert [parts[0], parts[1]] == [whole[0::2], whole[1::2]]


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1e308, 1e308], [[1.0]], 3.0]
)
def test_weights_that_make_no_sense_are_refused(weights: Any) -> None:
    with pytest.raises(BadArgument, match="weights"):
        WeightedOrder(weights)
