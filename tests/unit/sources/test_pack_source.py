"""Datasets that cannot be packed are rejected. Covers pack_source, fields and file_locks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Field, Packed, pack
from penstock.errors import AlreadyThere, BadArgument, CannotPack, CannotWrite, TooManyBad
from penstock.sources.file_locks import packing_lock
from support.packed_sets import Mixed, Pixels, digest

pytestmark = pytest.mark.windows


class Given:
    """A dataset that returns the given samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]


def pack_here(dataset: Any, path: Path, **keywords: Any) -> Packed:
    return pack(dataset, path, **{"workers": 0, **keywords})


CANNOT = {
    "an object array": (Given(np.array([{}, None], object)), {}, "array of object"),
    "a list in a tuple": (Given(([1, 2], 3)), {}, "without pickle"),
    "a set": (Given({1}), {}, "without pickle"),
    "None": (Given(None), {}, r"dataset\[0\] returned None"),
    "None, later": (Given(*[1] * 22, None, *[1] * 18), {}, r"dataset\[22\] returned None"),
    "None in a tuple": (Given((1, None)), {}, "field 'field_1' is None, which cannot be stored"),
    "texts in an array": (Given(np.array(["a"])), {}, "can contain only numbers"),
    "a text that is too long": (
        Given("abc", "abcdef"),
        {"fields": {"value": Field(max_bytes=4)}},
        "has 6 bytes; max_bytes=4",
    ),
    "NaN in a field of whole numbers": (
        Given(1.0, float("nan")),
        {"fields": {"value": "int32"}},
        "contains NaN or infinity",
    ),
    "infinity in a field of whole numbers": (
        Given(np.array([1.0, np.inf])),
        {"fields": {"value": "uint8"}},
        "contains NaN or infinity",
    ),
    "a number that is too large": (
        Given(1, 300),
        {"fields": {"value": "uint8"}},
        "cannot represent",
    ),
    "a fraction in whole numbers": (Given(1.5), {"fields": {"value": "int8"}}, "cannot represent"),
    "a float that is too large": (Given(1e9), {"fields": {"value": "float16"}}, "too large"),
    "a whole number of more than 64 bits": (Given(1 << 70), {}, "more than 64 bits"),
    "a name with a slash": (Given({"a/b": 1}), {}, "cannot be the name of a field"),
    "a name that leads out": (Given({"..": 1}), {}, "cannot be the name of a field"),
    "a name with a slash, given": (Given((1, 2)), {"fields": ["a", "b/c"]}, "cannot be the name"),
    "names that differ in case only": (Given({"x": 1, "X": 2}), {}, "differ in more than case"),
    "too few names": (Given((1, 2)), {"fields": ["a"]}, "has 1 names, but a sample has 2"),
    "a name that is not there": (Given({"a": 1}), {"fields": {"b": Field()}}, "fields= has 'b'"),
    "another form": (Given(*[(1, 2)] * 22, (1, 2, 3), *[(1, 2)] * 18), {}, "sample 22 is a tuple"),
    "another shape": (
        Given(*[np.zeros(2)] * 22, np.zeros(3), *[np.zeros(2)] * 18),
        {},
        r"sample 22: .* has shape \(3,\)",
    ),
    "another dtype": (
        Given(*[np.zeros(2)] * 22, np.zeros(2, np.int8), *[np.zeros(2)] * 18),
        {},
        "sample 22: .* is .i1",
    ),
    "another kind": (Given(*[1] * 22, "one", *[1] * 18), {}, "sample 22: .* is text"),
    "no sample": (Given(), {}, "no samples"),
    "no length": (iter([1]), {}, "has no length"),
    "an option that is not known": (
        Given(1),
        {"on_error": "ignore"},
        r"pack\(\.\.\., on_error='skip'\)",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_packed_is_named(case: str, tmp_path: Path) -> None:
    dataset, keywords, what = CANNOT[case]
    with pytest.raises((CannotPack, BadArgument), match=what):
        pack_here(dataset, tmp_path / "set", **keywords)
    with pytest.raises(Exception, match="packed"):
        Packed(tmp_path / "set")


def test_a_fixed_field_that_is_ragged_after_all_is_told_how(tmp_path: Path) -> None:
    samples = [*[np.zeros(2)] * 22, np.zeros(3), *[np.zeros(2)] * 18]
    with pytest.raises(CannotPack, match=r"Field\(ragged=True\)"):
        pack_here(Given(*samples), tmp_path / "set")
    packed = pack_here(Given(*samples), tmp_path / "other", fields={"value": Field(ragged=True)})
    assert [len(packed[i]) for i in (21, 22, 23)] == [2, 3, 2]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyThere, match=r"notes\.txt"):
        pack_here(Given(1, 2), tmp_path)
    assert digest(tmp_path).keys() == {"notes.txt"}
    pack_here(Given(1, 2), tmp_path / "set")
    before = digest(tmp_path / "set")
    with pytest.raises(AlreadyThere, match="not overwritten"):
        pack_here(Given(3, 4), tmp_path / "set")
    assert digest(tmp_path / "set") == before


def test_only_one_process_packs_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with packing_lock(str(tmp_path / "set")), pytest.raises(AlreadyThere, match="another process"):
        pack_here(Given(1, 2), tmp_path / "set")
    assert len(pack_here(Given(1, 2), tmp_path / "set")) == 2


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot be written"):
        pack_here(Given(1), tmp_path / "file" / "set")
    assert (tmp_path / "file").read_text() == ""


def test_a_set_that_does_not_fit_the_disk_is_not_begun(tmp_path: Path) -> None:
    class Huge:
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: int) -> np.ndarray:
            return np.zeros(1 << 20, np.uint8)

    with pytest.raises(CannotWrite, match="GB are free"):
        pack_here(Huge(), tmp_path / "set")
    assert not list((tmp_path / "set").glob("*.npy"))


