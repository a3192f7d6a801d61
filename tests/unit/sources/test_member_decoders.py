"""Fields are decoded by the ending of their name."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import BadArgument
from penstock.sources.member_decoders import make_decoder, refuse_pickles
from support.tar_archives import npy

pytestmark = pytest.mark.legacy


def decode(name: str, content: bytes, **options: Any) -> Any:
    return make_decoder(name, **options)(memoryview(content))


@pytest.mark.parametrize(
    ("name", "content", "value"),
    [
        ("txt", "é".encode(), "é"),
        ("a.text", b"x", "x"),
        ("cls", b"12", 12),
        ("id", b" -3\n", -3),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("json.gz", gzip.compress(b"[1]"), [1]),
        ("bin", b"\0\1", b"\0\1"),
        ("mp", b"\0\1", b"\0\1"),
        ("", b"x", b"x"),
        ("pyd", b"x", b"x"),  # without allow_pickle, which the dataset refuses before
    ],
)
def test_an_ending_says_what_a_field_is(name: str, content: bytes, value: Any) -> None:
    found = decode(name, content)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype="<i2").reshape(2, 3, 4),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 4)),
        np.arange(3, dtype=">u4"),
        np.array(["a", "bc"]),
    ],
)
def test_arrays_are_as_numpy_saved_them(array: np.ndarray) -> None:
    decoder = make_decoder("x.npy")
    for turn in range(3):  # from the second one on, the header is known
        changed = array if array.dtype.kind == "U" else array + array.dtype.type(turn)
        changed = np.asarray(changed, order="K").astype(array.dtype)
        found = decoder(memoryview(npy(changed)))
        assert found.dtype == changed.dtype
        assert found.flags.writeable
        assert found.flags.f_contiguous == changed.flags.f_contiguous
        np.testing.assert_array_equal(found, changed)


def test_an_array_of_another_shape_is_not_taken_for_the_one_before() -> None:
    decoder = make_decoder("npy")
    for shape in ((2, 3), (3, 2), (6,), (2, 3)):
        assert decoder(memoryview(npy(np.arange(6).reshape(shape)))).shape == shape


def test_an_array_with_missing_bytes_is_an_error() -> None:
    decoder = make_decoder("npy")
    content = npy(np.arange(60))
    decoder(memoryview(content))
    for length in (0, 5, 10, 100, len(content) - 1):
        with pytest.raises(Exception, match=r".+"):
            decoder(memoryview(content[:length]))


def test_a_changed_sample_does_not_change_the_next_one() -> None:
    decoder = make_decoder("npy")
    content = memoryview(npy(np.arange(5)))
    decoder(content)
    decoder(content)[:] = 7
    assert decoder(content).tolist() == [0, 1, 2, 3, 4]


def test_archives_of_arrays_are_dicts() -> None:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(3), b=np.eye(2))
    found = decode("npz", stream.getvalue())
    assert sorted(found) == ["a", "b"]
    assert found["a"].tolist() == [0, 1, 2]


def test_tensors_are_loaded_without_unpickling_anything_else() -> None:
    stream = io.BytesIO()
    torch.save({"x": torch.arange(3)}, stream)
    assert decode("pth", stream.getvalue())["x"].tolist() == [0, 1, 2]


class Trap:
    """Sets a flag when it is unpickled."""

    is_sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, ()


def _spring() -> str:
    Trap.is_sprung = True
    return "sprung"


@pytest.mark.parametrize("name", ["npy", "npz", "pth", "pkl"])
def test_no_code_of_a_file_runs_unless_pickles_are_allowed(name: str) -> None:
    stream = io.BytesIO()
    trap = np.array([Trap()], dtype=object)
    if name == "npy":
        np.save(stream, trap, allow_pickle=True)
    elif name == "npz":
        np.savez(stream, trap)
    elif name == "pth":
        torch.save(Trap(), stream)
    else:
        pickle.dump(Trap(), stream)
    Trap.is_sprung = False
    try:
        decode(name, stream.getvalue())
    except Exception:
        pass
    assert not Trap.is_sprung
    decode(name, stream.getvalue(), allow_pickle=True)  # control
    assert Trap.is_sprung


@pytest.mark.parametrize("name", ["pkl", "a.pyd", "pickle.gz"])
def test_pickled_fields_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(BadArgument, match=r"pickled\. Unpickling runs any code") as caught:
        refuse_pickles(["jpg", name], "a.tar")
    assert "columns=['jpg']" in str(caught.value)
    refuse_pickles(["jpg", "json"], "a.tar")  # control


def test_json_of_many_samples_is_not_shared() -> None:
    decoder = make_decoder("json")
    one, other = (decoder(memoryview(json.dumps({"a": 1}).encode())) for _ in range(2))
    assert one == other
    assert one is not other
