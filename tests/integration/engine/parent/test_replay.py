"""``penstock.replay`` loads one sample alone, bit-identical to the sample in training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, default_collate

import penstock
from penstock import BucketedBatches, DataLoader, SeededOrder
from penstock.errors import BadArgument
from support.datasets import Draws, Numbers, Shards, assert_same, draw

legacy = pytest.mark.legacy


class ByBatch(Draws):
    """Draws for a whole batch in one call, so samples depend on the samples before them."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ should have been used")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [draw(index) for index in indices]


def make(dataset: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_size": 5, "shuffle": True, "seed": 2, **arguments}
    return DataLoader(Draws(23) if dataset is None else dataset, **arguments)


def seen_in_training(loader: Any, num_epochs: int = 2) -> dict[tuple[int, int], Any]:
    """Return each sample of each epoch, by (epoch, index)."""
    return {
        (epoch, int(batch[0][row])): [field[row].clone() for field in batch]
        for epoch in range(num_epochs)
        for batch in loader
        for row in range(len(batch[0]))
    }


def assert_replayed(loader: Any, seen: dict[tuple[int, int], Any]) -> None:
    assert seen
    for (epoch, index), fields in seen.items():
        batch = default_collate([penstock.replay(loader, epoch, index)])
        assert_same([field[0] for field in batch], fields)


@legacy
@pytest.mark.parametrize("arguments", [{}, {"shuffle": False}, {"drop_last": True}])
def test_a_sample_alone_is_the_one_that_training_saw(arguments: dict[str, Any]) -> None:
    assert_replayed(make(**arguments), seen_in_training(make(num_workers=3, **arguments)))


@legacy
def test_a_sample_of_a_dataset_that_loads_batches_is_replayed_with_its_batch() -> None:
    loader = make(ByBatch(23), num_workers=2)
    assert_replayed(make(ByBatch(23)), seen_in_training(loader))


def test_a_sample_of_a_subset_is_replayed_by_its_place_there() -> None:
    loader = make(Subset(Draws(40), range(10, 33)), num_workers=2)
    by_place = {(e, i - 10): v for (e, i), v in seen_in_training(loader).items()}
    assert_replayed(loader, by_place)


@legacy
@pytest.mark.parametrize("dataset", [Draws(23), ByBatch(23)], ids=["samples", "batches"])
@pytest.mark.parametrize("more", [{}, {"drop_last": True}])
def test_a_sample_of_any_rank_is_replayed_by_any_rank(dataset: Any, more: dict[str, Any]) -> None:
    ranks = [make(dataset, batch_size=3, rank=rank, world_size=3, **more) for rank in range(3)]
    for loader in ranks:
        assert_replayed(ranks[0], seen_in_training(loader))


def test_a_padded_epoch_is_replayed() -> None:
    loaders = [make(batch_size=3, rank=r, world_size=4, padding=True) for r in range(4)]
    seen = {
        key: value for loader in loaders[::-1] for key, value in seen_in_training(loader).items()
    }
    assert len(seen) == 2 * 23
    assert_replayed(loaders[0], seen)


def test_a_resumed_epoch_is_replayed() -> None:
    first, other = make(), make()
    next(iter(first))
    other.load_state_dict(first.state_dict())
    assert_replayed(make(), seen_in_training(other, num_epochs=1))


def test_the_caller_s_generators_and_the_loader_are_left_as_they_were() -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    penstock.replay(loader, 5, 7)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
    assert loader.state_dict() == state
    assert len(list(batches)) == 4


def test_another_epoch_or_seed_gives_another_sample() -> None:
    samples = [penstock.replay(make(seed=s), e, 7)[1] for s, e in ((2, 0), (2, 1), (3, 0))]
    assert len(set(samples)) == 3


BAD: dict[str, tuple[Any, int, Any, str]] = {
    "no seed": (lambda: make(seed=None), 0, 0, "needs a loader with a seed"),
    "torch's loader": (lambda: TorchDataLoader(Numbers()), 0, 0, "needs a loader with a seed"),
    "worker randomness": (lambda: make(randomness="worker"), 0, 0, "depend on its worker"),
    "a sampler": (
        lambda: make(shuffle=None, sampler=[3, 1]),
        0,
        3,
        "list does not support looking up",
    ),
    "a batch sampler": (
        lambda: DataLoader(Draws(9), batch_sampler=BucketedBatches([1] * 9, batch_size=3), seed=1),
        0,
        0,
        "BucketedBatches does not support looking up",
    ),
    "an iterable": (lambda: DataLoader(Shards(), seed=1), 0, 0, "does not support looking up"),
    "no such index": (make, 0, 23, "index=23"),
    "a negative index": (make, 0, -1, "index=-1"),
    "no such epoch": (make, -1, 0, "epoch=-1"),
    "half an index": (make, 0, 1.5, "must be an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_replayed_is_refused(name: str) -> None:
    loader, epoch, index, words = BAD[name]
    with pytest.raises(BadArgument, match=words):
        penstock.replay(loader(), epoch, index)


def test_a_sample_that_training_dropped_is_not_replayed() -> None:
    loader = make(drop_last=True)
    dropped = SeededOrder(23, seed=2).index_at(22)
    with pytest.raises(BadArgument, match="dropped in this epoch by drop_last"):
        penstock.replay(loader, 0, dropped)
