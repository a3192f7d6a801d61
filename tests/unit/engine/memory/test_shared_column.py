"""SharedList and SharedDict read like list and dict, pickle by reference, and are immutable."""

from __future__ import annotations

import copy
import enum
import io
import os
import pickle
import random
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock import SharedDict, SharedList
from penstock.engine.memory import shared_column as flat
from penstock.engine.pickling.pickler import PickledObjects
from support.datasets import Pair, assert_same
from support.pickling import arrive, round_trip

pytestmark = pytest.mark.legacy

CONTENTS: dict[str, list[Any]] = {
    "nothing": [],
    "text": ["", "a", "ü", "\U0001f600", "a" * 5000, "line\nbreak\0"],
    "half surrogates": ["a", "\ud800", "b\udcff"],
    "bytes": [b"", b"a", bytes(range(256))],
    "ints": [0, 1, -1, 2**63 - 1, -(2**63)],
    "big ints": [1, 2**63, -(2**200)],
    "floats": [0.0, -0.0, 1.5, float("inf"), 5e-324],
    "bools": [True, False],
    "bools and ints": [True, 1, False, 0],
    "nothing at all": [None, None],
    "tuples": [(1, "a"), ("b", 2.5, None), ()],
    "of all kinds": [1, "a", b"b", 2.5, None, True, 2**70, (1, [2]), {"k": 1}, Pair(1, 2)],
    "NumPy scalars": [np.int64(3), np.float32(0.5), np.str_("x"), np.bool_(True)],
    "arrays": [np.arange(3), np.zeros((2, 2), np.uint8)],
    "tensors": [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)],
    "late guests": [*range(5000), "a", 1.5, *range(5000)],
    "text, then a class": [*map(str, range(5000)), enum.IntEnum, len],
}


# -- the list --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTENTS)
def test_elements_come_back_with_their_exact_type(name: str) -> None:
    plain = CONTENTS[name]
    shared = SharedList(iter(plain))
    assert len(shared) == len(plain)
    assert_same(list(shared), plain)
    assert_same([shared[place] for place in range(-len(plain), len(plain))], [*plain, *plain])
    assert_same(list(reversed(shared)), plain[::-1])


@pytest.mark.parametrize(
    ("plain", "kind"),
    [
        (["a"], flat.TEXT),
        ([b"a"], flat.BYTES),
        ([1], flat.INT),
        ([1.0], flat.FLOAT),
        ([(1,)], flat.PICKLE),
        ([True], flat.PICKLE),
        ([1, "a"], flat.MIXED),
        ([2**64], flat.MIXED),
    ],
)
def test_one_type_is_stored_without_pickle(plain: list[Any], kind: int) -> None:
    assert SharedList(plain)._column.map.kind == kind


def test_nan_comes_back_as_nan() -> None:
    (value,) = SharedList([float("nan")])
    assert value != value


def test_it_is_a_sequence_that_cannot_be_changed_or_hashed() -> None:
    shared = SharedList([1])
    assert isinstance(shared, Sequence)
    assert not isinstance(shared, (list, MutableSequence))
    with pytest.raises(TypeError, match="unhashable"):
        hash(shared)


def test_it_finds_counts_and_compares_as_a_list_does() -> None:
    plain: list[Any] = [3, 1, 2, 1, "x"]
    shared = SharedList(plain)
    assert "x" in shared
    assert "y" not in shared
    assert (shared.index(1), shared.index(1, 2), shared.index(1, -3, -1)) == (1, 3, 3)
    assert shared.count(1) == 2
    assert shared == plain
    assert plain == shared
    assert shared == SharedList(plain)
    assert shared != plain[:-1]
    assert shared != [*plain[:-1], "y"]
    assert shared != tuple(plain)
    assert bool(shared)
    assert not SharedList()
    assert type(shared.copy()) is list
    assert shared.copy() == plain
    with pytest.raises(ValueError, match="9 is not in list"):
        shared.index(9)


def test_adding_makes_a_new_shared_list() -> None:
    shared, plain = SharedList([1]), [0]
    assert shared + plain == [1, 0]
    assert plain + shared == [0, 1]  # type: ignore[operator]
    assert type(plain + shared + shared) is SharedList  # type: ignore[operator]
    with pytest.raises(TypeError):
        shared + tuple(plain)


def test_a_slice_is_a_view_of_the_same_memory() -> None:
    shared = SharedList(range(100))
    view = shared[10:90:7]
    assert view == list(range(100))[10:90:7]
    assert view._column is shared._column
    assert view[-2:][::-1] == [87, 80]
    assert view[50:] == []


@pytest.mark.parametrize("index", [100, -101, 10**30])
def test_an_index_out_of_range_says_what_list_says(index: int) -> None:
    with pytest.raises(IndexError) as theirs:
        list(range(100))[min(index, 10**6)]
    with pytest.raises(IndexError) as ours:
        SharedList(range(100))[index]
    assert str(ours.value) == str(theirs.value)


