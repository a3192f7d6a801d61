"""Samples of any kind survive a round trip through a packed set."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock import Packed, pack

DTYPES = st.sampled_from(["u1", "i2", "<i8", "f2", "<f4", "f8", "?", "c8"])


@st.composite
def columns(draw: Any) -> tuple[list[Any], bool]:
    """Draw values of one field for six samples. Also returns whether their sizes differ."""
    kind = draw(st.sampled_from(["fixed", "ragged", "text", "bytes", "int", "float"]))
    many = st.lists
    if kind == "text":
        return draw(many(st.text(max_size=8), min_size=6, max_size=6)), True
    if kind == "bytes":
        return draw(many(st.binary(max_size=8), min_size=6, max_size=6)), True
    if kind == "int":
        whole = st.integers(-(2**63), 2**63 - 1)
        return draw(many(whole, min_size=6, max_size=6)), False
    if kind == "float":
        return draw(many(st.floats(), min_size=6, max_size=6)), False
    dtype = np.dtype(draw(DTYPES))
    shape = draw(arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
    shapes = [shape] * 6
    if kind == "ragged":
        sides = st.tuples(*[st.integers(0, 3)] * len(shape))
        shapes = [draw(sides) for _ in range(6)]
    return [draw(arrays.arrays(dtype, one)) for one in shapes], kind == "ragged"


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(
            left, right, equal_nan=left.dtype.kind in "fc"
        )
    return type(left) is type(right) and (left == right or left != left)


@settings(max_examples=12)
@given(st.lists(columns(), min_size=1, max_size=3), st.integers(100, 400))
def test_samples_come_back_as_they_went_in(fields: list[Any], shard_bytes: int) -> None:
    samples = [{f"f{n}": values[i] for n, (values, _) in enumerate(fields)} for i in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        packed = pack(samples, Path(folder) / "set", workers=0, shard_bytes=shard_bytes)
        again = Packed(Path(folder) / "set", verify="full")
        for reader in (packed, again):
            many = reader.__getitems__([5, 0, 3])
            assert all(map(is_same, many[1].values(), samples[0].values()))
            for index in range(6):
                found = reader[index]
                assert all(map(is_same, found.values(), samples[index].values()))
        del packed, again, reader
