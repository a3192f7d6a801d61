"""Data in memory is sliced, with the same result as torch's loop over samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, split
from penstock.engine.loading.gather import is_sliced
from support.datasets import (
    QUICK_WAYS,
    WAYS,
    Batched,
    Numbers,
    assert_same,
    collect,
    differences,
    snapshot,
)

pytestmark = pytest.mark.legacy

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64),
]


def images(length: int = 50) -> torch.Tensor:
    return torch.arange(length * 12).reshape(length, 3, 2, 2)


DATASETS: dict[str, Any] = {
    "one tensor": lambda: TensorDataset(images()),
    "images and labels": lambda: TensorDataset(images(), torch.arange(50)),
    "many dtypes": lambda: TensorDataset(*(images().to(dtype) for dtype in DTYPES)),
    "not contiguous": lambda: TensorDataset(images().transpose(1, 3), images()[:, 1]),
    "expanded": lambda: TensorDataset(torch.ones(1, 5).expand(50, 5)),
    "rows without elements": lambda: TensorDataset(torch.zeros(50, 0, 3), torch.arange(50)),
    "needs gradients": lambda: TensorDataset(torch.arange(50.0).requires_grad_()),
    "a subset": lambda: Subset(TensorDataset(images(), torch.arange(50)), [5, 3, 49, 0, 3, 7]),
    "a subset by tensor": lambda: Subset(TensorDataset(images()), torch.arange(40, 10, -3)),
    "a subset from the end": lambda: Subset(TensorDataset(images()), [-1, -50, 3]),
    "a subset of a subset": lambda: Subset(
        Subset(TensorDataset(images()), range(10, 40)), [0, 29, 5]
    ),
    "two together": lambda: ConcatDataset([TensorDataset(images(5)), TensorDataset(images(7))]),
    "random halves": lambda: random_split(
        TensorDataset(images()), [20, 30], generator=torch.Generator().manual_seed(0)
    )[0],
    "a class of its own": lambda: Doubled(images()),
}


class Doubled(TensorDataset):
    """A TensorDataset that changes its samples, so slicing its tensors would be wrong."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor * 2 for tensor in super().__getitem__(index))


@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("name", DATASETS)
def test_data_in_memory_gives_torch_s_batches(name: str, way: str) -> None:
    if name == "needs gradients" and way in ("forkserver", "fork"):
        pytest.skip("torch's own workers refuse to send tensors that need gradients")
    epochs = {}
    for kind, arguments in ((DataLoader, WAYS[way]), (TorchDataLoader, {})):
        torch.manual_seed(0)
        epochs[kind] = collect(kind(DATASETS[name](), batch_size=4, shuffle=True, **arguments))
    assert_same(epochs[DataLoader], epochs[TorchDataLoader])


def test_rows_of_the_wrong_sample_would_be_noticed() -> None:
    batches = collect(DataLoader(TensorDataset(images()), batch_size=4))
    wrong = collect(TorchDataLoader(TensorDataset(images() + 1), batch_size=4))
    assert differences(batches, wrong)


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_an_index_out_of_range_raises_torch_s_type(way: str) -> None:
    dataset = TensorDataset(images())
    for sampler in ([0, 50], [-51]):
        with pytest.raises(IndexError):
            collect(TorchDataLoader(dataset, sampler=sampler))
        with pytest.raises(IndexError):
            collect(DataLoader(dataset, sampler=sampler, **WAYS[way]))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_an_empty_tensor_dataset_gives_no_batch(way: str) -> None:
    assert collect(DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=4, **WAYS[way])) == []


def test_slicing_is_not_used_when_a_collate_fn_wants_the_samples() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=3, collate_fn=list)
    batches = list(loader)
    assert batches == list(TorchDataLoader(TensorDataset(torch.arange(6)), 3, collate_fn=list))
    assert isinstance(batches[0][0], tuple)


def test_a_change_of_the_data_between_epochs_is_seen() -> None:
    data = torch.zeros(6)
    loader = DataLoader(TensorDataset(data), batch_size=6)
    assert next(iter(loader))[0].sum() == 0
    data += 1
    assert next(iter(loader))[0].sum() == 6


def test_a_batch_does_not_change_when_the_data_does() -> None:
    data = torch.zeros(6)
    batch = next(iter(DataLoader(TensorDataset(data), batch_size=6)))
    data += 1
    assert batch[0].sum() == 0


def test_slicing_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(0)
    list(TorchDataLoader(TensorDataset(torch.zeros(6)), batch_size=2))
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(DataLoader(TensorDataset(torch.zeros(6)), batch_size=2))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_part_of_a_split_is_sliced_and_right(num_workers: int) -> None:
    whole = TensorDataset(torch.arange(100), torch.arange(100.0).view(50, 2).repeat(2, 1))
    for part in split(whole, [0.7, 0.3], seed=1):
        assert is_sliced(part, object(), torch.utils.data.default_collate)
        loader = DataLoader(part, batch_size=8, shuffle=True, num_workers=num_workers)
        seen = [pair for batch in loader for pair in zip(*(x.tolist() for x in batch), strict=True)]
        assert sorted(seen) == sorted((a.item(), b.tolist()) for a, b in part)


class Rows:
    """Copies rows with its own method, like a packed set."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2000,), float(index))

    def read_rows(self, index: Any, out: Any) -> None:
        out[0].view("f4")[:] = index[:, None]


WITHOUT_INDICES: dict[str, Any] = {
    "tensors": lambda: TensorDataset(images(8)),
    "a subset": lambda: Subset(TensorDataset(images(8)), [4, 5, 6]),
    "a part of a split": lambda: split(TensorDataset(images(8)), [4, 4])[0],
    "rows": Rows,
    "whole batches": lambda: Batched(8),
    "one by one": lambda: Numbers(8),
    "a list": lambda: list(range(8)),
}


@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("name", WITHOUT_INDICES)
def test_a_batch_without_indices_is_torch_s_error(name: str, way: str) -> None:
    arguments = {"batch_sampler": [[0, 1], [], [2]]}
    theirs = outcomes(TorchDataLoader(WITHOUT_INDICES[name](), **arguments))
    assert [type(one) for one in theirs][1] is IndexError  # control: torch raises
    ours = outcomes(DataLoader(WITHOUT_INDICES[name](), **arguments, **WAYS[way]))
    assert_same(ours[::2], theirs[::2])
    assert isinstance(ours[1], IndexError)
    assert "list index out of range" in str(ours[1])


def outcomes(loader: Any) -> list[Any]:
    """Return the batches and exceptions of a loader, in order."""
    found: list[Any] = []
    iterator = iter(loader)
    for _ in range(3):
        try:
            found.append(snapshot(next(iterator)))
        except IndexError as error:
            found.append(error)
    return found
