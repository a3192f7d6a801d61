"""Every kind of value is recognized, encoded and decoded unchanged."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from penstock.errors import CannotPack
from penstock.sources.fields import (
    EncodedImage,
    Field,
    SampleEncoder,
    decode_value,
    find_schema,
    kind_of,
)
from penstock.sources.manifest import KINDS, FieldKind, FieldSchema

pytestmark = pytest.mark.legacy

VALUES: dict[str, Any] = {
    "tensor": torch.tensor([1.5, -2.0]),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "scalar": np.float32(0.5),
    "int": -7,
    "float": 0.25,
    "bool": True,
    "text": "größer",
    "bytes": b"\x00\xff",
    "image": EncodedImage(b"the bytes of a file"),
}


def test_every_kind_has_a_value_here() -> None:
    assert tuple(VALUES) == KINDS == get_args(FieldKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_each_kind_is_recognised_and_comes_back_as_it_was(kind: str) -> None:
    value = VALUES[kind]
    assert kind_of(value, "x") == kind
    schema = find_schema("x", [value], Field())
    (row,) = SampleEncoder("single", [schema], [Field()]).encode(value, 0)
    back = decode_value(schema, np.array(row))
    assert type(back) is (bytes if kind == "image" else type(value))
    assert np.all(np.asarray(back == value))


def test_a_value_or_a_name_of_no_kind_is_refused() -> None:
    with pytest.raises(CannotPack, match="cannot be stored without pickle"):
        kind_of(object(), "x")
    with pytest.raises(ValueError, match="unknown kind 'picture'"):
        FieldSchema(name="x", kind="picture", dtype="|u1")
