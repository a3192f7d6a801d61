"""A dataset that writes samples into their rows in place produces the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

from penstock.engine.loading.collate import BatchWriter
from penstock.engine.loading.in_place import (
    find_channels_last_getter,
    find_in_place_fetcher,
    offers,
)
from penstock.engine.memory.batch_layout import LayoutError, view_batch
from support.datasets import assert_same

pytestmark = pytest.mark.legacy
SHAPE = (3, 40, 40)


class Placing:
    """Writes each sample into its row if one is offered, and records whether it was."""

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        self.dtype = dtype
        self.offered: list[Any] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.read_into(index, ())

    def read_into(self, index: int, rows: Sequence[Any]) -> Any:
        row = rows[0] if rows else None
        self.offered.append(row is not None)
        tensor = torch.empty(SHAPE, dtype=self.dtype) if row is None else torch.from_numpy(row)
        return tensor.fill_(index + 1), index


def write(dataset: Any, indices: Sequence[int], buffer: np.ndarray) -> BatchWriter:
    writer = BatchWriter(buffer, len(indices), 0)
    placer = find_in_place_fetcher(dataset)
    assert placer is not None
    placer.begin(writer)
    writer.take(placer.get(index) for index in indices)
    return writer


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool])
def test_samples_in_their_rows_make_the_batch_of_default_collate(dtype: torch.dtype) -> None:
    dataset, buffer = Placing(dtype), np.full(1 << 20, 0xA5, np.uint8)
    writer = write(dataset, range(8), buffer)
    objects = writer.finish()
    assert writer.layout is not None
    batch = view_batch(writer.layout, buffer, 8, writer.num_filled, objects)
    assert_same(batch, default_collate([Placing(dtype)[index] for index in range(8)]))
    assert dataset.offered == [False, *[True] * 7], "the first one shows what form they have"


def test_the_samples_of_a_subset_are_found_by_its_indices() -> None:
    dataset, buffer = Placing(), np.zeros(1 << 20, np.uint8)
    writer = write(Subset(Subset(dataset, [7, 6, 5, 4]), [3, 1]), [1, 0], buffer)
    assert [int(label) for _, label in writer.recover()] == [6, 4]
    assert dataset.offered == [False, True]


def test_a_dtype_that_numpy_has_not_is_copied() -> None:
    dataset = Placing(torch.bfloat16)
    write(dataset, range(3), np.zeros(1 << 20, np.uint8))
    assert dataset.offered == [False] * 3


def test_a_row_is_given_once_whatever_becomes_of_the_sample() -> None:
    writer = BatchWriter(np.zeros(1 << 20, np.uint8), 4, 0)
    assert writer.next_rows() == [], "no form is known"
    writer.add(Placing()[0])
    given = writer.next_rows()
    assert given[0] is not None
    assert given[0].shape == SHAPE
    assert given[1] is None, "a number is not written by the dataset"
    assert writer.next_rows() == [], "that sample failed, or was not added yet"
    writer.add(Placing()[1])
    assert writer.next_rows() != []


@pytest.mark.parametrize("kind", ["its tensor", "the tensor of the row before", "a new tensor"])
def test_a_sample_is_in_its_row_whichever_tensor_is_returned(kind: str) -> None:
    """Only the tensor of the sample's own row can be left as it is. All others are copied."""

    class Tensors(Placing):
        kept = torch.empty(0)

        def read_into(self, index: int, rows: Any) -> Any:
            if not rows:
                return super().read_into(index, rows)
            if kind == "a new tensor" or not self.kept.numel():
                made = torch.full(SHAPE, index + 1, dtype=torch.uint8)
                self.kept = rows.tensors[0]
                return made, index
            given = rows.tensors[0]
            assert given.data_ptr() == rows[0].ctypes.data
            rows[0].fill(index + 1)
            if kind == "its tensor":
                return given, index
            self.kept, before = given, self.kept
            return before.fill_(index + 1), index  # wrong for the sample before, right for this one

        __getitem__ = Placing.__getitem__

    num_samples, buffer = 70, np.zeros(1 << 20, np.uint8)  # tensors are made for 32 rows at a time
    writer = write(Tensors(), range(num_samples), buffer)
    objects = writer.finish()
    assert writer.layout is not None
    images, labels = view_batch(writer.layout, buffer, num_samples, writer.num_filled, objects)
    expected = list(range(1, num_samples + 1))
    if kind == "the tensor of the row before":  # control: its memory is the row of another sample
        expected[1:-1] = expected[2:]
    assert images[:, 0, 0, 0].tolist() == expected
    assert images[:, -1, -1, -1].tolist() == expected
    assert labels.tolist() == list(range(num_samples))


