"""Packing errors name the sample, the field and the remedy."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader, Field, cached, pack, packing
from penstock.errors import AlreadyThere, BadArgument, CannotPack, CannotWrite
from penstock.sources import packed_writer
from penstock.sources.packed_writer import PackSpec
from support.packed_sets import Mixed, digest

pytestmark = pytest.mark.windows

FLOATS = "Field(dtype='float64')"
REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "no fields": ([{}, {}], {}, "an empty dict"),
    "tuples of other lengths": ([(1, 2), (1,)], {}, "and ['field_0']"),
    "other keys": ([{"a": 1}, {"b": 1}], {}, "and ['b']"),
    "a name given twice": ([(1, 2)], {"fields": ["x", "x"]}, "contains a duplicate name"),
    "names that are one file on Windows": ([{"A": 1, "a": 2}], {}, "used in file names"),
    "a name of Windows' own": ([{"con": 1}], {}, "the name is reserved"),
    "a long name": ([{"a" * 101: 1}], {}, "it has 101 characters"),
    "a sparse tensor": ([torch.eye(2).to_sparse()], {}, "to_dense()"),
    "half a surrogate": (["\ud800"], {}, "not valid Unicode: surrogates not allowed at 0"),
    "numbers of 80 bits": ([np.ones(2, np.longdouble)], {}, "astype(np.float64)"),
    "a whole number of 71 bits": ([2**70], {}, "more than 64 bits"),
    "whole numbers and fractions": ([1, 1.5], {}, FLOATS),
    "arrays of other precision": ([np.zeros(2, "f4"), np.zeros(2)], {}, "Field(dtype='<f8')"),
}


@pytest.mark.parametrize(("samples", "keywords", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_packed_is_said_in_the_users_words(
    samples: list[Any], keywords: dict[str, Any], told: str, tmp_path: Path
) -> None:
    if told.endswith("(np.float64)") and np.dtype(np.longdouble) == np.float64:
        pytest.skip("long doubles are doubles here")
    with pytest.raises(CannotPack) as caught:
        pack(samples, tmp_path / "set", workers=0, **keywords)
    assert told in str(caught.value)


def test_the_remedies_that_are_named_help(tmp_path: Path) -> None:
    fields = {"value": Field(dtype="float64")}
    assert pack([1, 1.5, True], tmp_path / "a", workers=0, fields=fields)[1] == 1.5
    arrays = [np.zeros(2, "f4"), np.ones(2)]
    assert pack(arrays, tmp_path / "b", workers=0, fields={"value": "<f8"})[1][0] == 1
    assert pack([np.str_("é"), "b"], tmp_path / "c", workers=0)[0] == "é"


def test_keys_may_come_in_any_order(tmp_path: Path) -> None:
    samples = [{"a": 1, "b": "x"}, {"b": "y", "a": 2}, {"a": 3, "b": "z"}, {"b": "u", "a": 4}]
    for data in (pack(samples, tmp_path / "set", workers=0), cached(samples, "ram")):
        for _ in range(2):  # computed, then cached
            assert [data[index] for index in range(4)] == samples
    alike = [{"a": 1, "b": 10}, {"b": 20, "a": 2}, {"c": 3, "d": 30}, {"a": 4, "b": 40}]
    kept = cached(alike, "ram")
    assert [[kept[index] for index in range(4)] for _ in range(2)] == [alike, alike]


class Torn:
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> int:
        if index == 222:
            raise KeyError("torn")
        return index


def test_a_loader_is_sent_to_its_dataset(tmp_path: Path) -> None:
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with pytest.raises(CannotPack, match=r"pack\(loader\.dataset, \.\.\.\)"):
            pack(kind([1, 2]), tmp_path / "set")


class Counted:
    """Counts how often each sample is loaded."""

    def __init__(self, num: int) -> None:
        self.times = [0] * num

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> int:
        self.times[index] += 1
        return index


class CountedTorn(Counted):
    packed_fingerprint = staticmethod(lambda: "")

    def __getitem__(self, index: int) -> int:
        if index == 222:
            raise KeyError("torn")
        return super().__getitem__(index)


def test_few_samples_are_loaded_more_than_once(tmp_path: Path) -> None:
    data = Counted(100)
    pack(data, tmp_path / "set", workers=0)
    assert sum(data.times) == 100 + 8 + 4  # inspected, and loaded again with different draws
    again = Counted(100)
    with pytest.raises(AlreadyThere):
        pack(again, tmp_path / "set", workers=0)
    assert sum(again.times) == 0


def test_pieces_give_the_bytes_of_whole_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(Mixed(50), tmp_path / "whole", workers=0, shard_bytes=3000)
    assert len(list((tmp_path / "whole").glob("label-*.npy"))) > 1
    for rows in (1, 4, 7):
        monkeypatch.setattr(packing, "choose_piece_rows", lambda spec, workers, rows=rows: rows)
        pack(Mixed(50), tmp_path / f"{rows}", workers=0, shard_bytes=3000)
        assert digest(tmp_path / f"{rows}") == digest(tmp_path / "whole")
    other = pack(Mixed(51), tmp_path / "other", workers=0, shard_bytes=3000)  # control
    assert len(other) == 51
    assert digest(tmp_path / "other") != digest(tmp_path / "whole")


def test_without_room_to_join_pieces_whole_shards_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [np.zeros(1000, np.uint8)] * 100
    monkeypatch.setattr(packing, "choose_piece_rows", lambda spec, workers: 10)
    usage = shutil.disk_usage(tmp_path)
    joined: list[str] = []
    join = packed_writer._join_pieces
    monkeypatch.setattr(
        packed_writer, "_join_pieces", lambda *args: joined.append("once") or join(*args)
    )
    for free, num_joined in ((120_000, 0), (1_000_000, 2)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        joined.clear()
        pack(data, tmp_path / str(free), workers=0, shard_bytes=50_000)
        assert len(joined) == num_joined


@pytest.mark.parametrize("piece_rows", [0, 10])
def test_a_full_disk_counts_each_sample_once_and_leaves_nothing(
    piece_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [np.zeros(1_000_000, np.uint8)] * 400
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(packing, "choose_piece_rows", lambda spec, workers: piece_rows)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(CannotWrite) as caught:
            pack(data, tmp_path / name, workers=0, shard_bytes=1 << 30)
        assert "packing 400 samples" in str(caught.value)
        assert "needs about 400.0 MB, but 5.0 MB are free" in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


class Interrupted(Counted):
    """Raises KeyboardInterrupt at one sample, as Ctrl-C does, once it is armed."""

    packed_fingerprint = staticmethod(lambda: "")
    at = -1

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_what_was_done_before_ctrl_c_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "choose_piece_rows", lambda spec, workers: 10)
    data = Interrupted(100)
    data.at = 55
    with pytest.raises(KeyboardInterrupt):
        pack(data, tmp_path / "set", workers=0)
    assert len(list((tmp_path / "set").glob("piece-*"))) == 5  # one shard, which is not finished
    data.at, data.times = -1, [0] * 100
    assert len(pack(data, tmp_path / "set", workers=0)) == 100
    assert sum(data.times[8:50]) <= 8 + 4  # only inspected
    assert min(data.times[50:]) == 1
    assert not list((tmp_path / "set").glob("piece-*"))


def test_slow_samples_are_packed_in_pieces_of_seconds() -> None:
    spec = PackSpec(
        num_samples=10_000,
        shard_rows=10_000,
        form="value",
        fields=(),
        fingerprint="",
        attributes={},
        sample_bytes=8,
        sample_s=0.02,
    )
    assert packing.choose_piece_rows(spec, 2) == 100  # 2 s
    fast = replace(spec, sample_s=1e-6)
    assert packing.choose_piece_rows(fast, 2) == 0  # control: joining would cost more
    many = replace(spec, num_samples=1_000_000, shard_rows=10_000)
    assert packing.choose_piece_rows(many, 2) == 1500  # 30 s: there are shards for all workers
    slow = replace(spec, sample_s=1e3)
    assert packing.choose_piece_rows(slow, 2) == 3  # never more than 4,096 pieces
    pieces = replace(spec, num_samples=1001, shard_rows=500, piece_rows=300)
    numbers = [number for shard in range(pieces.num_shards) for number in pieces.pieces(shard)]
    assert [index for number in numbers for index in pieces.indices(number)] == [*range(1001)]
    assert [len(pieces.indices(number)) for number in numbers] == [300, 200, 300, 200, 1]


def test_an_error_of_the_users_own_says_which_sample_it_was(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="torn") as caught:
        pack(Torn(), tmp_path / "set", workers=0, shard_bytes=80)
    assert caught.value.sample_index == 222  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        note = "while packing sample 222. on_error='skip' leaves such samples out"
        assert caught.value.__notes__ == [note]
    with pytest.raises(CannotPack, match="KeyError: 'torn'"):
        pack(AllTorn(), tmp_path / "other", workers=0, on_error="skip")


@pytest.mark.parametrize("policy", ["skip", "replace", lambda index, error: None])
def test_a_packing_that_a_bad_sample_stopped_goes_on_without_it(
    policy: Any, tmp_path: Path
) -> None:
    data = CountedTorn(300)
    with pytest.raises(KeyError, match="torn"):
        pack(data, tmp_path / "set", workers=0, shard_bytes=80)
    assert len(list((tmp_path / "set").glob("shard-*.json"))) > 5
    data.times = [0] * 300
    packed = pack(data, tmp_path / "set", workers=0, shard_bytes=80, on_error=policy)
    assert [index for index, _ in packed.bad_samples] == [222]
    assert sum(data.times[8:74]) <= 1  # a substitute: the finished shards are not loaded again
    pack(CountedTorn(300), tmp_path / "whole", workers=0, shard_bytes=80, on_error=policy)
    assert digest(tmp_path / "set") == digest(tmp_path / "whole")


def test_shards_without_bad_samples_are_not_taken_from_another_policy(tmp_path: Path) -> None:
    def stop(function: Any, numbers: Any) -> Any:
        return [function(number) for number in list(numbers)[:-1]]

    with pytest.raises(BadArgument, match="no result for number"):
        pack(Torn(), tmp_path / "set", map=stop, shard_bytes=80, on_error="skip")
    for policy in ("raise", "replace"):
        with pytest.raises(AlreadyThere, match="a different unfinished packing"):
            pack(Torn(), tmp_path / "set", workers=0, shard_bytes=80, on_error=policy)


class AllTorn(Torn):
    def __getitem__(self, index: int) -> int:
        raise KeyError("torn")


def test_a_map_that_loses_results_is_named(tmp_path: Path) -> None:
    def lose(function: Any, numbers: Any) -> Any:
        return [function(number) for number in list(numbers)[:-2]]

    with pytest.raises(BadArgument, match="map=5 must be callable"):
        pack([1], tmp_path / "set", map=5)  # type: ignore[arg-type]
    with pytest.raises(CannotPack, match="longer_side='x' must be an integer"):
        Field(longer_side="x")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"no result for number 8 \(2 of 10 results"):
        pack(list(range(10)), tmp_path / "set", map=lose, shard_bytes=1)
    again = pack(list(range(10)), tmp_path / "set", workers=0, shard_bytes=1)
    assert [again[index] for index in range(10)] == list(range(10))


def test_records_of_rubbish_are_written_anew(tmp_path: Path) -> None:
    with pytest.raises(BadArgument):
        pack(list(range(10)), tmp_path / "set", map=lambda f, some: [f(some[0])], shard_bytes=1)
    (tmp_path / "set" / "shard-00000.json").write_text(json.dumps([1]))
    assert len(pack(list(range(10)), tmp_path / "set", workers=0, shard_bytes=1)) == 10


def test_room_is_advised_only_where_room_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match="a folder with write permission") as caught:
        pack([1], tmp_path / "file" / "set", workers=0)
    assert "free some space" not in str(caught.value)
    with pytest.raises(CannotWrite, match=r"'' cannot be written"):
        pack([1], "", workers=0)


def test_another_packing_says_how_it_differs(tmp_path: Path) -> None:
    def begin(function: Any, numbers: Any) -> Any:
        return [function(number) for number in list(numbers)[:1]]

    with pytest.raises(BadArgument):
        pack([(1, 2)] * 9, tmp_path, map=begin, shard_bytes=1)
    for samples, keywords, told in (
        ([(1, 2)] * 8, {}, "it has 9 samples, not 8"),
        ([(1, 2)] * 9, {"fields": ["a", "b"]}, r"it has the fields \['field_0'"),
        ([(1, 2.5)] * 9, {}, "'field_1' was int"),
        ([(1, 2)] * 9, {"seed": 1}, "seed="),
    ):
        with pytest.raises(AlreadyThere, match=told):
            pack(samples, tmp_path, workers=0, shard_bytes=1, **keywords)
    assert len(pack([(1, 2)] * 9, tmp_path, workers=0, shard_bytes=1)) == 9


class Flipped:
    """Flips each sample at random."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return -index - 1 if random.random() < 0.5 else index + 1


def test_what_is_random_is_packed_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"is different each time .* transforms="):
        packed = pack(Flipped(), tmp_path / "set", workers=0)
    assert [abs(packed[index]) for index in range(8)] == [*range(1, 9)]
    pack([random.random() for _ in range(8)], tmp_path / "drawn before", workers=0)  # no warning
