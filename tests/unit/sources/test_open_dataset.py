"""open_dataset recognises a format by the path, and reads patterns and lists."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import BadArgument, BadStore
from penstock.sources.open_dataset import FORMATS, expand_braces, expand_paths, recognise_format
from support.tar_archives import write_shards

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def keys(dataset: Any) -> list[int]:
    return [int(dataset[index]["cls"]) for index in range(len(dataset))]


def test_archives_are_given_as_folder_pattern_list_or_file(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    paths = write_shards(folder, [2, 3, 4])
    for given in (
        folder,
        str(folder),
        f"{folder}/*.tar",
        f"{folder}/shard-{{000..002}}.tar",
        f"{folder}/shard-00{{0,1,2}}.tar",
        paths,
        (Path(path) for path in paths),
        [f"{folder}/shard-000.tar", f"{folder}/shard-00[12].tar"],
    ):
        assert keys(penstock.open_dataset(given)) == list(range(9)), given
    assert keys(penstock.open_dataset(paths[1])) == [2, 3, 4]
    assert keys(penstock.open_dataset(paths[::-1]))[:4] == [5, 6, 7, 8]  # in the order of the list


def test_a_file_with_a_star_in_its_name_is_itself(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [2])
    Path(path).rename(tmp_path / "a[1]*.tar")
    assert len(penstock.open_dataset(tmp_path / "a[1]*.tar")) == 2


@pytest.mark.parametrize("given", ["missing.tar", "*.tar", "shard-{000..005}.tar"])
def test_a_path_that_names_no_file_is_an_error(tmp_path: Path, given: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    if "{" in given:
        write_shards(folder, [1, 1])
    with pytest.raises(BadStore, match="does not exist, or matches no file"):
        penstock.open_dataset(f"{folder}/{given}")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("{0..2}", ["0", "1", "2"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("x{a,,b}", ["xa", "x", "xb"]),
    ],
)
def test_braces_stand_for_several_names(pattern: str, names: list[str]) -> None:
    assert list(expand_braces(pattern)) == names


def test_hidden_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    write_shards(tmp_path, [3])
    for name in ("._shard-000.tar", "_temporary.tar"):
        (tmp_path / name).write_bytes(b"not an archive")
    assert keys(penstock.open_dataset(tmp_path)) == [0, 1, 2]
    (tmp_path / "other.tar").write_bytes(b"not an archive")  # the control
    with pytest.raises(BadStore):
        penstock.open_dataset(tmp_path)


def test_packed_sets_and_image_folders_are_recognised(tmp_path: Path) -> None:
    penstock.pack([{"n": n} for n in range(5)], tmp_path / "packed")
    assert penstock.open_dataset(tmp_path / "packed")[3] == {"n": 3}
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.ppm").write_bytes(b"P6 2 1 255 " + bytes(6))
    assert recognise_format(expand_paths(tmp_path / "images")) == "image folder"
    assert len(penstock.open_dataset(tmp_path / "images")) == 1


@pytest.mark.parametrize("content", ["nothing", "text"])
def test_what_is_not_recognised_names_the_formats(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if content == "text":
        (folder / "a.txt").write_text("text")
    with pytest.raises(BadStore, match="is not recognised") as caught:
        penstock.open_dataset(folder)
    assert all(repr(name) in str(caught.value) for name in FORMATS)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="format='tfrecord' must be one of"):
        penstock.open_dataset(tmp_path, format="tfrecord")


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {}, "list of paths is empty"),
        (None, {}, "a path is None, which is neither text nor a Path"),
        ([None], {}, "a path is None"),
        (5, {}, "a path is 5"),
        ("shard-000.tar", {"column": ["cls"]}, "argument 'column'. Did you mean 'columns'?"),
        ("shard-000.tar", {"cache_bytes": -1}, "'cache_bytes'. The options for format='tar' are"),
        ("shard-000.tar", {"columns": []}, "columns= is empty"),
        ("shard-000.tar", {"columns": 5}, "has no field 5; its fields are __key__, x.npy"),
        (["shard-000.tar"] * 2, {"format": "mds"}, "reads one folder at a time"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, options: Any, words: str
) -> None:
    write_shards(tmp_path, [3])
    monkeypatch.chdir(tmp_path)
    with pytest.raises((BadArgument, TypeError), match=re.escape(words)):
        penstock.open_dataset(given, **options)


def test_a_folder_of_two_formats_is_refused_unless_one_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [3])
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadStore, match="several formats: 1 of 'parquet', 1 of 'tar'"):
        penstock.open_dataset(tmp_path)
    assert len(penstock.open_dataset(tmp_path, format="tar")) == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
@pytest.mark.parametrize(
    "name", ["a.tar", "set/index.json", "set/manifest.json", "set/cat/1.jpg", "a.npy"]
)
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    if name == "a.npy":
        with pytest.raises(BadStore, match="it is a named pipe"):
            penstock.open_tensors(tmp_path / name)
        return
    path = tmp_path / name.partition("/")[0]
    with pytest.raises((BadStore, OSError), match="it is a named pipe, not a regular file"):
        penstock.open_dataset(path)[0]


def test_a_compressed_archive_is_recognised_and_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(BadStore, match="compressed with gzip"):
        penstock.open_dataset(tmp_path / "a.tar.gz")


def test_a_format_can_be_named_where_the_ending_says_nothing(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [3])
    Path(path).rename(tmp_path / "data")
    with pytest.raises(BadStore, match="not recognised"):
        penstock.open_dataset(tmp_path / "data")
    assert len(penstock.open_dataset(tmp_path / "data", format="tar")) == 3
