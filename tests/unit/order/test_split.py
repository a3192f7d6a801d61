"""Splits of a dataset lose and repeat no sample, and build no list."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, random_split

from penstock import DataLoader, split
from penstock.errors import BadArgument
from support.datasets import Batched, Numbers

pytestmark = pytest.mark.legacy

FRACTIONS = [
    [0.8, 0.2],
    [0.7, 0.2, 0.1],
    [0.4, 0.3, 0.2, 0.1],
    [1 / 3] * 3,
    [1.0],
    [0.999, 0.001],
    [0.0, 1.0],
]


@pytest.mark.parametrize("fractions", FRACTIONS)
@pytest.mark.parametrize("length", [0, 1, 7, 100, 5003])
def test_every_sample_is_in_one_part(fractions: list[float], length: int) -> None:
    parts = split(range(length), fractions, seed=2)
    assert sorted(index for part in parts for index in part.indices) == list(range(length))
    assert [len(part) for part in parts] == [len(list(part.indices)) for part in parts]


@pytest.mark.filterwarnings("ignore:Length of split at index")
@pytest.mark.parametrize("fractions", FRACTIONS)
@pytest.mark.parametrize("length", [7, 100, 5003])
def test_fractions_are_rounded_as_torch_rounds_them(fractions: list[float], length: int) -> None:
    if sum(fractions) > 1:
        pytest.skip("torch adds them up to more than 1")
    try:
        theirs = random_split(range(length), fractions)  # type: ignore[arg-type]
    except ValueError:
        pytest.skip("torch 1.13.0 and older take no fractions")
    assert [len(part) for part in split(range(length), fractions)] == [*map(len, theirs)]


def test_numbers_of_samples_are_taken_too() -> None:
    assert [len(part) for part in split(range(10), [3, 7])] == [3, 7]


def test_the_parts_are_a_function_of_the_seed() -> None:
    def first(seed: int) -> list[int]:
        return list(split(range(1000), [0.5, 0.5], seed=seed)[0].indices)

    assert first(1) == first(1) != first(2)


def test_a_part_is_a_dataset_that_both_loaders_take() -> None:
    train, _ = split(Numbers(20), [15, 5], seed=1)
    assert isinstance(train, Dataset)
    assert train.dataset.length == 20
    expected = list(train.indices)
    for loader in (TorchDataLoader(train, 4), DataLoader(train, 4), DataLoader(train, 4, False)):
        assert torch.cat([batch[1] for batch in loader]).tolist() == expected
    assert pickle.loads(pickle.dumps(train))[3][1] == train[3][1]


def test_batches_are_asked_for_at_once_where_the_dataset_offers_that() -> None:
    part, _ = split(Batched(20), [15, 5])
    assert callable(part.__getitems__)
    assert [index for _, index in part.__getitems__([0, 1])] == list(part.indices[:2])
    loader: Any = DataLoader(part, batch_size=15)
    assert next(iter(loader))[1].tolist() == list(part.indices)
    assert not hasattr(split(Numbers(4), [4])[0], "__getitems__")


def test_indices_are_a_sequence_without_a_list() -> None:
    tracemalloc.start()
    try:
        train, test = split(range(10**9), [0.9, 0.1], seed=3)
        index = test[5]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000
    assert index in test.indices
    assert index not in train.indices
    assert len(train.indices) == 900_000_000
    assert train.indices[7:10][1] == train.indices[8]
    assert np.asarray(test.indices[:3]).tolist() == list(test.indices[:3])
    assert test[-1] == test[len(test) - 1]
    with pytest.raises(IndexError):
        test[10**8]
    assert "x" not in test.indices


@pytest.mark.parametrize("lengths", [[0.5, 0.6], [3, 3], [-1, 11], ["a"], [10.5, -0.5], []])
def test_lengths_that_make_no_sense_are_refused(lengths: list[Any]) -> None:
    with pytest.raises(BadArgument, match="lengths="):
        split(range(10), lengths)


def test_a_list_of_places_is_handed_on_to_datasets_that_take_lists() -> None:
    part, _ = split(np.arange(10) * 10, [6, 4], seed=1)
    assert part[[0, 2]].tolist() == [part[0], part[2]]
