"""Tests of the fast NamedTuple: it behaves like that of ``typing``."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from penstock.named_tuple import NamedTuple

pytestmark = pytest.mark.legacy


class Fast(NamedTuple):
    x: int
    y: str = "two"
    z: tuple[int, ...] = ()

    @property
    def double(self) -> int:
        return 2 * self.x


class Plain(typing.NamedTuple):
    x: int
    y: str = "two"
    z: tuple[int, ...] = ()

    @property
    def double(self) -> int:
        return 2 * self.x


class Derived(Fast):
    def total(self) -> int:
        return self.x + len(self.z)


BOTH = [Fast, Plain]


@pytest.mark.parametrize("kind", BOTH)
def test_a_tuple_is_made_from_values_and_names(kind: Any) -> None:
    made = kind(1, z=(3,))
    assert made == (1, "two", (3,)) == kind(x=1, y="two", z=(3,))
    assert (made.x, made.y, made.z, made.double) == (1, "two", (3,), 2)
    assert hash(made) == hash((1, "two", (3,)))
    assert isinstance(made, tuple)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((), {}),
        ((1, "a", (), 4), {}),
        ((1,), {"x": 2}),
        ((1,), {"w": 2}),
        ((1, "a", ()), {"z": ()}),
    ],
)
def test_wrong_arguments_are_refused(kind: Any, values: Any, named: Any) -> None:
    with pytest.raises(TypeError):
        kind(*values, **named)


@pytest.mark.parametrize("kind", BOTH)
def test_a_tuple_is_copied_replaced_and_described(kind: Any) -> None:
    made = kind(1)
    changed = made._replace(y="other")
    assert type(changed) is kind
    assert changed == (1, "other", ())
    assert made._asdict() == {"x": 1, "y": "two", "z": ()}
    assert repr(made) == f"{kind.__name__}(x=1, y='two', z=())"
    for same in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert type(same) is kind
        assert same == changed
    with pytest.raises((TypeError, ValueError)):
        made._replace(w=1)
    with pytest.raises(AttributeError):
        made.x = 2


@pytest.mark.parametrize("kind", BOTH)
def test_the_class_lists_its_fields(kind: Any) -> None:
    assert kind._fields == ("x", "y", "z") == kind.__match_args__
    assert kind._field_defaults == {"y": "two", "z": ()}


def test_a_derived_class_keeps_the_fields() -> None:
    made = Derived(1, z=(1, 2))
    assert made._fields == Fast._fields
    assert made.total() == 3
