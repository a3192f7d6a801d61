"""Tensors of a batch are mapped or moved, and the structure of the batch is preserved."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from penstock.device.nested import copy_arrays, map_tensors, move_tensors, tensors_in

pytestmark = pytest.mark.legacy

Edge = namedtuple("Edge", "source to")


class Point(NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor
    label: str = "box"
    area: Any = dataclasses.field(init=False, default=None)
    num_made: int = 0

    def __post_init__(self) -> None:
        self.num_made += 1
        self.area = self.corners.sum()


@dataclasses.dataclass(frozen=True)
class Frozen:
    corners: torch.Tensor


class Slotted:
    __slots__ = ("corners",)


class Encoding(UserDict[str, Any]):
    """Like a tokenizer's result: a mapping with its own attributes and an in-place ``to``."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: Any) -> Encoding:
        raise AssertionError("it would change what the loader still copies from")


class Demanding(dict[str, Any]):
    def __init__(self, data: dict[str, Any], needed: int) -> None:
        super().__init__(data)
        self.needed = needed


class Names(list[Any]):
    pass


class Own:
    """Has its own ``to`` method, like graphs and box lists of other libraries."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> Own:
        return Own(self.tensor.to(device))


def plus_1(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor + 1)


def zero() -> torch.Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: zero(),
        lambda: [zero(), zero()],
        lambda: (zero(), "text", b"bytes", None, 3),
        lambda: {"a": zero(), 2: [zero(), {"b": (zero(),)}]},
        lambda: OrderedDict(a=zero()),
        lambda: defaultdict(list, a=zero()),
        lambda: Point(zero(), "name"),
        lambda: Edge(zero(), zero()),
        lambda: Boxes(zero()),
        lambda: Frozen(zero()),
        lambda: Encoding({"ids": zero()}, encodings=["of the tokenizer"]),
        lambda: Demanding({"a": zero()}, 3),
        lambda: MappingProxyType({"a": zero()}),
        lambda: Names([zero()]),
    ],
)
def test_every_tensor_is_changed_and_the_kind_stays(make: Any) -> None:
    batch = make()
    changed = plus_1(batch)
    assert type(changed) is type(batch)
    assert all(tensor.item() == 1 for tensor in tensors_in(changed) if tensor.dim())
    assert all(tensor.item() == 0 for tensor in tensors_in(batch)), "the batch itself is as it was"
    assert len(tensors_in(changed)) == len(tensors_in(batch)) > 0


def test_what_is_beside_the_tensors_stays() -> None:
    encoding = plus_1(Encoding({"ids": zero()}, encodings=["of the tokenizer"]))
    assert encoding.encodings == ["of the tokenizer"]
    assert plus_1(Demanding({"a": zero()}, 3)).needed == 3
    assert plus_1(defaultdict(list, a=zero()))["new"] == []
    boxes = plus_1(Boxes(zero(), label="cat"))
    assert (boxes.label, boxes.num_made) == ("cat", 1), "it is not made a second time"
    assert boxes.area.item() == 1
    assert plus_1((zero(), "text", b"bytes", None, 3))[1:] == ("text", b"bytes", None, 3)


def test_arrays_and_strange_things_are_left_alone() -> None:
    array, thing = np.arange(3), object()
    assert plus_1([array, thing, torch.Tensor, {1, 2}]) == [array, thing, torch.Tensor, {1, 2}]


@pytest.mark.parametrize("kind", [torch.nn.utils.rnn.PackedSequence, Own])
def test_things_that_know_how_to_move_move_by_themselves(kind: Any) -> None:
    batch = pack_sequence([torch.ones(3), torch.ones(2)]) if kind is PackedSequence else Own(zero())
    moved = move_tensors({"x": batch}, torch.device("meta"))["x"]
    assert type(moved) is kind
    assert tensors_in(moved)[0].device.type == "meta"
    assert plus_1(batch) is batch, "no move: they are none of our business"


def test_a_batch_with_no_tensors_has_none() -> None:
    assert tensors_in(["a", 1, None, {"b": b""}, np.zeros(3)]) == []


def test_things_that_refer_to_each_other_are_looked_at_once() -> None:
    many: list[Any] = []
    for _ in range(50):
        own = Own(zero())
        own.others = many  # type: ignore[attr-defined]
        many.append(own)
    assert len(tensors_in(many)) == 50


def test_tensors_come_in_order_and_each_one_once() -> None:
    first, second = zero(), zero()
    assert [id(t) for t in tensors_in([first, {"a": second}, first])] == [id(first), id(second)]


@pytest.mark.skipif(not hasattr(dataclasses, "KW_ONLY"), reason="slots= came with Python 3.10")
def test_dataclasses_without_a_dict_are_seen_into() -> None:
    made = dataclasses.make_dataclass("Lean", ["corners"], slots=True)(zero())
    assert plus_1(made).corners.item() == 1
    assert len(tensors_in(made)) == 1


def test_copy_arrays_copies_arrays_and_nothing_else() -> None:
    array, tensor = np.arange(3), zero()
    apart = copy_arrays({"a": array, "b": [array, (array, "x")], "t": tensor})
    assert apart["a"] is not array
    assert (apart["b"][1][0] == array).all()
    assert not np.shares_memory(apart["b"][0], array)
    assert apart["t"] is tensor
    assert apart["b"][1][1] == "x"


@pytest.mark.parametrize("kind", [Own, torch.nn.Linear, torch.Tensor, Boxes])
def test_a_class_in_a_batch_is_left_alone_even_if_its_objects_can_move(kind: Any) -> None:
    batch = {"kind": kind, "x": zero()}
    assert move_tensors(batch, torch.device("cpu"))["kind"] is kind
