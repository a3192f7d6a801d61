"""Columns of Arrow arrays: the value of every type, nulls, slices, and rows as one array."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import BadImage
from penstock.sources.arrow_columns import Column, is_number, is_number_list, make_column

pa: Any = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.formats


def values_of(column: Column, count: int) -> list[Any]:
    return [column.value(row) for row in range(count)]


def plain(value: Any) -> Any:
    """Return tensors as lists, to compare with what pyarrow returns."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


DAY = datetime.date(2026, 1, 2)
ARRAYS = [
    pa.array([1, -2, 3], pa.int8()),
    pa.array([1, 2, 2**63], pa.uint64()),
    pa.array([0.1, float("inf"), -2], pa.float32()),
    pa.array(np.array([0.5, 1, 2], np.float16)),
    pa.array([True, False, True]),
    pa.array([1, None, 3]),
    pa.array(["a", "é", None]),
    pa.array([b"\x00", b"", None], pa.large_binary()),
    pa.array(["a", "b", "a"]).dictionary_encode(),
    pa.array([DAY, None, DAY]),
    pa.array([None, None, None]),
    pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16())),
    pa.array([[1, 2], [], [5]], pa.large_list(pa.float64())),
    pa.array([[1, 2], None, [5, None]], pa.list_(pa.int64())),
    pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.uint8(), 2)),
    pa.array([[1, 2], None, [5, 6]], pa.list_(pa.uint8(), 2)),
    pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 0], [1, 2]]]),
    pa.array([[[1], [2]], [[3, 4], [5]], []]),
    pa.array([[], [], []], pa.list_(pa.list_(pa.int64()))),
    pa.array([[True], [False], [True]]),
    pa.array([["a"], [], None]),
    pa.array([{"x": 1, "y": [1, 2]}, {"x": 2, "y": [3]}, None]),
    pa.array([[{"x": 1}], [], None]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.type))
def test_values_are_those_of_pyarrow(array: Any) -> None:
    for first in range(3):  # slices, whose offsets do not begin with 0
        one = array.slice(first)
        found = values_of(make_column(one), len(one))
        assert [plain(value) for value in found] == one.to_pylist()


def test_pandas_and_pyarrow_compute_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take about a second in each worker."""
    for name in ("pandas", "pyarrow.compute"):
        monkeypatch.setitem(sys.modules, name, None)
    for array in ARRAYS:
        make_column(array).value(0)
        make_column(array).rows()


def test_the_comparison_with_pyarrow_notices_a_wrong_row() -> None:
    array = pa.array([[1, 2], [3, 4]])
    found = [plain(value) for value in values_of(make_column(array.slice(1)), 1)]
    assert found != array.slice(0, 1).to_pylist()


def test_lists_of_numbers_are_tensors_of_their_own_memory() -> None:
    array = pa.array([[1, 2], [3, 4]], pa.list_(pa.int16()))
    column = make_column(array)
    value = column.value(1)
    assert value.dtype == torch.int16
    value[0] = 9
    assert column.value(1).tolist() == [3, 4]


def test_ragged_rows_are_lists_only_where_they_are_not_rectangular() -> None:
    column = make_column(pa.array([[[1], [2]], [[3, 4], [5]]]))
    assert isinstance(column.value(0), torch.Tensor)
    assert column.value(1) == [[3, 4], [5]]
    with_null = make_column(pa.array([[1, 2], None, [5, None]]))
    assert isinstance(with_null.value(0), torch.Tensor)
    assert (with_null.value(1), with_null.value(2)) == (None, [5, None])


def test_fixed_shape_tensors_keep_their_shape() -> None:
    if not hasattr(pa, "FixedShapeTensorArray"):
        pytest.skip("this pyarrow has no FixedShapeTensorArray")
    numbers = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    column = make_column(pa.FixedShapeTensorArray.from_numpy_ndarray(numbers))
    assert column.value(1).tolist() == numbers[1].tolist()


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (pa.array([1, 2], pa.int8()), (2,)),
        (pa.array([0.5, 1], pa.float32()), (2,)),
        (pa.array([True, False]), (2,)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8())), (2, 2)),
        (pa.array([[[1, 2]], [[3, 4]]]), (2, 1, 2)),
        (pa.array([[], []], pa.list_(pa.int64())), (2, 0)),
    ],
)
def test_rows_of_one_shape_are_one_array_as_collate_makes_it(array: Any, shape: Any) -> None:
    column = make_column(array)
    rows = column.rows()
    assert rows is not None
    assert rows.shape == shape
    collated = torch.utils.data.default_collate([column.value(0), column.value(1)])
    assert torch.from_numpy(rows.copy()).dtype == collated.dtype
    assert rows.tolist() == collated.tolist()


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None]),
        pa.array(["a", "b"]),
        pa.array([[1], [2, 3]]),
        pa.array([[1], None]),
        pa.array([{"x": 1}, {"x": 2}]),
    ],
    ids=lambda array: str(array.type),
)
def test_other_rows_are_not_one_array(array: Any) -> None:
    assert make_column(array).rows() is None


def test_types_that_batches_can_be_gathered_from() -> None:
    assert is_number(pa.int32())
    assert not is_number(pa.uint64())  # larger than an int64 tensor holds
    assert not is_number(pa.string())
    assert is_number_list(pa.list_(pa.list_(pa.float32(), 3)))
    assert not is_number_list(pa.list_(pa.string()))


IMAGE = {"_type": "Image"}


def images(*rows: Any) -> Any:
    return pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def test_images_are_bytes_without_decoding_also_from_a_path(tmp_path: Any) -> None:
    path = tmp_path / "x.ppm"
    path.write_bytes(b"P6 1 1 255 abc")
    rows = images({"bytes": b"ab", "path": None}, {"bytes": None, "path": str(path)}, None)
    column = make_column(rows, IMAGE, decode=False)
    assert values_of(column, 3) == [b"ab", b"P6 1 1 255 abc", None]
    assert make_column(rows).value(0) == {"bytes": b"ab", "path": None}
    assert column.value(0, len) == 2
    lists = pa.array([[rows[0].as_py(), None], None], pa.list_(rows.type))
    for feature in ({"_type": "List", "feature": IMAGE}, [IMAGE]):
        assert values_of(make_column(lists, feature, decode=False), 2) == [[b"ab", None], None]


def test_missing_images_are_named(tmp_path: Any) -> None:
    gone = str(tmp_path / "gone.jpg")
    column = make_column(
        images({"bytes": None, "path": gone}, {"bytes": None, "path": None}), IMAGE
    )
    with pytest.raises(BadImage, match=r"gone\.jpg cannot be opened"):
        column.value(0)
    with pytest.raises(BadImage, match="neither bytes nor a path"):
        column.value(1)


def test_transforms_receive_the_value() -> None:
    assert make_column(pa.array(["a"])).value(0, str.upper) == "A"
    assert make_column(pa.array([[1, 2]])).value(0, torch.sum).item() == 3
