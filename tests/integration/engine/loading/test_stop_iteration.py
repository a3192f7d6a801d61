"""StopIteration raised by user code is an error that names the function, in every pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from penstock import DataLoader
from support.datasets import QUICK_WAYS, WAYS, Samples, collect

pytestmark = pytest.mark.legacy

LENGTH = 24


def stop() -> Any:
    return next(iter(()))


def stop_at(index: Any) -> Any:
    return stop() if index == 19 else index


def stop_collating(samples: list[Any]) -> Any:
    return stop() if 19 in samples else samples


class StopsInBatches(Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [stop_at(index) for index in indices]


class HasNoLength(Dataset):
    def __len__(self) -> int:
        return int(stop())

    def __getitem__(self, index: int) -> int:
        return index


class HasNoIterator(IterableDataset):
    def __iter__(self) -> Any:
        return stop()


class Stumbles(IterableDataset):
    """Raises once, in a plain ``__next__``, and continues."""

    def __iter__(self) -> Any:
        self.place = -1
        return self

    def __next__(self) -> int:
        self.place += 1
        if self.place == 5:
            raise ValueError("bad")
        if self.place == LENGTH:
            raise StopIteration
        return self.place


class Fails:
    """A sample with a field that cannot be read, which is user code run by default_collate."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return StoppingDict(index=index) if index == 19 else {"index": index}


class StoppingDict(dict):  # type: ignore[type-arg]
    def __getitem__(self, key: str) -> Any:
        return stop()


def bad(index: int) -> int:
    if index == 19:
        raise ValueError("bad")
    return index


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "dataset[i]": (
        "dataset[i]",
        lambda: {"dataset": Samples(stop_at, LENGTH), "batch_size": 4},
    ),
    "dataset[i], drawing": (
        "dataset[i]",
        lambda: {
            "dataset": Samples(lambda i: (torch.rand(1), stop_at(i)), LENGTH),
            "batch_size": 4,
        },
    ),
    "dataset[i], seeded by worker": (
        "dataset[i]",
        lambda: {
            "dataset": Samples(stop_at, LENGTH),
            "batch_size": 4,
            "randomness": "worker",
        },
    ),
    "dataset[i], not batched": (
        "dataset[i]",
        lambda: {"dataset": Samples(stop_at, LENGTH), "batch_size": None},
    ),
    "dataset[i], for a collate_fn": (
        "dataset[i]",
        lambda: {"dataset": Samples(stop_at, LENGTH), "batch_size": 4, "collate_fn": list},
    ),
    "dataset.__getitems__": (
        "dataset.__getitems__",
        lambda: {"dataset": StopsInBatches(), "batch_size": 4},
    ),
    "collate_fn": (
        "collate_fn",
        lambda: {"dataset": range(LENGTH), "batch_size": 4, "collate_fn": stop_collating},
    ),
    "collate_fn, seeded by worker": (
        "collate_fn",
        lambda: {
            "dataset": range(LENGTH),
            "batch_size": 4,
            "collate_fn": stop_collating,
            "randomness": "worker",
        },
    ),
    "default_collate": ("default_collate", lambda: {"dataset": Fails(), "batch_size": 4}),
    "on_error": (
        "on_error",
        lambda: {
            "dataset": Samples(bad, LENGTH),
            "batch_size": 4,
            "on_error": lambda index, error: stop(),
        },
    ),
    "on_error of a stream": (
        "on_error",
        lambda: {
            "dataset": Stumbles(),
            "batch_size": 4,
            "on_error": lambda index, error: stop(),
        },
    ),
    "dataset.__iter__": ("dataset.__iter__", lambda: {"dataset": HasNoIterator()}),
    "dataset.__len__": ("dataset.__len__", lambda: {"dataset": HasNoLength()}),
    "dataset.__len__, shuffled": (
        "dataset.__len__",
        lambda: {"dataset": HasNoLength(), "shuffle": True},
    ),
    "dataset.__len__, seeded": ("dataset.__len__", lambda: {"dataset": HasNoLength(), "seed": 1}),
    "dataset.__len__, not batched": (
        "dataset.__len__",
        lambda: {"dataset": HasNoLength(), "batch_size": None},
    ),
}


@pytest.mark.filterwarnings("ignore:workers . and . begin with the same samples:UserWarning")
@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_stop_iteration_is_an_error_that_names_the_function(name: str, way: str) -> None:
    function, make = CASES[name]
    with pytest.raises(RuntimeError) as caught:
        collect(DataLoader(**make(), **WAYS[way]))
    assert f"{function} raised StopIteration" in str(caught.value)


@pytest.mark.parametrize("way", [way for way in QUICK_WAYS if way != "inline"])
def test_a_stop_iteration_in_worker_init_fn_is_an_error(way: str) -> None:
    loader = DataLoader(range(8), worker_init_fn=lambda number: stop(), **WAYS[way])
    with pytest.raises(RuntimeError, match="worker_init_fn raised StopIteration"):
        collect(loader)


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_the_batches_before_it_come(way: str) -> None:
    iterator = iter(DataLoader(range(LENGTH), batch_size=4, collate_fn=stop_collating, **WAYS[way]))
    assert [next(iterator) for _ in range(4)] == [[n, n + 1, n + 2, n + 3] for n in (0, 4, 8, 12)]
    with pytest.raises(RuntimeError, match="collate_fn raised StopIteration"):
        next(iterator)


def test_the_length_of_a_loader_raises_it_too() -> None:
    with pytest.raises(RuntimeError, match=r"dataset\.__len__ raised StopIteration"):
        len(DataLoader(HasNoLength()))


class Counts:
    """A sampler without a generator function. Its StopIteration is the end of the epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.place = length, -1

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.place += 1
        if self.place >= self.length:
            raise StopIteration
        return self.place


@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_end_of_a_sampler_is_the_end(batch_size: Any, way: str) -> None:
    """Control: where StopIteration means the end, the epoch ends."""
    loader = DataLoader(range(100), batch_size=batch_size, sampler=Counts(8), **WAYS[way])
    assert len(collect(loader)) == (8 if batch_size is None else 2)


def test_without_the_check_the_epoch_would_end_silently() -> None:
    """Control: torch's loader silently loses batches."""
    batches = list(
        torch.utils.data.DataLoader(
            range(LENGTH),  # type: ignore[arg-type]
            batch_size=4,
            collate_fn=stop_collating,
        )
    )
    assert len(batches) == 4 < LENGTH // 4
