"""Samples of archives: fields, blocks, errors that name the sample, and archives that change."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import BadArgument, BadStore, Damaged
from penstock.sources import blocks
from penstock.sources.blocks import ReadOptions
from penstock.sources.tar_dataset import TarDataset
from penstock.sources.tar_index import ENDING
from support.tar_archives import npy, sample_files, write_shards, write_tar

pytestmark = pytest.mark.legacy
COUNTS = [7, 0, 1, 12]


def open_archives(paths: list[str], **options: Any) -> TarDataset:
    return TarDataset(paths, ReadOptions(**options))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_shards(tmp_path, COUNTS)


def check(sample: dict[str, Any], number: int) -> None:
    assert list(sample) == ["__key__", "x.npy", "cls", "json"]
    assert sample["__key__"] == f"{number:06d}"
    assert sample["cls"] == number
    assert sample["json"] == {"number": number}
    assert sample["x.npy"].tolist() == [number] * 12


def test_samples_of_all_archives_follow_each_other(shards: list[str]) -> None:
    data = open_archives(shards)
    assert len(data) == 20
    for number in range(20):
        check(data[number], number)
    check(data[-1], 19)
    assert data.fields == ("__key__", "x.npy", "cls", "json")


@pytest.mark.parametrize("whole_from", [1, 3, 1000])
def test_samples_are_the_same_read_alone_or_in_blocks(
    shards: list[str], whole_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_WHOLE_FROM", whole_from)
    data = open_archives(shards)
    order = np.random.default_rng(0).permutation(20).tolist()
    for sample, number in zip(data.__getitems__(order), order, strict=True):
        check(sample, number)
    for number in order:
        check(data[number], number)
    assert (len(data._cached_blocks()) > 0) == (whole_from < 1000)


def test_a_random_order_reads_few_blocks_whole_and_a_block_order_reads_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.tar_index.BLOCK_BYTES", 40_000)
    paths = write_shards(tmp_path, [2000])
    whole: list[int] = []
    read = TarDataset._read_block
    monkeypatch.setattr(
        TarDataset, "_read_block", lambda self, block: whole.append(block) or read(self, block)
    )
    data = open_archives(paths, columns=["cls"])
    data.cache_bytes = 40 * 60_000
    assert data.num_blocks > 150
    for index in penstock.SeededOrder(len(data), seed=1):
        data[index]
    assert len(whole) < 20
    whole.clear()
    data._cache = None
    for index in data.block_order(seed=1):
        data[index]
    assert sorted(whole) == list(range(data.num_blocks))


def test_columns_choose_fields_and_their_order(shards: list[str]) -> None:
    data = open_archives(shards, columns=["cls", "__key__", "__url__"])
    assert data[8] == {"cls": 8, "__key__": "000008", "__url__": shards[3]}
    assert list(data[8]) == ["cls", "__key__", "__url__"]
    with pytest.raises(BadArgument, match="has no field 'jpg'") as caught:
        open_archives(shards, columns=["jpg"])
    assert "__key__, x.npy, cls, json" in str(caught.value)
    with pytest.raises(BadArgument, match="columns= is empty"):
        open_archives(shards, columns=[])


def test_bytes_are_handed_out_without_decoding(shards: list[str]) -> None:
    sample = open_archives(shards, decode=False)[3]
    assert sample["cls"] == b"3"
    assert sample["x.npy"] == npy(np.full(12, 3, np.int32))


def test_transforms_are_applied_to_fields(shards: list[str]) -> None:
    data = open_archives(shards, transforms={"cls": lambda value: -value})
    assert data[3]["cls"] == -3
    assert not hasattr(data, "__getitems__")
    with pytest.raises(BadArgument, match="have no field 'label'"):
        open_archives(shards, transforms={"label": abs})


def test_an_error_of_a_transform_is_not_changed(shards: list[str]) -> None:
    data = open_archives(shards, transforms={"cls": lambda value: 1 / (value - 2)})
    with pytest.raises(ZeroDivisionError):
        data[2]


def test_a_pickled_dataset_is_small_and_opens_its_files_again(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [2000])
    data = open_archives(paths)
    data.__getitems__(list(range(100)))
    content = pickle.dumps(data)
    assert len(content) < 3000
    check(pickle.loads(content)[5], 5)


def test_an_index_that_could_not_be_stored_is_pickled(
    shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.tar_index.write_index", lambda *_: False)
    data = pickle.loads(pickle.dumps(open_archives(shards)))
    assert not [path for path in shards if os.path.exists(path + ENDING)]
    check(data[8], 8)


def test_pickled_fields_are_refused_when_opening(tmp_path: Path) -> None:
    files = [("a.pyd", pickle.dumps({1, 2})), ("a.txt", b"text")]
    path = str(write_tar(tmp_path / "a.tar", files))
    with pytest.raises(BadArgument, match=r"'pyd' of .* is pickled"):
        open_archives([path])
    assert open_archives([path], columns=["txt"])[0] == {"txt": "text"}
    assert open_archives([path], allow_pickle=True)[0]["pyd"] == {1, 2}
    assert open_archives([path], decode=False)[0]["pyd"] == files[0][1]


# Bad input


def test_an_archive_without_samples_is_no_dataset(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [0])
    with pytest.raises(BadStore, match="has no samples"):
        open_archives(paths)


def test_a_sample_that_lacks_a_chosen_field_is_named(tmp_path: Path) -> None:
    files = [("a.txt", b"1"), ("a.cls", b"1"), ("b.txt", b"2")]
    data = open_archives([str(write_tar(tmp_path / "a.tar", files))], columns=["txt", "cls"])
    assert data[0] == {"txt": "1", "cls": 1}
    with pytest.raises(Damaged, match=r"sample 1 has no field 'cls'\n.*a\.tar, key 'b'"):
        data[1]


@pytest.mark.parametrize(
    ("name", "content"), [("cls", b"x"), ("json", b"{"), ("npy", b"\x93NUMPY"), ("txt", b"\xff")]
)
def test_a_field_that_cannot_be_decoded_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    files = [*sample_files(0, 3), (f"bad.{name}", content), *sample_files(4, 6)]
    data = open_archives([str(write_tar(tmp_path / "a.tar", files))])
    with pytest.raises(Damaged, match=rf"field '{name}' of sample 3 cannot be decoded") as caught:
        data[3]
    assert "key 'bad', byte " in str(caught.value)
    assert data[4]["cls"] == 4  # control: its neighbors are well
    assert data[2]["cls"] == 2


def test_a_sample_split_over_two_archives_is_refused(tmp_path: Path) -> None:
    files = sample_files(0, 4)
    one = write_tar(tmp_path / "a.tar", files[:7])  # sample 2 has its array here
    other = write_tar(tmp_path / "b.tar", files[7:])
    with pytest.raises(BadStore, match=r"sample '000002' is split over two archives: x\.npy is in"):
        open_archives([str(one), str(other)])
    same = write_tar(tmp_path / "c.tar", sample_files(3, 5))  # control: a key used twice
    assert len(open_archives([str(write_tar(tmp_path / "d.tar", files)), str(same)])) == 6


@pytest.mark.parametrize("change", ["replaced", "rewritten", "truncated"])
@pytest.mark.parametrize("is_read", [False, True])
def test_an_archive_that_changes_while_it_is_open_never_gives_a_wrong_sample(
    tmp_path: Path, change: str, is_read: bool
) -> None:
    (path,) = write_shards(tmp_path, [50], width=2000)
    data = open_archives([path], columns=["cls"])
    if is_read:
        assert data[0] == {"cls": 0}
    new = write_tar(tmp_path / "new", sample_files(1000, 1050, width=2000))
    assert os.path.getsize(new) == os.path.getsize(path)
    if change == "replaced":
        os.replace(new, path)
    elif change == "rewritten":
        Path(path).write_bytes(new.read_bytes())
    else:
        os.truncate(path, 100_000)
    for index in (1, 49):
        with pytest.raises(Damaged, match=r"has changed since"):
            data[index]
    if change != "truncated":
        assert open_archives([path], columns=["cls"])[1] == {"cls": 1001}


def test_a_wrong_index_is_noticed_when_a_sample_is_read(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [50])
    times = os.stat(path).st_mtime_ns
    data = open_archives([path])
    check(data[7], 7)
    # The archive has changed, and its size and time are the ones in the index.
    write_tar(tmp_path / "new", sample_files(1000, 1050))
    Path(path).write_bytes((tmp_path / "new").read_bytes())
    os.utime(path, ns=(times, times))
    again = open_archives([path])
    with pytest.raises(Damaged, match="is not the one that was indexed"):
        again[7]
    with pytest.raises(Damaged, match="is not the one that was indexed"):
        again.__getitems__(list(range(50)))


def test_every_changed_byte_of_an_index_is_noticed_or_makes_no_difference(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [20])
    expected = [str(sample) for sample in map(open_archives([path]).__getitem__, range(20))]
    place = Path(path + ENDING)
    whole = place.read_bytes()
    chance = np.random.default_rng(0)
    num_noticed = 0
    for at in chance.integers(0, len(whole), 400).tolist():
        place.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        data = open_archives([path])
        assert len(data) == 20
        for index in range(20):
            try:
                sample = data[index]
            except Damaged:
                num_noticed += 1
            else:
                assert str(sample) == expected[index]
        place.unlink(missing_ok=True)
    assert num_noticed > 200


def test_an_index_replaced_while_open_is_an_error(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [50])
    data = open_archives([path])
    os.utime(path, ns=(5, 5))
    open_archives([path])
    with pytest.raises(Damaged, match=r"index .* has changed"):
        pickle.loads(pickle.dumps(data))[0]


def test_a_sample_can_be_changed_without_changing_the_dataset(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [20])
    data = open_archives(paths)
    for sample in data.__getitems__(list(range(20))):
        sample["x.npy"][:] = 99
        sample["json"].clear()
    for number in range(20):
        check(data[number], number)