@pytest.mark.parametrize("on_error", ["skip", "replace", lambda index, error: -1])
def test_bad_samples_follow_the_policy_and_stay_listed(on_error: Any, tmp_path: Path) -> None:
    dataset = Given(0, 1, ValueError("torn"), 3, "text", 5)
    packed = pack_here(dataset, tmp_path / "set", on_error=on_error, shard_bytes=16)
    assert [index for index, _ in packed.bad_samples] == [2, 4]
    assert packed.bad_samples[0][1] == "ValueError: torn"
    values = [packed[i] for i in range(len(packed))]
    if on_error == "skip":
        assert values == [0, 1, 3, 5]
    else:
        assert [values[i] for i in (0, 1, 3, 5)] == [0, 1, 3, 5]
        assert len(values) == 6


def test_a_bad_sample_raises_its_own_error_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torn"):
        pack_here(Given(0, ValueError("torn")), tmp_path / "set")


def test_too_many_bad_samples_are_an_error(tmp_path: Path) -> None:
    dataset = Given(0, ValueError("torn"), 2)
    with pytest.raises(TooManyBad, match="1 of 3 samples are bad") as info:
        pack_here(dataset, tmp_path / "set", on_error="skip", max_bad=0.1)
    assert str(info.value.__cause__) == "sample 1: ValueError: torn"
    assert len(pack_here(dataset, tmp_path / "two", on_error="skip", max_bad=1)) == 2
    with pytest.warns(UserWarning, match="max_bad=1 has no effect, because on_error='raise'"):
        pack_here(Given(0, 1), tmp_path / "three", max_bad=1)


class Random:
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3) + float(np.random.rand())


@pytest.mark.legacy
@pytest.mark.filterwarnings("ignore:sample 0 is different each time")
def test_packing_twice_gives_the_same_bytes_even_of_random_samples(tmp_path: Path) -> None:
    for name in ("one", "two"):
        pack_here(Random(), tmp_path / name, shard_bytes=100)
    pack_here(Random(), tmp_path / "seeded", shard_bytes=100, seed=1)
    one, two, seeded = (digest(tmp_path / name) for name in ("one", "two", "seeded"))
    assert one == two
    assert one != seeded


def test_any_map_does_the_work_in_any_order(tmp_path: Path) -> None:
    def backwards(function: Any, numbers: Any) -> Any:
        return [function(number) for number in reversed(list(numbers))]

    pack_here(Mixed(), tmp_path / "one", shard_bytes=1500)
    pack_here(Mixed(), tmp_path / "two", shard_bytes=1500, map=backwards)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_a_requested_dtype_is_stored_and_a_name_given(tmp_path: Path) -> None:
    packed = pack_here(
        Pixels(5), tmp_path / "set", fields={"pixels": "float16", "number": Field(dtype="int32")}
    )
    pixels, number = packed[3]
    assert pixels.dtype == np.float16
    assert number == 3
    assert number.dtype == np.int32
