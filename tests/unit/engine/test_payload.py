"""What no layout can hold: pickled, with its large buffers beside it in the slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.memory import payload
from specimens import Pair, Record, assert_same

pytestmark = pytest.mark.legacy

LARGE = 5000


def make_slot(num_bytes: int = 1 << 20) -> np.ndarray:
    return np.full(num_bytes, 0xA5, dtype=np.uint8)


def through_slot(value: Any, slot: np.ndarray | None = None) -> Any:
    slot = make_slot() if slot is None else slot
    return payload.read(payload.write(value, slot), slot)


VALUES: dict[str, Any] = {
    "a small tensor": torch.arange(5),
    "a large tensor": torch.arange(LARGE, dtype=torch.float64),
    "half precision": torch.ones(LARGE, dtype=torch.bfloat16),
    "booleans": torch.arange(LARGE) % 2 == 0,
    "complex numbers": torch.ones(LARGE, dtype=torch.complex64),
    "no element": torch.zeros(0, 3),
    "no dimension": torch.tensor(3),
    "not contiguous": torch.arange(LARGE * 4.0).reshape(LARGE, 4).t(),
    "needs gradients": torch.ones(LARGE, requires_grad=True),
    "sparse": torch.eye(40).to_sparse(),
    "a large array": np.arange(LARGE),
    "a small array": np.arange(3, dtype=np.int16),
    "a Fortran array": np.asfortranarray(np.arange(LARGE * 4).reshape(LARGE, 4)),
    "an array of strings": np.array(["a", "bc"]),
    "nested": {"a": [torch.ones(LARGE), (np.ones(LARGE), "s")], "b": Pair(1, torch.ones(3))},
    "a dataclass": Record(torch.ones(LARGE), [None, 1.5, b"x"]),
    "ragged": [torch.ones(n) for n in (1, 100, LARGE)],
    "no buffer at all": ["text", 1, None, {"k": {1, 2}}],
    "None": None,
}


# torch 2.11 warns about its own way of rebuilding a sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_went(name: str) -> None:
    assert_same(through_slot(VALUES[name]), VALUES[name])


@pytest.mark.parametrize("name", VALUES)
def test_a_value_larger_than_the_slot_comes_back_beside_it(name: str) -> None:
    slot = make_slot(64)
    written = payload.write(VALUES[name], slot)
    if written.inline is None:
        assert written.num_bytes <= 64
    assert_same(payload.read(written, slot), VALUES[name])


def test_the_need_of_a_value_that_did_not_fit_is_enough_the_next_time() -> None:
    value = [torch.ones(LARGE), np.ones(LARGE)]
    written = payload.write(value, make_slot(64))
    assert written.inline is not None
    roomy = make_slot(written.num_bytes)
    again = payload.write(value, roomy)
    assert again.inline is None
    assert_same(payload.read(again, roomy), value)


def test_large_buffers_are_views_of_the_slot() -> None:
    slot = make_slot()
    result = through_slot([torch.ones(LARGE), np.ones(LARGE)], slot)
    slot[:] = 0
    assert result[0].sum() == 0
    assert result[1].sum() == 0


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
def test_what_comes_back_can_be_written_to(size: int, slot_bytes: int) -> None:
    tensor, array = through_slot((torch.ones(size), np.ones(size)), make_slot(slot_bytes))
    tensor += 1
    array += 1
    assert tensor.sum() == array.sum() == 2 * size


def test_a_tensor_that_lies_in_the_slot_already_is_only_pointed_at() -> None:
    slot = make_slot()
    inside = torch.frombuffer(slot, dtype=torch.float32, count=LARGE, offset=128)
    inside.fill_(7.0)
    written = payload.write({"x": inside, "outside": torch.ones(LARGE)}, slot, 128 + LARGE * 4)
    assert written.spans[0] == (128, LARGE * 4)
    assert written.spans[1][0] >= 128 + LARGE * 4  # nothing is put over it
    result = payload.read(written, slot)
    assert_same(result["x"], torch.full((LARGE,), 7.0))
    assert_same(result["outside"], torch.ones(LARGE))


def test_a_tensor_subclass_keeps_its_class_and_its_attributes() -> None:
    value = torch.ones(LARGE).as_subclass(Tagged)
    value.tag = "left"
    result = through_slot(value)
    assert type(result) is Tagged
    assert result.tag == "left"
    assert result.sum() == LARGE


class Tagged(torch.Tensor):
    tag: str


def test_a_parameter_stays_a_parameter() -> None:
    result = through_slot(torch.nn.Parameter(torch.ones(LARGE)))
    assert type(result) is torch.nn.Parameter
    assert result.requires_grad


def test_lambdas_and_local_classes_travel_by_value() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    result = through_slot([Local(3), lambda x: x + 1])
    assert result[0].value == 3
    assert result[1](1) == 2


def test_what_cannot_be_pickled_raises_and_is_not_half_written() -> None:
    with pytest.raises(TypeError, match="generator"):
        through_slot([torch.ones(LARGE), (n for n in range(3))])
