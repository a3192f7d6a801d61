"""Resuming with state held by samplers, generators and iterable datasets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from penstock import BucketedBatches, DataLoader, replay
from penstock.errors import BadState
from support.datasets import Draws, Numbers, assert_same, collect

pytestmark = pytest.mark.legacy


def stop_and_go(make: Any, taken: int, **other: Any) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the batches after ``taken``, without and with a stop, and the state in between."""
    loader = make()
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = collect(batches)
    resumed = make(**other)
    resumed.load_state_dict(state)
    return rest, collect(resumed), state


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_s_shuffle_without_a_seed_goes_on(num_workers: int) -> None:
    def make(**other: Any) -> DataLoader[Any]:
        return DataLoader(Draws(40), batch_size=4, shuffle=True, num_workers=num_workers, **other)

    torch.manual_seed(5)
    rest, resumed, state = stop_and_go(make, 3)
    assert_same(resumed, rest)
    assert len(json.dumps(state)) < 400


def test_a_generator_of_the_user_s_goes_on() -> None:
    def make(seed: int = 4) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Draws(40), batch_size=4, shuffle=True, generator=generator)

    rest, resumed, _ = stop_and_go(make, 3, seed=99)
    assert_same(resumed, rest)
    other = make(seed=99)
    assert [batch[0].tolist() for batch in other][3:] != [batch[0].tolist() for batch in rest]


