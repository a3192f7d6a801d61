"""Batches of similar length."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock.errors import BadArgument
from penstock.order.bucketing import BucketedBatches

pytestmark = pytest.mark.legacy

LENGTHS = np.random.RandomState(0).randint(1, 200, 1003)


def make(**more: Any) -> BucketedBatches:
    return BucketedBatches(LENGTHS, **{"batch_size": 8, "bucket_batches": 5, **more})


def padded(batches: list[list[int]]) -> int:
    return sum(int(LENGTHS[batch].max()) * len(batch) for batch in batches)


@pytest.mark.parametrize("limit", [{"batch_size": 8}, {"batch_size": None, "max_tokens": 800}])
def test_every_sample_is_in_one_batch(limit: dict[str, Any]) -> None:
    batches = make(**limit)
    found = list(batches)
    assert len(found) == len(batches)
    assert sorted(itertools.chain(*found)) == list(range(1003))


def test_batches_have_the_size_that_was_asked_for_but_one() -> None:
    assert sorted(map(len, make())) == [3, *[8] * 125]
    assert sorted(map(len, make(drop_last=True))) == [8] * 125


def test_no_batch_holds_more_tokens_than_allowed_and_most_are_full() -> None:
    batches = list(make(batch_size=None, max_tokens=800))
    sizes = [int(LENGTHS[batch].max()) * len(batch) for batch in batches]
    assert max(sizes) <= 800
    assert np.median(sizes) > 600


def test_there_is_less_padding_than_without_buckets() -> None:
    needed = int(LENGTHS.sum())
    in_order = [list(range(first, min(first + 8, 1003))) for first in range(0, 1003, 8)]
    assert padded(list(make())) < 1.15 * needed
    assert padded(in_order) > 1.5 * needed


def test_an_epoch_is_a_function_of_seed_and_epoch_and_mixes_company_and_order() -> None:
    batches = make(seed=1)
    first = list(batches)
    assert list(batches) == first
    batches.set_epoch(1)
    second = list(batches)
    assert list(make(seed=1, epoch=1)) == second
    assert len(second) == len(first)
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    sizes = [LENGTHS[batch].mean() for batch in first]
    assert abs(np.corrcoef(sizes[:-1], sizes[1:])[0, 1]) < 0.3


def test_it_is_not_always_the_same_samples_that_are_left_out() -> None:
    def left_out(epoch: int) -> set[int]:
        return set(range(1003)) - set(itertools.chain(*make(drop_last=True, epoch=epoch)))

    dropped = [frozenset(left_out(epoch)) for epoch in range(5)]
    assert [len(some) for some in dropped] == [3] * 5
    assert len(set(dropped)) == 5


def test_an_iteration_that_has_begun_stays_in_its_epoch() -> None:
    batches = make()
    expected = list(batches)
    begun = iter(batches)
    head = next(begun)
    batches.set_epoch(1)
    assert [head, *begun] == expected


def test_any_batch_is_known_alone_also_from_a_later_start() -> None:
    batches = make()
    found = list(batches)
    assert [batches[place] for place in reversed(range(len(batches)))] == found[::-1]
    assert list(batches.starting_at(50)) == found[50:]
    assert batches[-1] == found[-1] == batches.batch_at(len(found) - 1)
    with pytest.raises(IndexError):
        batches[len(found)]


def test_positions_are_unique_within_the_epoch() -> None:
    batches = make()
    firsts = [batches.global_position(place) for place in range(len(batches))]
    taken = [
        first + row
        for first, batch in zip(firsts, batches, strict=True)
        for row in range(len(batch))
    ]
    assert sorted(taken) == list(range(1003))


def test_ranks_share_the_batches_out() -> None:
    whole = list(make())
    parts = [list(make(rank=rank, world_size=4)) for rank in range(4)]
    assert sorted(map(len, parts)) == [31, 31, 32, 32]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    assert parts[1][0] == whole[1]
    assert [len(list(make(rank=rank, world_size=4, drop_last=True))) for rank in range(4)] == [
        31
    ] * 4
    padded_parts = [list(make(rank=rank, world_size=4, padding=True)) for rank in range(4)]
    assert [len(part) for part in padded_parts] == [32] * 4
    assert padded_parts[3][-1] == whole[1]


def test_torch_s_loader_takes_it_as_a_batch_sampler() -> None:
    batches = make()
    loader: Any = TorchDataLoader(range(1003), batch_sampler=batches)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == list(batches)
    assert torch.is_tensor(next(iter(loader)))


def test_no_samples_make_no_batches() -> None:
    assert list(BucketedBatches([], batch_size=4)) == []
    assert list(BucketedBatches([], max_tokens=4, drop_last=True)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": None},
        {"max_tokens": 5},
        {"batch_size": 0},
        {"batch_size": None, "max_tokens": 100},
        {"bucket_batches": 0},
        {"lengths": [1.5]},
        {"lengths": [[1]]},
        {"lengths": [3, -1]},
        {"rank": 1},
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    lengths = arguments.pop("lengths", LENGTHS)
    with pytest.raises(BadArgument):
        BucketedBatches(lengths, **{"batch_size": 8, **arguments})
