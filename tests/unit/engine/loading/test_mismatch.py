"""Samples that do not fit one batch are reported with index, field and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate as torch_collate

from penstock.engine.loading.collate import default_collate
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


def test_samples_that_do_not_differ_keep_torch_s_own_error() -> None:
    with pytest.raises(TypeError, match="default_collate"):
        default_collate([object(), object()], [0, 1])
