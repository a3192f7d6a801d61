"""The layout of a sample is read, and samples are flattened and restored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.memory.batch_layout import (
    LayoutError,
    LeafSpec,
    assemble,
    compile_flatten,
    field_view,
    is_channels_last,
    read_layout,
    restore,
)
from support.datasets import Frozen, Pair, Record, assert_same, differences

pytestmark = pytest.mark.legacy

NESTED: dict[str, Any] = {
    "a leaf alone": 7,
    "a tuple": (1, 2.0),
    "a list": [1, [2, 3]],
    "a dict": {"a": 1, "b": {"c": 2.0}},
    "a namedtuple": Pair(1, 2),
    "a dataclass": Record(1, 2),
    "a frozen dataclass": Frozen(1, {"x": 2}),
    "all of them": {"p": Pair((1, 2), [Record(3, {"k": 4.0})]), "q": (Frozen("text", b"bytes"),)},
    "an empty tuple": (),
    "an empty dict inside": (1, {}),
    "keys that are not strings": {1: 1, (2, 3): 2},
}


def take_apart(sample: Any) -> tuple[Any, list[Any]]:
    layout = read_layout(sample)
    return layout.tree, compile_flatten(layout.tree)(sample)


@pytest.mark.parametrize("name", NESTED)
def test_restore_gives_back_the_sample_that_flatten_took_apart(name: str) -> None:
    tree, values = take_apart(NESTED[name])
    assert_same(restore(tree, values), NESTED[name])


def test_a_restored_sample_with_one_value_changed_is_noticed() -> None:
    tree, values = take_apart(NESTED["all of them"])
    values[2] = 99
    assert differences(restore(tree, values), NESTED["all of them"])


def test_flatten_lists_the_leaves_in_the_order_of_the_layout() -> None:
    sample = {"b": (1, 2.0), "a": Pair(True, [3])}
    layout = read_layout(sample)
    assert compile_flatten(layout.tree)(sample) == [1, 2.0, True, 3]
    assert [leaf.kind for leaf in layout.leaves] == ["int", "float", "bool", "int"]


def test_assemble_turns_tuples_into_lists_as_default_collate_does() -> None:
    tree, values = take_apart(((1, 2), Pair(3, 4)))
    assert_same(assemble(tree, values), [[1, 2], Pair(3, 4)])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((1, 2), (1, 2, 3)),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        (Pair(1, 2), (1, 2)),
        (Record(1, 2), Frozen(1, 2)),
        ((1, (2, 3)), (1, (2,))),
        ((1, {"a": 2}), (1, 2)),
    ],
    ids=repr,
)
def test_a_sample_of_another_form_is_odd(first: Any, other: Any) -> None:
    flatten = compile_flatten(read_layout(first).tree)
    flatten(first)  # control: its own layout is accepted
    with pytest.raises(LayoutError):
        flatten(other)


def test_dict_keys_in_another_order_are_the_same_form() -> None:
    flatten = compile_flatten(read_layout({"a": 1, "b": 2}).tree)
    assert flatten({"b": 2, "a": 1}) == [1, 2]


ODD: dict[str, Any] = {
    "nothing": None,
    "an object": object(),
    "a complex number": 3j,
    "a tensor that needs gradients": torch.zeros(2, requires_grad=True),
    "a sparse tensor": torch.zeros(2).to_sparse(),
    "an array of texts": np.array(["text"]),
    "an array of objects": np.array([object()]),
    "an array of foreign byte order": np.zeros(2, dtype=">f4"),
    "an array of records": np.zeros(2, dtype=[("a", int)]),
    "a masked array": np.ma.masked_array([1, 2]),
    "a date": np.datetime64("2020-01-01"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_no_layout_can_hold_is_odd(name: str) -> None:
    with pytest.raises(LayoutError):
        read_layout((1, ODD[name]))


def test_fields_start_on_cache_lines_and_do_not_overlap() -> None:
    layout = read_layout((torch.zeros(3), 1, torch.zeros(5, dtype=torch.uint8)))
    offsets, end = layout.offsets(7)
    assert offsets == [0, 128, 192]
    assert end == 256
    assert all(offset % 64 == 0 for offset in offsets)


def test_layouts_of_equal_samples_are_equal_and_of_other_shapes_are_not() -> None:
    def layout(*shape: int) -> Any:
        return read_layout({"x": torch.zeros(shape), "y": 1})

    assert layout(3) == layout(3)
    assert hash(layout(3)) == hash(layout(3))
    assert layout(3) != layout(4)
    assert layout(3) != read_layout({"x": torch.zeros(3), "y": 1.0})


def test_an_image_stays_channels_last_only_where_that_is_asked_for() -> None:
    image = torch.arange(60, dtype=torch.uint8).view(4, 5, 3).permute(2, 0, 1)
    layout = read_layout((image, 1), keeps_channels_last=True)
    assert layout.leaves[0] == LeafSpec("tensor", "torch.uint8", (3, 4, 5), 60, True)
    assert not read_layout((image, 1)).leaves[0].is_channels_last
    assert layout != read_layout((image, 1))
    root = np.arange(120, dtype=np.uint8)
    field = field_view(root, layout.leaves[0], 0, 2)
    assert field.shape == (2, 3, 4, 5)
    assert field.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(field[0], image)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4, 5),
        torch.zeros(4, 5, 1).permute(2, 0, 1),
        torch.zeros(1, 1, 3).permute(2, 0, 1),
        torch.zeros(5, 4, 3).permute(2, 1, 0),
        torch.zeros(4, 9, 3).permute(2, 0, 1)[:, :, :5],
        torch.zeros(5, 3).t(),
    ],
    ids=["contiguous", "one channel", "one pixel", "turned", "a part", "a matrix"],
)
def test_other_tensors_are_not_taken_for_channels_last(tensor: torch.Tensor) -> None:
    assert not is_channels_last(tensor)
    assert not read_layout(tensor, keeps_channels_last=True).leaves[0].is_channels_last