def test_numpy_integers_and_tensors_index_it_and_text_does_not() -> None:
    shared = SharedList("abc")
    assert shared[np.int32(1)] == shared[torch.tensor(1)] == "b"
    with pytest.raises(TypeError, match="list indices must be integers or slices, not str"):
        shared["a"]  # type: ignore[call-overload]


def test_the_repr_is_short() -> None:
    assert repr(SharedList(range(3))) == "SharedList([0, 1, 2])"
    assert repr(SharedList(range(5003))) == "SharedList([0, 1, 2, ... 5,000 more])"


@pytest.mark.parametrize("name", ["append", "extend", "insert", "pop", "remove", "clear", "sort"])
def test_what_would_change_it_says_so_and_what_to_do(name: str) -> None:
    shared = SharedList([1])
    assert not hasattr(shared, name)
    with pytest.raises(AttributeError, match=rf"not support {name}\(\).*immutable.*SharedList\("):
        getattr(shared, name)
    with pytest.raises(TypeError, match="not support item assignment"):
        shared[0] = 2
    with pytest.raises(TypeError, match="not support item deletion"):
        del shared[0]


def test_a_wrong_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        SharedList().nothing  # noqa: B018


def test_building_holds_one_chunk_at_a_time() -> None:
    alive, most = 0, 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __reduce__(self) -> Any:
            return int, (7,)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    assert SharedList(Counted() for _ in range(20_000))[19_999] == 7
    assert most <= 2 * flat._MAX_CHUNK


def test_large_elements_come_in_small_chunks() -> None:
    writer = flat.ColumnWriter()
    writer.extend(bytes(1 << 20) for _ in range(3))
    assert writer.chunk_size() == 1


def test_a_class_that_travels_by_value_is_stored_once() -> None:
    class Local:
        """A class that cloudpickle sends by value."""

        def __init__(self, number: int) -> None:
            self.number = number

    shared = SharedList(Local(number) for number in range(2000))
    assert shared.nbytes < 2000 * 200
    assert type(shared[7]) is Local
    again = pickle.loads(pickle.dumps(shared))
    del shared
    assert again[1999].number == 1999


