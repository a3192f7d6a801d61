"""Tensors that share memory in a worker share it in the parent, with the same strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.memory import payload
from support.datasets import assert_same

pytestmark = pytest.mark.legacy

ROWS, COLUMNS = 12, 16
WIDTHS = {torch.float32: 4, torch.int64: 8, torch.uint8: 1, torch.complex64: 8, torch.bfloat16: 2}


@st.composite
def views(draw: Any) -> Any:
    """Draw a function that returns a view of a matrix."""
    kind = draw(
        st.sampled_from(
            ["whole", "rows", "columns", "transposed", "expanded", "windows", "bytes", "nothing"]
        )
    )
    first = draw(st.integers(0, ROWS - 1))
    last = draw(st.integers(first + 1, ROWS))
    step = draw(st.integers(1, 3))

    def look(base: torch.Tensor) -> torch.Tensor:
        return {
            "whole": lambda: base,
            "rows": lambda: base[first:last:step],
            "columns": lambda: base[:, first:last:step],
            "transposed": lambda: base.t()[first:last],
            "expanded": lambda: base[first].expand(step, COLUMNS),
            "windows": lambda: base.reshape(-1).unfold(0, COLUMNS, step),
            "bytes": lambda: base.view(torch.uint8)[first],
            "nothing": lambda: base[:0],
        }[kind]()

    return look


def make_base(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(ROWS * COLUMNS) % 101).reshape(ROWS, COLUMNS).to(dtype)


def fill(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.as_strided((1,), (1,)).fill_(103)  # the first element, a unique value


@given(
    dtype=st.sampled_from(list(WIDTHS)),
    looks=st.lists(views(), min_size=1, max_size=5),
    slot_bytes=st.sampled_from([64, 1 << 16]),
    data=st.data(),
)
def test_views_of_one_tensor_are_views_of_one_tensor_again(
    dtype: Any, looks: Any, slot_bytes: int, data: Any
) -> None:
    base = make_base(dtype)
    mine = [look(base) for look in looks]
    slot = np.full(slot_bytes, 0xA5, dtype=np.uint8)
    theirs = payload.read(payload.write(mine, slot), slot)
    assert_same(theirs, mine)
    for _ in range(3):
        number = data.draw(st.integers(0, len(looks) - 1))
        fill(mine[number])
        fill(theirs[number])
        assert_same(theirs, mine)


@given(dtype=st.sampled_from(list(WIDTHS)), look=views())
def test_copies_in_the_place_of_views_would_be_noticed(dtype: Any, look: Any) -> None:
    """Negative control: a copy in place of a view does not see writes to its base."""
    base = make_base(dtype) + 1
    view, copy = look(base), look(base).clone()
    fill(view)
    if view.numel():
        assert copy.ne(view).any()


@given(dtype=st.sampled_from(list(WIDTHS)), looks=st.lists(views(), min_size=2, max_size=4))
def test_strides_are_kept_where_the_whole_tensor_is_sent(dtype: Any, looks: Any) -> None:
    base = make_base(dtype)
    mine = [base, *(look(base) for look in looks)]
    slot = np.zeros(1 << 16, dtype=np.uint8)
    theirs = payload.read(payload.write(mine, slot), slot)
    assert [tensor.stride() for tensor in theirs] == [tensor.stride() for tensor in mine]
    starts = [tensor.data_ptr() - theirs[0].data_ptr() for tensor in theirs if tensor.numel()]
    assert starts == [tensor.data_ptr() - base.data_ptr() for tensor in mine if tensor.numel()]
