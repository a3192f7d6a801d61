"""Objects that cannot be pickled are reported by attribute path, with a remedy."""

from __future__ import annotations

import functools
import io
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import CannotTravel

pytestmark = pytest.mark.legacy


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def method(self) -> None:
        """A method to bind."""


class Slotted:
    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


def blame(dataset: Any, name: str = "dataset") -> CannotTravel:
    with pytest.raises(CannotTravel) as info:
        PickledObjects({name: dataset}).to_shared_file().close()
    return info.value


def generator() -> Iterator[int]:
    yield 1


def closure_over(value: Any) -> Callable[[], Any]:
    return lambda: value


def with_default(value: Any) -> Callable[[], Any]:
    return lambda held=value: held


MAKERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (lambda bad: Thing(stream=bad), "dataset.stream"),
    "an attribute of an attribute": (
        lambda bad: Thing(transform=Thing(fn=bad)),
        "dataset.transform.fn",
    ),
    "an item of a list": (lambda bad: Thing(parts=[1, bad]), "dataset.parts[1]"),
    "an item of a tuple": (lambda bad: Thing(parts=(bad,)), "dataset.parts[0]"),
    "a value of a dict": (lambda bad: Thing(parts={"a": 1, "b": bad}), "dataset.parts['b']"),
    "a slot": (lambda bad: Slotted(bad), "dataset.handle"),
    "a closure": (lambda bad: Thing(fn=closure_over(bad)), "dataset.fn.<closure value>"),
    "an argument of a partial": (
        lambda bad: Thing(fn=functools.partial(print, bad)),
        "dataset.fn.args[0]",
    ),
    "a keyword of a partial": (
        lambda bad: Thing(fn=functools.partial(print, file=bad)),
        "dataset.fn.keywords['file']",
    ),
    "a bound method": (lambda bad: Thing(fn=Thing(x=bad).method), "dataset.fn.__self__.x"),
    "a default of a lambda": (lambda bad: Thing(fn=with_default(bad)), "dataset.fn.<default held>"),
    "deep down": (
        lambda bad: Thing(a=[{"b": Thing(c=(0, closure_over(Thing(d=bad))))}]),
        "dataset.a[0]['b'].c[1].<closure value>.d",
    ),
}


@pytest.mark.parametrize("place", MAKERS)
def test_the_path_leads_to_the_part_at_fault(place: str) -> None:
    make, path = MAKERS[place]
    error = blame(make(generator()))
    assert error.path == path  # type: ignore[attr-defined]
    assert path in str(error)
    assert "generator" in str(error)


@pytest.mark.parametrize("place", MAKERS)
def test_the_same_object_without_the_part_travels(place: str) -> None:
    make, _ = MAKERS[place]
    PickledObjects({"dataset": make("harmless")}).to_shared_file().close()


def test_a_part_that_refers_back_to_the_whole_does_not_go_on_for_ever() -> None:
    thing = Thing(bad=generator())
    thing.me = thing  # type: ignore[attr-defined]
    thing.friend = Thing(back=thing)  # type: ignore[attr-defined]
    assert blame(thing).path == "dataset.bad"  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["w", "ab", "r+"])
def test_a_file_that_is_written_to_is_named_with_the_way_out(tmp_path: Path, mode: str) -> None:
    (tmp_path / "data.bin").write_text("x")
    with open(tmp_path / "data.bin", mode) as stream:
        error = blame(Thing(reader=Thing(handle=stream)))
    assert error.path == "dataset.reader.handle"  # type: ignore[attr-defined]
    assert "a file opened for writing" in str(error)
    assert "Try:" in str(error)
    assert "dataset.reader.handle = None" in str(error)


def test_a_file_in_memory_travels() -> None:
    PickledObjects(
        {"dataset": Thing(a=io.BytesIO(b"x"), b=io.StringIO("x"))}
    ).to_shared_file().close()


def test_a_lock_of_the_fork_context_is_named_with_the_way_out() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    error = blame(Thing(lock=lock))
    assert error.path == "dataset.lock"  # type: ignore[attr-defined]
    assert "get_context('spawn').Lock" in str(error)
    assert "multiprocessing_context='fork'" in str(error)


def test_a_lock_of_the_spawn_context_travels() -> None:
    PickledObjects(
        {"dataset": Thing(lock=multiprocessing.get_context("spawn").Lock())}
    ).to_shared_file().close()


def test_a_generator_is_named_with_its_own_way_out() -> None:
    error = blame(Thing(stream=generator()))
    assert error.path == "dataset.stream"  # type: ignore[attr-defined]
    assert "a class whose __iter__ creates the generator" in str(error)


def test_a_fault_in_another_object_goes_by_that_object_s_name() -> None:
    error = blame(closure_over(generator()), "collate_fn")
    assert error.path == "collate_fn.<closure value>"  # type: ignore[attr-defined]
    error = blame(closure_over(sys._getframe()), "collate_fn")
    assert "Try: create it inside collate_fn. DataLoader(" in str(error)


def test_existing_handlers_catch_it() -> None:
    error = blame(Thing(bad=generator()))
    assert isinstance(error, TypeError)
    assert isinstance(error, pickle.PicklingError)
    assert error.__cause__ is not None


def test_an_object_that_refuses_in_its_own_reduce_is_named_itself() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("I stay here")

    error = blame(Thing(inner=Stubborn()))
    assert error.path == "dataset.inner"  # type: ignore[attr-defined]
    assert "I stay here" in str(error)
