"""Objects whose class computes attributes are pickled with their state."""

from __future__ import annotations

import copyreg
import io
import pickle
import sqlite3
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cloudpickle
import numpy as np
import pytest
import torch

from penstock.engine.pickling.dynamic_attributes import computes_attributes, reduce_by_class
from penstock.errors import CannotTravel
from support.pickling import arrived

pytestmark = pytest.mark.legacy


class Inner:
    classes = ("a", "b")

    def __init__(self) -> None:
        self.scale = 3

    def __getitem__(self, index: int) -> int:
        return index * self.scale


class Keeper(Inner):
    """Has its own pickled state, which a wrapper must not use as its state."""

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": self.scale, "kept": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return ()


class Wrapper:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index] + 1


class Slotted:
    __slots__ = ("_Slotted__deep", "__weakref__", "dataset")

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index] + 1


class Intercepting:
    """Forwards every name, including its own class."""

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "dataset", dataset)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "dataset"), name, value)

    def __getitem__(self, index: int) -> Any:
        return object.__getattribute__(self, "dataset")[index] + 1


class Silent(Wrapper):
    def __getattr__(self, name: str) -> Any:
        return None


class Mocking(Wrapper):
    def __getattr__(self, name: str) -> Any:
        return Mock()


class Raising(Wrapper):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


WRAPPERS = [Wrapper, Slotted, Intercepting, Silent, Mocking, Raising]


@pytest.mark.parametrize("inner", [Inner, Keeper])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_arrives_with_what_it_wraps(wrapper: Any, inner: Any) -> None:
    back = arrived(wrapper(inner()))
    assert type(back) is wrapper
    assert back[4] == 13


@pytest.mark.parametrize("wrapper", [Wrapper, Silent, Mocking, Raising])
def test_pickle_alone_does_not_bring_them_back(wrapper: Any) -> None:
    """Negative control: plain pickle does not restore these classes."""
    back = None
    try:
        back = pickle.loads(cloudpickle.dumps(wrapper(Inner())))
    except Exception:
        return
    assert "dataset" not in vars(back)  # the state went into the computed attribute


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_wrappers_arrive(wrapper: Any) -> None:
    back = arrived(Wrapper(wrapper(Slotted(Wrapper(Inner())))))
    assert back[4] == 16


def test_a_wrapper_that_refers_to_itself_arrives_once() -> None:
    wrapper = Wrapper(Inner())
    wrapper.me = wrapper
    wrapper.pair = [wrapper, wrapper.dataset]
    back = arrived(wrapper)
    assert back.me is back
    assert back.pair[0] is back
    assert back.pair[1] is back.dataset


def test_a_local_class_that_hands_names_on_arrives() -> None:
    class Local(Wrapper):
        def __getattr__(self, name: str) -> Any:
            return getattr(self.dataset, name)

    assert arrived(Local(Inner()))[1] == 4


class AttrDict(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


class AttrList(list):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_dicts_and_lists_with_computed_attributes_keep_their_items() -> None:
    made = AttrDict(a=1, b=AttrDict(c=AttrList([1, 2])))
    made.__dict__["extra"] = 5
    back = arrived(made)
    assert back == made
    assert type(back.b) is AttrDict
    assert type(back.b.c) is AttrList
    assert back.__dict__ == {"extra": 5}


class Numbered(int):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Reduced(Wrapper):
    def __reduce__(self) -> Any:
        return Reduced, (None,), {"dataset": self.dataset, "again": True}


class ReducedAsNew(Intercepting):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (ReducedAsNew,), {"dataset": SimpleNamespace(seen=1)}  # type: ignore[attr-defined]


class WithSetter(Wrapper):
    def __getstate__(self) -> Any:
        return [self.dataset]

    def __setstate__(self, state: Any) -> None:
        (self.dataset,) = state


class WithArguments(Wrapper):
    made_with = 0

    def __new__(cls, dataset: Any, *, key: int = 0) -> Any:
        cls.made_with = key
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (self.dataset,), {"key": 7}


def test_the_pickling_methods_of_the_class_are_used() -> None:
    assert arrived(Numbered(5)) == 5
    assert vars(arrived(Reduced(Inner())))["again"] is True
    assert arrived(ReducedAsNew(Inner())).seen == 1
    assert arrived(WithSetter(Inner()))[1] == 4
    back = arrived(WithArguments(Inner()))
    assert (back.made_with, back[1]) == (7, 4)


class Records(np.recarray):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_arrays_and_modules_of_such_classes_arrive_to_the_bit() -> None:
    array = np.arange(6.0).view(Records)
    np.testing.assert_array_equal(np.asarray(arrived(array)), np.arange(6.0))
    layer = torch.nn.Linear(2, 3)
    assert torch.equal(arrived(layer).weight, layer.weight)


class Registered(Wrapper):
    pass


def test_a_registered_reducer_goes_before() -> None:
    copyreg.pickle(Registered, lambda one: (SimpleNamespace, ()))  # type: ignore[arg-type]
    try:
        assert type(arrived(Registered(Inner()))) is SimpleNamespace
    finally:
        del copyreg.dispatch_table[Registered]


class OverCompiled(sqlite3.Connection):
    def __getattr__(self, name: str) -> Any:
        return None


class OverRaw(io.FileIO):
    def __getattr__(self, name: str) -> Any:
        return None


def test_a_compiled_base_with_memory_of_its_own_is_refused_as_before() -> None:
    connection = OverCompiled(":memory:")
    assert reduce_by_class(connection) is None
    with pytest.raises(CannotTravel):
        arrived(connection)
    connection.close()
    with OverRaw(__file__) as file, pytest.raises(CannotTravel):
        arrived(file)


def test_only_classes_that_compute_attributes_go_this_way() -> None:
    assert all(computes_attributes(kind) for kind in (*WRAPPERS, AttrDict, torch.nn.Module))
    plain = (int, dict, Inner, Keeper, np.ndarray, SimpleNamespace, type, type(pytest))
    assert not any(computes_attributes(kind) for kind in plain)