def test_building_does_not_move_the_user_s_generators() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    SharedList([1, "a", Pair(1, 2)])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_an_error_while_iterating_or_pickling_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        SharedList(1 // (3 - number) for number in range(5))
    with pytest.raises(TypeError, match="generator"):
        SharedList([(number for number in range(3))])


# -- copies and pickling ---------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ["text", "ints", "of all kinds", "nothing"])
def test_plain_pickle_makes_a_copy(name: str, protocol: int) -> None:
    shared = SharedList(CONTENTS[name])
    again = pickle.loads(pickle.dumps(shared, protocol))
    assert again == shared
    assert again._column.file.fd != shared._column.file.fd


def test_torch_save_makes_a_copy() -> None:
    stream = io.BytesIO()
    torch.save({"names": SharedList("abc")}, stream)
    stream.seek(0)
    keywords = {} if torch.__version__.startswith("1.") else {"weights_only": False}
    assert torch.load(stream, **keywords)["names"] == ["a", "b", "c"]


def test_a_pickled_view_leaves_the_rest_behind() -> None:
    shared = SharedList(str(number) * 50 for number in range(10_000))
    content = pickle.dumps(shared[5:8])
    assert len(content) < 4096
    assert pickle.loads(content) == shared[5:8]


def test_copy_and_deepcopy_need_no_second_one() -> None:
    shared = SharedList([[1]])
    twin = copy.deepcopy({"a": shared, "b": copy.copy(shared)})
    assert twin["a"] is twin["b"] is shared
    twin["a"][0].append(2)  # an object that was read before
    assert shared == [[1]]


def test_it_travels_by_descriptor_and_views_of_one_list_share_it() -> None:
    shared = SharedList(str(number) for number in range(100_000))
    names = SharedDict({"a": 1})
    (one, two, three), pickle_file = round_trip([shared, shared[::-1], names])
    assert pickle_file.location.num_bytes < 10_000
    assert len(pickle_file.fds) == 3  # one for the list, two for the dict
    assert one == shared
    assert two[0] == "99999"
    assert two._column is one._column
    assert three == {"a": 1}
    inodes = {os.fstat(column.file.fd).st_ino for column in (one._column, shared._column)}
    assert len(inodes) == 1
    pickle_file.close()


def test_a_plain_list_does_not_travel_by_descriptor() -> None:
    _, pickle_file = round_trip([str(number) for number in range(100_000)])
    assert pickle_file.location.num_bytes > 100_000
    assert pickle_file.fds == []
    pickle_file.close()


def test_the_descriptor_stays_open_as_long_as_the_pickle() -> None:
    shared = SharedList(["a"])
    pickle_file = PickledObjects({"value": shared}).to_shared_file()
    del shared  # a replacement worker can start later
    assert arrive(pickle_file) == ["a"]
    pickle_file.close()


def test_more_lists_than_descriptors_fit_travel_as_copies() -> None:
    lists = [SharedList([number]) for number in range(230)]
    again, pickle_file = round_trip(lists)
    assert len(pickle_file.fds) == 200
    assert [shared[0] for shared in again] == list(range(230))
    pickle_file.close()


# -- the dict --------------------------------------------------------------------------------------

KEYS: dict[Any, Any] = dict.fromkeys(
    ["a", "", "\ud800", b"a", 0, -1, 2**70, 2.5, float("inf"), None, (), ("a", 1), True, -2.5],
    "value",
)
KEYS.update({(("a",), 1): 13, ("a1",): 16, "a": "another"})


def test_a_dict_comes_back_in_its_order_with_exact_types() -> None:
    shared = SharedDict(KEYS)
    assert_same(list(shared), list(KEYS))
    assert_same(list(shared.items()), list(KEYS.items()))
    assert_same(list(shared.values()), list(KEYS.values()))
    assert_same([shared[key] for key in KEYS], list(KEYS.values()))
    assert list(reversed(shared)) == list(reversed(KEYS))
    assert shared == KEYS
    assert dict(KEYS) == shared
    assert shared != {**KEYS, "more": 1}
    assert type(shared.copy()) is dict
    assert isinstance(shared, Mapping)
    assert not isinstance(shared, (dict, MutableMapping))


@pytest.mark.parametrize("key", [1, 1.0, True, np.int64(1), np.float32(1), np.bool_(True)])
def test_equal_keys_find_the_same_value(key: Any) -> None:
    assert SharedDict({1: "one"})[key] == "one"
    assert SharedDict({(key, "a"): "one"})[(1, "a")] == "one"


@pytest.mark.parametrize("key", ["b", b"b", 3, 2.25, ("a",), ("a", 1, None), float("nan")])
def test_a_key_that_is_missing_is_missing(key: Any) -> None:
    shared = SharedDict(KEYS)
    assert key not in shared
    assert shared.get(key) is None
    assert shared.get(key, 7) == 7
    with pytest.raises(KeyError) as info:
        shared[key]
    assert info.value.args[0] is key


def test_of_equal_keys_the_first_place_and_the_last_value_count() -> None:
    pairs: list[Any] = [(1, "a"), ("x", "b"), (True, "c"), ("y", "d"), ("x", "e"), (1.0, "f")]
    assert list(SharedDict(iter(pairs)).items()) == list(dict(pairs).items())


def test_keys_of_equal_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.memory.shared_dict._hash", lambda code: len(code) % 3)
    plain = {str(number): number for number in range(300)}
    shared = SharedDict([*plain.items(), ("7", "seven")])
    plain["7"] = "seven"  # type: ignore[assignment]
    assert shared == plain
    assert "300" not in shared


@pytest.mark.parametrize("key", [frozenset(), 1j, object(), slice(1)])
def test_a_key_of_another_type_is_refused_with_what_works(key: Any) -> None:
    if type(key) is slice and type(key).__hash__ is None:
        pytest.skip("slices have a hash from Python 3.12 on")
    with pytest.raises(TypeError, match="Supported are str, bytes, int"):
        SharedDict([(key, 1)])
    with pytest.raises(TypeError, match="Supported are str, bytes, int"):
        SharedDict()[key]


def test_nan_as_a_key_is_refused() -> None:
    for key in (float("nan"), (1, float("nan"))):
        with pytest.raises(TypeError, match="NaN"):
            SharedDict({key: 1})


def test_a_key_that_no_dict_takes_gives_the_usual_error() -> None:
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        SharedDict()[[]]


def test_a_dict_is_copied_by_pickle_and_kept_by_deepcopy() -> None:
    shared = SharedDict(KEYS)
    assert pickle.loads(pickle.dumps(shared)) == KEYS
    assert copy.deepcopy(shared) is shared
    assert through_copy(SharedDict()) == {}
    assert repr(SharedDict({"a": 1})) == "SharedDict({'a': 1})"
    assert repr(SharedDict(enumerate("abcde"))).endswith("2: 'c', ... 2 more})")


def through_copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", ["pop", "popitem", "clear", "update", "setdefault"])
def test_what_would_change_a_dict_says_so(name: str) -> None:
    shared = SharedDict({"a": 1})
    assert not hasattr(shared, name)
    with pytest.raises(AttributeError, match=rf"not support {name}\(\).*immutable"):
        getattr(shared, name)
    with pytest.raises(TypeError, match="not support item assignment"):
        shared["a"] = 2
    with pytest.raises(TypeError, match="not support item deletion"):
        del shared["a"]