def test_small_samples_get_no_rows() -> None:
    writer = BatchWriter(np.zeros(1 << 20, np.uint8), 4, 0)
    writer.add(torch.zeros(3))
    assert writer.next_rows() == []


def test_samples_before_an_odd_one_are_given_back_whole_and_later_ones_share_no_memory() -> None:
    class Odd(Placing):
        def read_into(self, index: int, rows: Sequence[Any]) -> Any:
            if index == 2:
                rows[0].fill(99)  # started in place, then returns a different form
                return torch.zeros(5), index
            return super().read_into(index, rows)

        __getitem__ = Placing.__getitem__

    dataset, buffer = Odd(), np.zeros(1 << 20, np.uint8)
    writer, placer = BatchWriter(buffer, 8, 0), find_in_place_fetcher(dataset)
    assert placer is not None
    placer.begin(writer)
    samples = (placer.get(index) for index in range(5))
    with pytest.raises(LayoutError):
        writer.take(samples)
    found = [*writer.recover(), *writer.refused, *samples]
    assert [int(tensor.flatten()[0]) for tensor, _ in found] == [1, 2, 0, 4, 5]
    assert [label for _, label in found] == [0, 1, 2, 3, 4]


def test_a_class_with_its_own_getitem_is_asked_for_that() -> None:
    class Doubled(Placing):
        def __getitem__(self, index: int) -> Any:
            tensor, label = super().__getitem__(index)
            return tensor * 2, label

    class Both(Doubled):
        def read_into(self, index: int, rows: Sequence[Any]) -> Any:
            return self[index]

    assert offers(Placing(), "read_into")
    assert not offers(Doubled(), "read_into")
    assert offers(Both(), "read_into")
    assert find_in_place_fetcher(Doubled()) is None
    assert find_in_place_fetcher([1, 2]) is None


class ChannelsLast(Placing):
    """Images in the order height, width, channels in batches. Samples are contiguous."""

    def __getitem__(self, index: int) -> Any:
        image, label = self.read_into(index, ())
        return image.contiguous(), label

    def read_into(self, index: int, rows: Sequence[Any]) -> Any:
        row = np.empty((40, 40, 3), np.uint8) if not rows else rows[0].transpose(1, 2, 0)
        self.offered.append(bool(rows) and row.flags.c_contiguous)
        row[:] = np.arange(row.size, dtype=np.uint8).reshape(row.shape) + index
        return torch.from_numpy(row.transpose(2, 0, 1)), index

    def keeps_channels_last(self) -> bool:
        return True


def test_channels_last_images_are_written_in_place() -> None:
    dataset, buffer = ChannelsLast(), np.full(1 << 20, 0xA5, np.uint8)
    writer = BatchWriter(buffer, 8, 0, keeps_channels_last=True)
    placer = find_in_place_fetcher(dataset)
    assert placer is not None
    placer.begin(writer)
    writer.take(placer.get(index) for index in range(8))
    assert writer.layout is not None
    images, labels = view_batch(writer.layout, buffer, 8, 8, writer.finish())
    expected, _ = default_collate([ChannelsLast()[index] for index in range(8)])
    assert torch.equal(images, expected)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous(), "control: torch's own batch is contiguous"
    assert labels.tolist() == list(range(8))
    assert dataset.offered == [False, *[True] * 7]


def test_only_a_dataset_that_says_so_keeps_channels_last() -> None:
    class Overridden(ChannelsLast):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)

    class Wrapper:
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __getattr__(self, name: str) -> Any:
            return getattr(self.dataset, name)

        def __getitem__(self, index: int) -> Any:
            return self.dataset[index]

    for dataset in (ChannelsLast(), Subset(Subset(ChannelsLast(), [2, 0]), [1, 0])):
        get = find_channels_last_getter(dataset)
        assert get is not None
        image, label = get(0)
        assert label == 0
        assert torch.equal(image, ChannelsLast()[0][0])
        assert not image.is_contiguous()
    for other in (Placing(), Overridden(), Wrapper(ChannelsLast()), [1, 2]):
        assert find_channels_last_getter(other) is None
