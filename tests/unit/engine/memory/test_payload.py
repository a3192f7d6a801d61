"""Samples without a layout are pickled, with their large buffers next to them in the slot."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.memory import payload
from support.datasets import Pair, Record, assert_same

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


# torch 2.11 warns about its own reconstruction of a sparse tensor.
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
    inner, outer = sorted(written.blocks)
    assert inner == (128, LARGE * 4)
    assert outer[0] >= 128 + LARGE * 4  # no overlap
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


# -- shared memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
def test_a_tensor_and_a_view_of_it_share_memory_again(slot_bytes: int) -> None:
    base = torch.arange(LARGE)
    result, view = through_slot([base, base[1:]], make_slot(slot_bytes))
    result[5] = -1
    assert view[4] == -1
    assert base[5] == 5  # the worker's tensor is separate


def test_tensors_that_share_nothing_do_not_share_afterwards() -> None:
    first, second = through_slot([torch.zeros(LARGE), torch.zeros(LARGE)])
    first += 1
    assert second.sum() == 0


def test_the_same_tensor_twice_is_one_object() -> None:
    tensor = torch.arange(5)
    first, (second,) = through_slot([tensor, (tensor,)])
    assert first is second


def test_a_small_view_of_a_large_tensor_sends_its_own_bytes_only() -> None:
    written = payload.write(torch.zeros(1 << 16)[100:200], make_slot(1 << 12))
    assert written.inline is None
    assert sum(length for _, length in written.blocks) <= 400 + 16


def test_a_column_of_a_large_matrix_is_packed() -> None:
    matrix, slot = torch.arange(1 << 16).reshape(1 << 8, 1 << 8), make_slot(1 << 13)
    written = payload.write(matrix[:, 3], slot)
    assert written.inline is None
    assert_same(payload.read(written, slot), matrix[:, 3])


def test_an_expanded_tensor_sends_one_row() -> None:
    expanded, slot = torch.arange(100.0).expand(1000, 100), make_slot(1 << 12)
    written = payload.write(expanded, slot)
    assert written.inline is None
    result = payload.read(written, slot)
    assert result.stride() == (0, 1)
    assert_same(result, expanded)


def test_a_storage_comes_back_and_shares_memory_with_its_tensor() -> None:
    tensor = torch.arange(LARGE, dtype=torch.float32)
    typed = storage_of(tensor)
    untyped = typed.untyped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, whole, words = through_slot([tensor[7:], untyped, typed])
    assert type(whole) is type(untyped)
    assert len(whole) == LARGE * 4
    assert words.dtype == torch.float32
    assert len(words) == LARGE
    result[0] = -1.0
    assert torch.empty(0).set_(whole)[7] == -1.0
    assert words[7] == -1.0


def storage_of(tensor: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecation of these storages
        return tensor.storage()


def test_an_empty_storage_comes_back() -> None:
    assert len(through_slot(storage_of(torch.empty(0)).untyped())) == 0


def test_views_of_two_dtypes_share_memory_again() -> None:
    words = torch.zeros(LARGE, dtype=torch.int32)
    octets = words.view(torch.uint8)[5:]
    result, tail = through_slot([octets, words])
    result[3] = 1
    assert tail[2] == 1


def test_a_parameter_shares_memory_with_its_tensor() -> None:
    tensor = torch.zeros(LARGE)
    plain, parameter = through_slot([tensor, torch.nn.Parameter(tensor)])
    plain += 1
    assert parameter.detach().sum() == LARGE


# -- lazy bits -------------------------------------------------------------------------------------


def lazy_tensors() -> dict[str, torch.Tensor]:
    numbers = torch.complex(torch.arange(1000.0), torch.ones(1000))
    return {
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "conjugated and negated": torch._neg_view(numbers.conj()),
        "zeros without memory": torch._efficientzerotensor((3, 4)),
    }


@pytest.mark.parametrize("name", lazy_tensors())
def test_a_lazy_tensor_keeps_its_values(name: str) -> None:
    value = lazy_tensors()[name]
    result, view = through_slot([value, value[1:]])
    expected = value.clone().resolve_conj().resolve_neg()
    assert_same(result.resolve_conj().resolve_neg(), expected)
    assert_same(view.resolve_conj().resolve_neg(), expected[1:])
    assert (result.is_conj(), result.is_neg()) == (value.is_conj(), value.is_neg())


def test_a_class_without_memory_of_its_own_pickles_itself() -> None:
    result = through_slot(Wrapper(torch.ones(3)))
    assert type(result) is Wrapper
    assert_same(result.inner, torch.ones(3))


class Wrapper(torch.Tensor):
    """A tensor that only wraps another one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapper, (self.inner,)
