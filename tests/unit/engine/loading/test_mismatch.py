"""Samples that do not fit one batch are reported with index, field and shapes."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate as torch_collate

from penstock.engine.loading.default_collate import default_collate
from penstock.errors import MismatchedSamples
from support.datasets import Pair, Record, assert_same

pytestmark = pytest.mark.legacy

CASES: dict[str, tuple[list[Any], str, int, str]] = {
    "tensors alone": ([torch.zeros(3), torch.zeros(3), torch.zeros(4)], "", 2, "(4,)"),
    "in a tuple": ([(torch.zeros(2), 1), (torch.zeros(5), 1)], "[0]", 1, "(5,)"),
    "in a dict": ([{"a": 1, "x": torch.zeros(n)} for n in (2, 2, 3)], "['x']", 2, "(3,)"),
    "deep": ([{"a": [0, (torch.zeros(n),)]} for n in (2, 3)], "['a'][1][0]", 1, "(3,)"),
    "in a namedtuple": ([Pair(torch.zeros(n), 0) for n in (2, 3)], "[0]", 1, "(3,)"),
    "lengths of lists": ([[1, 2], [1, 2, 3]], "", 1, "length 3"),
    "lengths inside": ([{"x": [1]}, {"x": [1, 2]}], "['x']", 1, "length 2"),
    "missing key": ([{"a": 1}, {"b": 1}], "", 1, "'b'"),
    "in a dataclass": ([Record(torch.zeros(n), 0) for n in (2, 3)], ".image", 1, "(3,)"),
}


def refuse(samples: list[Any]) -> MismatchedSamples:
    indices = [100 + place for place in range(len(samples))]
    with pytest.raises(MismatchedSamples) as info:
        default_collate(samples, indices)
    return info.value


@pytest.mark.parametrize("name", CASES)
def test_the_sample_and_the_field_are_named(name: str) -> None:
    samples, field, place, found = CASES[name]
    error: Any = refuse(samples)
    assert error.sample_index == 100 + place
    assert error.field == field
    assert found in error.found
    text = str(error)
    assert "sample 100 has" in text
    assert f"sample {100 + place} has" in text
    assert "Try:" in text
    assert "collate_fn" in text


@pytest.mark.parametrize("name", CASES)
def test_samples_that_fit_are_not_refused(name: str) -> None:
    pair = [CASES[name][0][0]] * 2
    batch = default_collate(pair, [0, 1])
    if name == "in a dataclass":  # rejected by torch's default_collate
        assert batch.image.shape == (2, *pair[0].image.shape)
    else:
        assert_same(batch, torch_collate(pair))


def test_handlers_of_torch_s_error_catch_it_and_see_torch_s_words() -> None:
    error = refuse([torch.zeros(3), torch.zeros(4)])
    assert isinstance(error, RuntimeError)
    assert "stack expects each tensor to be equal size" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("samples", "field", "place", "words"),
    [
        ([torch.zeros(1), None], "", 1, "dataset[101] returned None, which cannot be stacked"),
        ([None, None], "", 0, "dataset[100] returned None"),
        ([(1, {"box": [None]})], "[1]['box'][0]", 0, "returned None in field [1]['box'][0]"),
        ([object(), object()], "", 0, "dataset[100] returned an object of type object"),
        (
            [{"a": 1, "b": 2}, {"b": {3}, "a": 1}],
            "['b']",
            1,
            "returned an object of type set in field ['b']",
        ),
        ([Record(torch.zeros(2), None)], ".label", 0, "returned None in field .label"),
    ],
)
def test_values_that_no_batch_can_hold_are_named(
    samples: list[Any], field: str, place: int, words: str
) -> None:
    error: Any = refuse(samples)
    assert isinstance(error, type(error.__cause__))  # torch's own
    assert (error.field, error.sample_index) == (field, 100 + place)
    assert words in str(error)
    is_none = "None" in words
    assert ('on_error="skip"' in str(error)) == is_none
    assert ("collate_fn" in str(error)) != is_none


@pytest.mark.parametrize(
    ("value", "conversion"),
    [
        (Decimal("1.5"), "float"),
        (datetime.datetime(2020, 1, 1), "datetime.datetime.timestamp"),
        (2**63, "str"),
    ],
)
def test_a_value_that_no_tensor_holds_is_named_with_a_conversion(
    value: Any, conversion: str
) -> None:
    error: Any = refuse([{"n": 0, "x": value}])
    assert f"returned {value} ({type(value).__name__}) in field ['x']" in str(error)
    assert f"open_dataset(..., transforms={{'x': {conversion}}})" in str(error)


def test_an_image_of_pillow_gets_its_own_remedy() -> None:
    image = type("Image", (), {"__module__": "PIL.Image"})()
    text = str(refuse([(image, 3)]))
    assert "dataset[100] returned a PIL image in field [0]" in text
    assert "transform=torchvision.transforms.ToTensor()" in text
