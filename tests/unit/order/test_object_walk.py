"""The object walk finds what code can reach, calls nothing, and tolerates hostile objects."""

from __future__ import annotations

import random
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest

from penstock.order import object_walk
from penstock.order.object_walk import ObjectWalk

pytestmark = pytest.mark.legacy

LIMIT = 200


def found(root: Any) -> list[str]:
    walk = ObjectWalk(lambda value: issubclass(type(value), random.Random))
    return [path for path, _ in walk.find("dataset", root)]


class Holder:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Touchy:
    """Raises on every operation on an instance."""

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, "held", held)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked for")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __bool__(self) -> bool:
        raise RuntimeError("judged")


class LazyDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("loaded")

    def __iter__(self) -> Any:
        raise RuntimeError("loaded")

    def __len__(self) -> int:
        raise RuntimeError("loaded")


class DeadProxy:
    def __init__(self) -> None:
        target = Holder()
        self.proxy = weakref.proxy(target)  # dead after this returns
        self.rng = random.Random(0)


def numbers(rng: Any) -> Any:
    while True:
        yield rng.random()


def test_no_code_of_the_objects_is_called() -> None:
    assert found(Touchy(random.Random(0))) == ["dataset.held"]
    assert found(LazyDict(a=random.Random(0))) == ["dataset['a']"]
    assert found(DeadProxy()) == ["dataset.rng"]
    with pytest.raises(RuntimeError):
        len(LazyDict())  # control: it would raise
    with pytest.raises(ReferenceError):
        isinstance(DeadProxy().proxy, types.ModuleType)  # control: it would raise too


@pytest.mark.parametrize("length", [10, 1000])
@pytest.mark.parametrize("put", [list, tuple, lambda held: dict(enumerate(held))])
def test_containers_of_any_length_are_searched_to_the_last_item(put: Any, length: int) -> None:
    plain = [(f"{number}.jpg", number) for number in range(length)]
    assert found(put(plain)) == []
    assert len(found(put([*plain, random.Random(0)]))) == 1
    assert len(found(put([*plain, ("x", [random.Random(0)])]))) == 1
    assert len(found(put([*plain, Holder(inner=Holder(rng=random.Random(0)))]))) == 1


def test_a_large_container_that_held_nothing_is_looked_at_again_when_it_could_have_changed() -> (
    None
):
    barren: dict[int, int] = {}
    plain = Holder(samples=[("a.jpg", number) for number in range(LIMIT)])
    objects = Holder(samples=[Holder(number=number) for number in range(LIMIT)])
    for root in (plain, objects):
        assert not list(ObjectWalk(lambda value: False, barren).find("dataset", root))
    assert list(barren) == [id(plain.samples)]  # type: ignore[attr-defined]


def test_generators_in_frames_arrays_and_caches_are_found() -> None:
    assert len(found(Holder(stream=numbers(random.Random(0))))) == 1
    table = np.array([None, random.Random(0)], dtype=object)
    assert found(Holder(table=table)) == ["dataset.table[1]"]


def test_circles_and_deep_nesting_end() -> None:
    circle: list[Any] = [random.Random(0)]
    circle.append(circle)
    assert found(circle) == ["dataset[0]"]
    deep: Any = random.Random(0)
    for _ in range(object_walk.MAX_DEPTH + 5):
        deep = [deep]
    walk = ObjectWalk(lambda value: issubclass(type(value), random.Random))
    assert list(walk.find("dataset", deep)) == []
    assert not walk.is_complete  # reported as incomplete


def test_more_objects_than_the_limit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_walk, "MAX_OBJECTS", 20)
    walk = ObjectWalk(lambda value: False)
    assert list(walk.find("dataset", [Holder(number=n) for n in range(50)])) == []
    assert not walk.is_complete


def test_code_of_installed_libraries_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("a_library")
    exec("import random\nRNG = random.Random(0)\nheld = [RNG]\ndef f(): return held", vars(module))
    monkeypatch.setitem(sys.modules, "a_library", module)
    object_walk.is_library.cache_clear()
    assert found(Holder(f=module.f)) == ["a_library.held[0]"]  # control: a user module
    module.__file__ = "/usr/lib/python3/site-packages/a_library.py"
    object_walk.is_library.cache_clear()
    try:
        assert found(Holder(f=module.f)) == ["a_library.RNG"]  # generators only
    finally:
        object_walk.is_library.cache_clear()
