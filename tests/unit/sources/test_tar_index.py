"""The index of an archive: where it lies, when it is used, and when it is built again."""

from __future__ import annotations

import itertools
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadStore, Damaged
from penstock.sources import tar_index
from penstock.sources.source_files import read_stamp
from penstock.sources.tar_index import (
    BLOCK_BYTES,
    ENDING,
    build_index,
    find_index,
    load_index,
    make_index,
    open_indexes,
    path_beside,
    path_in_cache,
)
from support.tar_archives import sample_files, write_shards, write_tar

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the archives that were read."""
    seen: list[str] = []
    build = tar_index.build_index
    monkeypatch.setattr(
        tar_index, "build_index", lambda path, tell: seen.append(path) or build(path, tell)
    )
    return seen


def test_samples_are_adjacent_files_with_one_key(tmp_path: Path) -> None:
    names = ["a.jpg", "a.cls", "b.CLS", "b.jpg", "readme", "a.jpg", "c.seg.png", "c.json"]
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    index = build_index(str(path))
    assert [index.key(sample) for sample in range(len(index))] == ["a", "b", "a", "c"]
    assert index.field_names == ("jpg", "cls", "seg.png", "json")
    assert index.first_fields.tolist() == [0, 2, 4, 5, 7]
    data = path.read_bytes()
    found = [
        data[offset : offset + size].decode()
        for offset, size in zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    ]
    assert found == [name for name in names if name != "readme"]


def test_a_field_that_a_sample_has_twice_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.JPG", b"2")])
    with pytest.raises(BadStore, match=r"'a' in .* has the field 'jpg' twice"):
        build_index(str(path))


def test_a_field_named_like_the_key_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1"), ("a.__key__", b"2")])
    with pytest.raises(BadStore, match=r"'a.__key__' in .* has the field '__key__'"):
        build_index(str(path))


def test_an_index_is_built_once_and_lies_beside_the_archive(
    tmp_path: Path, builds: list[str]
) -> None:
    paths = write_shards(tmp_path, [5, 0, 7])
    first = open_indexes(paths)
    assert sorted(builds) == paths
    assert sorted(path for _, path in first) == [path + ENDING for path in paths]
    assert [len(index) for index, _ in first] == [5, 0, 7]
    second = open_indexes(paths)
    assert len(builds) == 3
    for (one, _), (other, _) in zip(first, second, strict=True):
        assert one.field_names == other.field_names
        assert [one.key(n) for n in range(len(one))] == [other.key(n) for n in range(len(other))]
        for name, values in one.arrays.items():
            assert values.tolist() == other.arrays[name].tolist()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize("change", ["content", "time", "replaced"])
def test_a_stale_index_is_built_again(tmp_path: Path, builds: list[str], change: str) -> None:
    (path,) = write_shards(tmp_path, [5])
    open_indexes([path])
    open_indexes([path])
    assert len(builds) == 1  # control
    if change == "time":
        os.utime(path, ns=(1, 1))
    else:
        write_tar(tmp_path / "new", sample_files(10, 13 if change == "content" else 15))
        os.utime(tmp_path / "new", ns=(2, 2))
        os.replace(tmp_path / "new", path)
    ((index, _),) = open_indexes([path])
    assert len(builds) == 2
    assert index.key(0) == ("000000" if change == "time" else "000010")


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [5])
    _, place = make_index(path)
    assert place is not None
    whole = Path(place).read_bytes()
    stamp = read_stamp(path)
    assert load_index(place, stamp) is not None  # control
    for content in (b"", b"x", whole[:40], whole[:-1], whole[:300], whole[1:], whole[:29] + b"{"):
        Path(place).write_bytes(content)
        assert load_index(place, stamp) is None
    for at in range(29, 200):  # in the JSON header
        Path(place).write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        assert load_index(place, stamp) is None


def test_an_index_lies_in_the_cache_if_the_folder_cannot_be_written(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_shards(tmp_path, [5])
    beside, cached = path_beside(path), path_in_cache(path)
    write = tar_index.write_index
    monkeypatch.setattr(
        tar_index,
        "write_index",
        lambda index, place: False if place == beside else write(index, place),
    )
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    index, place = make_index(path)
    assert place == cached
    assert cached.startswith(str(own_cache))
    found = find_index(path, index.stamp)
    assert found is not None
    assert found[1] == cached
    monkeypatch.setattr(tar_index, "write_index", lambda *_: False)
    assert make_index(path)[1] is None  # nowhere: it stays in memory


def test_a_full_disk_leaves_no_part_and_the_parts_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_shards(tmp_path, [5])
    old, new = (Path(f"{path}{ENDING}.{name}.part") for name in ("1-aa", "2-bb"))
    for part in (old, new):
        part.write_bytes(b"PENSTOCK")
    os.utime(old, (1, 1))
    index = build_index(path)
    pieces = tar_index._pieces

    def fill_disk(index: tar_index.TarIndex) -> Any:
        yield next(pieces(index))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tar_index, "_pieces", fill_disk)
    assert not tar_index.write_index(index, path + ENDING)
    assert [one.name for one in tmp_path.glob("*.part")] == [new.name]
    assert find_index(path, index.stamp) is None
    monkeypatch.undo()
    assert tar_index.write_index(index, path + ENDING)  # control


def test_archives_of_one_name_in_two_folders_have_two_indexes(tmp_path: Path) -> None:
    one, other = (path_in_cache(str(tmp_path / folder / "a.tar")) for folder in "xy")
    assert one != other


def test_an_archive_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [2000])

    def tell(place: int) -> None:
        os.utime(path, ns=(place, place))

    with pytest.raises(Damaged, match="has changed while it was read"):
        build_index(path, tell)


def test_blocks_hold_a_few_mib_of_adjacent_samples(tmp_path: Path) -> None:
    sizes = [*[100_000] * 50, 5 << 20, 10, 10, 3 << 20, *[1_000_000] * 3]
    files = [(f"{number}.bin", bytes(size)) for number, size in enumerate(sizes)]
    index = build_index(str(write_tar(tmp_path / "a.tar", files)))
    starts = index.block_starts.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(sizes)
    for first, last in itertools.pairwise(starts):
        begin, end = index.extent(first, last)
        assert end - begin <= BLOCK_BYTES or last == first + 1
        if last < len(sizes):  # one more would not fit
            assert index.extent(first, last + 1)[1] - begin > BLOCK_BYTES


def test_names_that_are_not_utf_8_stay_apart(tmp_path: Path) -> None:
    names = [b"\xff1.txt", b"\xfe1.txt"]
    decoded = [name.decode("utf-8", "surrogateescape") for name in names]
    path = write_tar(tmp_path / "a.tar", [(name, b"x") for name in decoded], tarfile.GNU_FORMAT)
    index = build_index(str(path))
    assert [index.key(n) for n in range(2)] == ["\udcff1", "\udcfe1"]
    place = str(path) + ENDING
    assert tar_index.write_index(index, place)
    again = load_index(place, index.stamp)
    assert again is not None
    assert again.key(1) == "\udcfe1"


def test_arrays_take_the_smallest_type(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [50])
    index = build_index(path)
    kinds = {name: values.dtype for name, values in index.arrays.items()}
    assert kinds["names"] == np.uint8
    assert kinds["offsets"] == np.uint32
    assert kinds["first_fields"] == np.uint8
