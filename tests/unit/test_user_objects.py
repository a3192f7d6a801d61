"""Queries on user objects run none of their code, or tolerate its errors."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.user_objects import class_attribute, instance_dict, offers, own_attributes, probe

pytestmark = pytest.mark.legacy


class Hostile:
    __slots__ = ("__dict__", "__hidden", "left_out", "seen")

    def __init__(self) -> None:
        self.seen = 1
        self.__hidden = 2
        self.plain = 3

    def __getattribute__(self, name: str) -> Any:
        raise RecursionError(name)


def test_attributes_are_read_without_the_class_s_code() -> None:
    with pytest.raises(RecursionError):
        _ = Hostile().seen
    assert own_attributes(Hostile()) == {"plain": 3, "seen": 1, "_Hostile__hidden": 2}


def test_a_dict_that_is_computed_is_none() -> None:
    class Fake:
        __slots__ = ()

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise ValueError

    assert instance_dict(Fake()) == {}
    assert instance_dict(5) == {}


@pytest.mark.parametrize("error", [AttributeError, KeyError, RecursionError, ValueError])
def test_a_probe_has_its_default_whatever_is_raised(error: type[Exception]) -> None:
    class Raising:
        def __getattr__(self, name: str) -> Any:
            raise error(name)

    assert probe(Raising(), "nbytes", 7) == 7


def test_a_probe_does_not_swallow_an_interrupt() -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(Interrupted(), "nbytes")


class Reader:
    def __getitem__(self, index: int) -> int:
        return index

    def read_rows(self) -> None:
        """A method to offer."""


class Wrapper:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, index: int) -> int:
        return 2 * int(self.inner[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_wrapper_does_not_offer_what_it_hands_on() -> None:
    assert offers(Reader(), "read_rows")
    assert callable(Wrapper(Reader()).read_rows)
    assert not offers(Wrapper(Reader()), "read_rows")


def test_what_every_class_has_of_object_does_not_count() -> None:
    assert class_attribute(Reader, "__reduce_ex__") is None
    assert class_attribute(Reader, "read_rows") is Reader.read_rows
