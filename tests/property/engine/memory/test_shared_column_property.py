"""SharedList and SharedDict read like list and dict, for any contents."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import SharedDict, SharedList

pytestmark = pytest.mark.legacy

TEXT = st.text(st.characters())  # includes surrogates
NUMBERS = st.integers() | st.floats(allow_nan=False) | st.booleans()
ATOMS = st.none() | NUMBERS | TEXT | st.binary()
KEYS = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
VALUES = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
LISTS = (
    st.lists(TEXT)
    | st.lists(st.integers())
    | st.lists(st.floats(allow_nan=False))
    | st.lists(st.binary())
    | st.lists(VALUES)
)
BOUNDS = st.none() | st.integers(-12, 12)


def typed(value: Any) -> Any:
    """Return the value with its types at every level: ``1``, ``True`` and ``1.0`` are different."""
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), repr(value)


@given(LISTS)
def test_a_list_reads_as_it_was(plain: list[Any]) -> None:
    shared = SharedList(iter(plain))
    assert typed(list(shared)) == typed(plain)
    assert typed(pickle.loads(pickle.dumps(shared)).copy()) == typed(plain)
    assert shared == plain
    assert len(shared) == len(plain)
    for item in plain:
        assert item in shared
        assert shared.index(item) == plain.index(item)
        assert shared.count(item) == plain.count(item)


@given(LISTS, BOUNDS, BOUNDS, st.integers(-4, 4).filter(bool) | st.none())
def test_slices_of_slices_are_what_a_list_gives(
    plain: list[Any], start: int | None, stop: int | None, step: int | None
) -> None:
    piece = slice(start, stop, step)
    shared = SharedList(plain)
    assert shared[piece] == plain[piece]
    assert shared[::-1][piece] == plain[::-1][piece]
    assert pickle.loads(pickle.dumps(shared[piece])) == plain[piece]


@given(LISTS, st.integers(-60, 60))
def test_an_index_gives_what_a_list_gives_or_the_same_error(plain: list[Any], index: int) -> None:
    shared = SharedList(plain)
    try:
        expected = plain[index]
    except IndexError as error:
        with pytest.raises(IndexError, match=str(error)):
            shared[index]
    else:
        assert typed(shared[index]) == typed(expected)


@given(st.lists(st.tuples(KEYS, VALUES)), KEYS)
def test_a_dict_reads_as_it_was(pairs: list[tuple[Any, Any]], other: Any) -> None:
    plain = dict(pairs)
    shared = SharedDict(iter(pairs))
    assert typed(list(shared.items())) == typed(list(plain.items()))
    assert shared == plain
    assert (other in shared) == (other in plain)
    assert typed(shared.get(other)) == typed(plain.get(other))
    assert pickle.loads(pickle.dumps(shared)) == plain
