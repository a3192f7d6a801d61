"""Datasets that forward attributes, or answer to any name, load in workers of every kind."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader
from support.datasets import WAYS

pytestmark = pytest.mark.legacy


class Inner(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return 10 * index


class Wrapper(Dataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return int(self.dataset[index]) + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


class Silent(Wrapper):
    def __getattr__(self, name: str) -> Any:
        return None


class Raising(Wrapper):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Mocking(Wrapper):
    """Returns a Mock for every attribute except ``__getitems__``, which torch would call."""

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__":
            raise AttributeError(name)
        return Mock()


class Intercepting(Wrapper):
    """Forwards every attribute lookup to the wrapped dataset, except ``dataset`` itself."""

    def __getattribute__(self, name: str) -> Any:
        inner = object.__getattribute__(self, "__dict__")["dataset"]
        return inner if name == "dataset" else getattr(inner, name)


WRAPPERS = [Wrapper, Silent, Raising, Mocking, Intercepting]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_loads_as_its_own_class_says(wrapper: Any, way: str) -> None:
    if way == "spawn" and wrapper is not Wrapper:
        pytest.skip("one of them is enough: the pickle is the fork server's")
    loader = DataLoader(wrapper(Inner()), batch_size=4, **WAYS[way])
    assert torch.cat(list(loader)).tolist() == [10 * index + 1 for index in range(8)]
    assert loader.plan.notes == () or all(isinstance(note, str) for note in loader.plan.notes)
    assert loader.state_dict()


@pytest.mark.parametrize("wrapper", [Wrapper, Silent, Mocking])
def test_torch_s_own_loader_gives_the_same(wrapper: Any) -> None:
    batches = list(TorchDataLoader(wrapper(Inner()), batch_size=4))
    assert torch.cat(batches).tolist() == [10 * index + 1 for index in range(8)]


def test_a_wrapper_around_a_dataset_that_is_read_in_one_call_is_not_passed_by() -> None:
    class Reader(Inner):
        def read_rows(self, index: Any, out: Any) -> None:
            raise AssertionError("the wrapper's samples are wanted")

        def read_into(self, index: Any, rows: Any) -> None:
            raise AssertionError("the wrapper's samples are wanted")

    for way in ("inline", "forkserver"):
        loader = DataLoader(Wrapper(Reader()), batch_size=4, **WAYS[way])
        assert torch.cat(list(loader)).tolist() == [10 * index + 1 for index in range(8)]


def test_getitems_that_a_wrapper_hands_on_is_used_as_in_torch() -> None:
    class Batched(Inner):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [-index for index in indices]

    wrapper = Wrapper(Batched())
    ours = torch.cat(list(DataLoader(wrapper, batch_size=4, num_workers=1)))
    assert torch.equal(ours, torch.cat(list(TorchDataLoader(wrapper, batch_size=4))))


def test_packing_a_wrapper_stores_the_wrapper_s_samples(tmp_path: Any) -> None:
    class Encoded(Inner):
        packed_names = ("other",)

        def packed_sample(self, index: int) -> int:
            return -1

    penstock.pack(Wrapper(Encoded()), tmp_path / "wrapped")
    packed = penstock.Packed(tmp_path / "wrapped")
    assert [int(packed[index]) for index in range(8)] == [10 * index + 1 for index in range(8)]
    penstock.pack(Encoded(), tmp_path / "encoded")  # control: this class has packed_sample
    assert int(penstock.Packed(tmp_path / "encoded")[3]) == -1
