"""A user's collate_fn gets the whole list of samples, and its tensors arrive unchanged."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from penstock import DataLoader
from support.datasets import (
    QUICK_WAYS,
    WAYS,
    WORKER_WAYS,
    Numbers,
    Samples,
    assert_same,
    collect,
    differences,
)

legacy = pytest.mark.legacy


def with_a_mask(samples: list[Any]) -> dict[str, Any]:
    """A typical collate_fn: default_collate and additional fields."""
    images, labels = default_collate(samples)
    return {
        "images": images,
        "labels": labels,
        "mask": images > 2,
        "names": [str(s[1]) for s in samples],
    }


def padded(samples: list[torch.Tensor]) -> Any:
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), lengths


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("size", [3, 3000])
def test_default_collate_inside_gives_what_torch_gives(way: str, size: int) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "collate_fn": with_a_mask}
    ours = collect(DataLoader(Numbers(20, (size,)), **arguments, **WAYS[way]))
    assert_same(ours, collect(TorchDataLoader(Numbers(20, (size,)), **arguments)))


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_ragged_samples_may_be_padded(way: str) -> None:
    dataset = Samples(lambda i: torch.arange(1 + i * 7 % 50), 40)
    arguments: dict[str, Any] = {"batch_size": 4, "collate_fn": padded}
    assert_same(
        collect(DataLoader(dataset, **arguments, **WAYS[way])),
        collect(TorchDataLoader(dataset, **arguments)),
    )


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_all_batches_of_a_collate_fn_may_be_kept(way: str) -> None:
    loader = DataLoader(Numbers(120, (500,)), batch_size=2, collate_fn=with_a_mask, **WAYS[way])
    for number, batch in enumerate(list(loader)):
        assert batch["images"].unique().tolist() == [2 * number, 2 * number + 1]
        assert batch["names"] == [str(2 * number), str(2 * number + 1)]


class Hoarder:
    """Keeps a tensor made by default_collate and returns it with a later batch."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        images, labels = default_collate(samples)
        self.kept.append((images, labels))
        wrong = sum(
            not torch.equal(image, label.float().reshape(-1, 1).expand_as(image))
            for image, label in self.kept
        )
        return images, labels, wrong


@legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_tensors_that_a_collate_fn_keeps_are_never_written_over(way: str) -> None:
    loader = DataLoader(Numbers(200, (200,)), batch_size=2, collate_fn=Hoarder(), **WAYS[way])
    assert [wrong for _, _, wrong in loader] == [0] * 100


def test_a_kept_tensor_that_is_written_over_would_be_noticed() -> None:
    hoarder = Hoarder()
    hoarder([(torch.ones(3), 1), (torch.zeros(3), 0)])
    hoarder.kept[0][0].fill_(7.0)
    assert hoarder([(torch.ones(3), 1)])[2] == 1


def torch_files() -> int:
    """Count torch's shared-memory files of this process, which are unlinked when created."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed by a different thread
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as lines:
        mapped = sum("/torch_" in line for line in lines)
    return mapped + sum("/torch_" in target for target in found)


def with_count_of_torch_files(samples: list[Any]) -> Any:
    return default_collate(samples), torch_files()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
@pytest.mark.parametrize("way", ["forkserver", "fork"])
def test_default_collate_inside_a_worker_makes_none_of_torch_s_shared_files(way: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "collate_fn": with_count_of_torch_files}
    ours = list(DataLoader(Numbers(20, (5000,)), **arguments, **WAYS[way]))
    assert [count for _, count in ours] == [0] * 10
    assert torch_files() == 0
    theirs = TorchDataLoader(
        Numbers(20, (5000,)), num_workers=1, multiprocessing_context="fork", **arguments
    )
    assert max(count for _, count in theirs) > 0  # control: torch's workers create them


@legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_a_collate_fn_gets_the_whole_list_of_its_batch(way: str) -> None:
    def sizes(samples: list[Any]) -> tuple[int, Any]:
        return len(samples), type(samples)

    loader = DataLoader(Numbers(20), batch_size=8, collate_fn=sizes, **WAYS[way])
    assert list(loader) == [(8, list), (8, list), (4, list)]


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_without_batching_the_collate_fn_gets_each_sample(way: str) -> None:
    loader = DataLoader(Numbers(4), batch_size=None, collate_fn=lambda s: s[1] * 10, **WAYS[way])
    assert list(loader) == [0, 10, 20, 30]


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_results_of_any_class_come_back(way: str) -> None:
    class Bag:
        def __init__(self, samples: list[Any]) -> None:
            self.images = default_collate([image for image, _ in samples])
            self.arrays = [np.full(300, label) for _, label in samples]

    for number, bag in enumerate(DataLoader(Numbers(6), batch_size=2, collate_fn=Bag, **WAYS[way])):
        assert type(bag).__name__ == "Bag"
        assert bag.images[:, 0].tolist() == [2 * number, 2 * number + 1]
        assert [int(array[0]) for array in bag.arrays] == [2 * number, 2 * number + 1]


def test_two_fields_that_are_one_tensor_are_both_right() -> None:
    def twice(samples: list[Any]) -> Any:
        images, _ = default_collate(samples)
        return images, images, images[:1]

    for number, batch in enumerate(
        DataLoader(Numbers(8, (900,)), 2, num_workers=2, collate_fn=twice)
    ):
        assert [float(tensor[0, 0]) for tensor in batch] == [2.0 * number] * 3
        assert batch[2].shape == (1, 900)


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_result_keeps_its_strides(way: str) -> None:
    def collate(samples: list[Any]) -> Any:
        images, _ = default_collate(samples)
        last = images.contiguous(memory_format=torch.channels_last)
        return images, last, images.permute(1, 0, 3, 2), images[:, :, ::2]

    ours = next(iter(DataLoader(Numbers(4, (3, 8, 6)), 4, collate_fn=collate, **WAYS[way])))
    theirs = next(iter(TorchDataLoader(Numbers(4, (3, 8, 6)), 4, collate_fn=collate)))
    assert_same(ours, theirs)
    assert [t.stride() for t in ours[:3]] == [t.stride() for t in theirs[:3]]
    assert ours[1].is_contiguous(memory_format=torch.channels_last)
    assert not ours[0].is_contiguous(memory_format=torch.channels_last)  # control


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_a_result_that_cannot_travel_is_an_error_and_not_a_hang(way: str) -> None:
    loader = DataLoader(
        Numbers(8), batch_size=2, collate_fn=lambda s: (n for n in s), timeout=20, **WAYS[way]
    )
    with pytest.raises(TypeError, match="generator"):
        list(loader)


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_a_kind_registered_with_default_collate_is_collated_that_way(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Box:
        def __init__(self, value: int) -> None:
            self.value = value

    def collate_boxes(batch: list[Box], *, collate_fn_map: Any = None) -> Any:
        return torch.tensor([box.value for box in batch]) * 100

    dataset = Samples(lambda i: (Box(i), i), 4)
    with pytest.raises(TypeError):  # control: the type has no collate function
        collect(DataLoader(dataset, batch_size=2, **WAYS[way]))
    monkeypatch.setitem(torch_collate.default_collate_fn_map, Box, collate_boxes)
    ours = collect(DataLoader(dataset, batch_size=2, **WAYS[way]))
    assert_same(ours, collect(TorchDataLoader(dataset, batch_size=2)))
    assert not differences(ours[1][0], torch.tensor([200, 300]))