class Backwards:
    """A sampler whose state is the number of times it was used."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_uses = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        self.num_uses += 1
        start = self.num_uses
        return iter([(start - place) % self.length for place in range(self.length)])

    def state_dict(self) -> dict[str, int]:
        return {"num_uses": self.num_uses}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_uses = state["num_uses"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_s_own_state_is_saved_through_it(num_workers: int) -> None:
    def run(taken: int) -> tuple[list[Any], DataLoader[Any]]:
        loader = DataLoader(
            Numbers(20), batch_size=4, sampler=Backwards(20), num_workers=num_workers, seed=0
        )
        list(loader)
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        return batches, loader  # type: ignore[return-value]

    batches, loader = run(2)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = collect(batches)
    resumed = DataLoader(Numbers(20), batch_size=4, sampler=Backwards(20), seed=0)
    resumed.load_state_dict(state)
    assert_same(collect(resumed), rest)


class Counting(IterableDataset):
    """Counts, with separate numbers for each worker and its own state."""

    def __init__(self, length: int = 24) -> None:
        self.length = length
        self.done = 0
        self.num_loaded = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        own = list(range(first, self.length, step))
        start, self.done = self.done, 0
        for place in range(start, len(own)):
            self.done = place + 1
            self.num_loaded += 1
            yield own[place]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


class Stateless(Counting):
    state_dict = None  # type: ignore[assignment]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_an_iterable_dataset_goes_on_by_itself(num_workers: int, taken: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Counting(), batch_size=3, num_workers=num_workers)

    rest, resumed, _ = stop_and_go(make, taken)
    assert_same(resumed, rest)


def test_an_iterable_dataset_that_goes_on_loads_nothing_twice() -> None:
    dataset = Counting()
    loader = DataLoader(dataset, batch_size=3)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    other = Counting()
    resumed = DataLoader(other, batch_size=3)
    resumed.load_state_dict(state)
    assert torch.cat(list(resumed)).tolist() == list(range(15, 24))
    assert other.num_loaded == 9


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_without_a_state_is_replayed_and_the_loader_says_so(
    num_workers: int,
) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stateless(), batch_size=3, num_workers=num_workers)

    with pytest.warns(UserWarning, match="4 batches are loaded again and dropped"):
        rest, resumed, _ = stop_and_go(make, 4)
    assert_same(resumed, rest)


def test_an_iterable_dataset_cannot_change_its_number_of_workers() -> None:
    loader = DataLoader(Counting(), batch_size=3, num_workers=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del batches
    other = DataLoader(Counting(), batch_size=3, num_workers=3)
    with pytest.raises(BadState, match="their number differs: 2 in the state, 3 here"):
        other.load_state_dict(state)
    assert len(list(other)) == 9  # unchanged: 8 numbers for each of 3 workers


@pytest.mark.parametrize(
    "edited",
    [
        [1],
        {"streams": "x", "next": 0},
        {"streams": {"a": {}}, "next": 0},
        {"streams": {"7": {}}, "next": 0},
        {"streams": {}, "next": 9},
        {"streams": {}},
    ],
)
def test_what_an_iterable_dataset_said_of_itself_cannot_be_edited(edited: Any) -> None:
    loader = DataLoader(Counting(), batch_size=3)
    next(iter(loader))
    state = loader.state_dict()
    other = DataLoader(Counting(), batch_size=3)
    with pytest.raises(BadState, match="the state's dataset is"):
        other.load_state_dict({**state, "dataset": edited})
    assert other.state_dict() == DataLoader(Counting(), batch_size=3).state_dict()


def test_a_sampler_of_torch_s_made_by_hand_goes_on() -> None:
    def make() -> DataLoader[Any]:
        dataset = Draws(30)
        return DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset))

    torch.manual_seed(1)
    rest, resumed, _ = stop_and_go(make, 2)
    assert_same(resumed, rest)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_at_once_walk_two_epochs(num_workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Draws(24), batch_size=4, shuffle=True, seed=2, num_workers=num_workers)

    loader = make()
    first, second = zip(*zip(loader, loader, strict=True), strict=True)
    alone = make()
    assert_same([collect(first), collect(second)], [collect(alone), collect(alone)])


def test_two_iterators_at_once_shuffle_as_torch_s_do() -> None:
    def indices(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Numbers(12), batch_size=4, shuffle=True)
        return [[a[1].tolist(), b[1].tolist()] for a, b in zip(loader, loader, strict=True)]

    assert indices(DataLoader) == indices(TorchDataLoader)


def test_the_state_is_that_of_the_iterator_begun_last() -> None:
    loader = DataLoader(Numbers(20), batch_size=4, seed=0)
    older, newer = iter(loader), iter(loader)
    for _ in range(3):
        next(older)
    next(newer)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 4)


@pytest.mark.parametrize("arguments", [{}, {"persistent_workers": True, "num_workers": "auto"}])
def test_each_epoch_of_a_loader_counts_from_its_own_start(arguments: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(20), batch_size=4, seed=0, **arguments)
    assert len(list(loader)) == 5
    for taken, _ in enumerate(loader, 1):
        state = loader.state_dict()
        expected = (1, 4 * taken) if taken < 5 else (2, 0)
        assert (state["epoch"], state["position"]) == expected


def test_buckets_turn_with_the_epochs_of_the_loader() -> None:
    batches = BucketedBatches([3, 9, 4, 8, 5, 7, 6, 2], batch_size=2, seed=0)
    loader = DataLoader(Numbers(8), batch_sampler=batches)
    epochs = [[batch[1].tolist() for batch in loader] for _ in range(4)]
    for epoch in epochs:
        assert sorted(index for batch in epoch for index in batch) == list(range(8))
    assert len({str(epoch) for epoch in epochs}) > 1


def test_a_generator_of_the_dataset_s_own_draws_the_same_anywhere_and_is_replayed() -> None:
    class Own:
        def __init__(self) -> None:
            self.generator = np.random.default_rng()

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> tuple[int, float]:
            return index, float(self.generator.random())

    def epoch(**arguments: Any) -> list[Any]:
        return collect(DataLoader(Own(), batch_size=4, shuffle=True, seed=1, **arguments))

    assert_same(epoch(num_workers=2), epoch())
    drawn = {int(i): float(x) for batch in epoch() for i, x in zip(*batch, strict=True)}
    assert len(set(drawn.values())) == 24
    loader = DataLoader(Own(), batch_size=4, shuffle=True, seed=1)
    assert replay(loader, 0, 7) == (7, drawn[7])
