"""The dataset receives indices, and collate_fn receives samples, as in torch's own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import DataLoader
from support.datasets import assert_same

pytestmark = pytest.mark.legacy

WAYS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 threads": {"num_workers": 2, "pool": "thread"},
}
needs_getitems = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 0),
    reason="torch calls __getitems__ since 2.0",
)


def same(value: Any) -> Any:
    return value


class Columns:
    """Reads a whole batch in one call."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices), "names": [str(index) for index in indices]}


class Rows(Columns):
    def __getitems__(self, indices: list[int]) -> Any:
        return np.array(indices, dtype=np.float32)


@needs_getitems
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Columns, Rows])
def test_a_collate_fn_gets_what_getitems_returned(kind: Any, way: str) -> None:
    expected = list(torch.utils.data.DataLoader(kind(), batch_size=5, collate_fn=same))
    loader = DataLoader(kind(), batch_size=5, collate_fn=same, **WAYS[way])
    assert_same(list(loader), expected)


@needs_getitems
@pytest.mark.parametrize("way", WAYS)
def test_the_default_collate_takes_what_torch_s_takes(way: str) -> None:
    expected = list(torch.utils.data.DataLoader(Rows(), batch_size=5))
    assert_same(list(DataLoader(Rows(), batch_size=5, **WAYS[way])), expected)
    with pytest.raises(KeyError):
        list(torch.utils.data.DataLoader(Columns(), batch_size=5))
    with pytest.raises(KeyError):
        list(DataLoader(Columns(), batch_size=5, **WAYS[way]))


class Refilling:
    """A batch sampler that refills one object for each batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, 24, 3):
            for place in range(3):
                self.batch[place] = first + place
            yield self.batch


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_batch_sampler_may_fill_one_object_for_all_batches(make: Any, way: str) -> None:
    sampler: Any = Refilling(make([0, 0, 0]))
    loader = DataLoader(range(24), batch_sampler=sampler, collate_fn=same, **WAYS[way])
    assert [int(index) for batch in loader for index in batch] == list(range(24))


class OneIndex:
    """A sampler that yields one tensor again and again."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Any]:
        index = torch.tensor(0)
        for value in range(12):
            index.fill_(value)
            yield index


@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_may_fill_one_index_tensor(way: str) -> None:
    sampler: Any = OneIndex()
    loader = DataLoader(torch.arange(12), batch_size=1, sampler=sampler, **WAYS[way])
    assert [int(batch) for batch in loader] == list(range(12))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [iter, set, dict.fromkeys, tuple])
def test_a_batch_of_indices_may_be_of_any_iterable_type(make: Any, way: str) -> None:
    batches: Any = [make([0, 1]), make([2])]
    loader = DataLoader(range(3), batch_sampler=batches, **WAYS[way])
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]


# -- TensorDataset ---------------------------------------------------------------------------------


@needs_getitems
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_dataset_with_getitems_is_loaded_by_it(way: str) -> None:
    dataset: Any = TensorDataset(torch.arange(4))
    dataset.__getitems__ = times_ten
    batches = list(DataLoader(dataset, batch_size=2, **WAYS[way]))
    assert [batch.tolist() for batch in batches] == [[0, 10], [20, 30]]


def times_ten(indices: list[int]) -> list[int]:
    return [10 * index for index in indices]


def test_a_replaced_getitem_of_tensor_datasets_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(self: Any, index: int) -> Any:
        return tuple(-tensor[index] for tensor in self.tensors)

    plain = [batch.tolist() for (batch,) in DataLoader(TensorDataset(torch.arange(4)))]
    monkeypatch.setattr(TensorDataset, "__getitem__", negated)
    batches = list(DataLoader(TensorDataset(torch.arange(4))))
    assert [batch.tolist() for (batch,) in batches] == [[-value] for (value,) in plain]


def test_uint8_tensors_are_not_taken_for_indices() -> None:
    """torch treats them as masks."""
    mask = torch.tensor([1, 0], dtype=torch.uint8)
    errors = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with pytest.raises(RuntimeError) as caught:
            list(kind(TensorDataset(torch.arange(4)), batch_sampler=[mask]))
        errors.append(caught)
    assert len(errors) == 2
