"""Files that are read at offsets, and files that change while a dataset is open."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import BadStore, Damaged, MissingExtra
from penstock.sources import source_files
from penstock.sources.source_files import SourceFiles, describe

pytestmark = pytest.mark.legacy
CONTENT = bytes(range(256))


def make(folder: Path, count: int = 1) -> SourceFiles:
    paths = [folder / f"{number}.bin" for number in range(count)]
    for path in paths:
        path.write_bytes(CONTENT)
        os.utime(path, ns=(10**18, 10**18))
    return SourceFiles([str(path) for path in paths])


def test_bytes_are_read_at_an_offset(tmp_path: Path) -> None:
    files = make(tmp_path, 2)
    assert files.read(1, offset=3, num_bytes=4) == CONTENT[3:7]
    assert pickle.loads(pickle.dumps(files)).read(0, offset=250, num_bytes=6) == CONTENT[250:]


def test_a_read_past_the_end_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"0\.bin ends before byte 257"):
        make(tmp_path).read(0, offset=250, num_bytes=7)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("change", ["replaced", "rewritten", "truncated", "deleted"])
def test_a_file_that_changed_is_never_read(tmp_path: Path, change: str, is_open: bool) -> None:
    files = make(tmp_path)
    path = tmp_path / "0.bin"
    if is_open:
        assert files.read(0, 0, 1) == b"\0"  # control
    if change == "replaced":
        (tmp_path / "new").write_bytes(bytes(256))
        os.replace(tmp_path / "new", path)
    elif change == "rewritten":
        path.write_bytes(bytes(256))
    elif change == "truncated":
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(Damaged, match=r"0\.bin (has changed|cannot be)"):
        files.read(0, 0, 1)


def test_an_open_file_replaced_by_one_with_the_same_size_and_time_is_noticed(
    tmp_path: Path,
) -> None:
    files = make(tmp_path)
    files.read(0, 0, 1)
    (tmp_path / "new").write_bytes(bytes(256))
    os.utime(tmp_path / "new", ns=(10**18, 10**18))
    os.replace(tmp_path / "new", tmp_path / "0.bin")
    with pytest.raises(Damaged, match="has changed"):
        files.read(0, 0, 1)


def test_a_missing_file_is_an_error_when_opening(tmp_path: Path) -> None:
    with pytest.raises(BadStore, match="cannot be opened"):
        SourceFiles([str(tmp_path / "missing")])


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_OPEN", 3)
    files = make(tmp_path, 10)
    for turn in range(2):
        for number in range(10):
            assert files.read(number, turn, 1) == bytes([turn])
    assert len(files._handles) == 3


def test_another_process_opens_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make(tmp_path)
    files.read(0, 0, 1)
    before = files._handles[0]
    other = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: other)
    files.read(0, 0, 1)
    assert files._handles[0] is not before


# -- files that a library opens --------------------------------------------------------------------


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def write_texts(folder: Any, count: int = 2) -> list[str]:
    paths = [str(folder / f"{number}.txt") for number in range(count)]
    for number, path in enumerate(paths):
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"file {number}")
    return paths


def test_a_file_is_opened_once_and_again_after_pickling(tmp_path: Any) -> None:
    files = SourceFiles(write_texts(tmp_path), read_text)
    assert files.handle(1) is files.handle(1)
    other = pickle.loads(pickle.dumps(files))
    assert other.handle(1) == "file 1"
    assert other.handle(1) is not files.handle(1)


def test_only_a_number_of_files_stays_open(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_OPEN", 2)
    files = SourceFiles(write_texts(tmp_path, 4), read_text)
    first = files.handle(0)
    for number in range(4):
        assert files.handle(number) == f"file {number}"
    assert files.handle(0) is not first


@pytest.mark.parametrize("how", ["rewritten", "replaced", "deleted"])
def test_a_changed_file_raises(tmp_path: Any, how: str) -> None:
    paths = write_texts(tmp_path)
    files = SourceFiles(paths, read_text)
    files.handle(0)
    files.check(0)
    before = os.stat(paths[0])
    if how == "rewritten":
        with open(paths[0], "a", encoding="utf-8") as file:
            file.write("!")
    elif how == "replaced":  # by a file of the same size and time
        with open(paths[0] + ".new", "w", encoding="utf-8") as file:
            file.write("file X")
        os.utime(paths[0] + ".new", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(paths[0] + ".new", paths[0])
    else:
        os.unlink(paths[0])
    with pytest.raises(Damaged, match=r"0\.txt"):
        files.check(0)
    files.check(1)


def test_a_file_that_changed_before_it_was_opened_again_raises(tmp_path: Any) -> None:
    paths = write_texts(tmp_path)
    files = pickle.dumps(SourceFiles(paths, read_text))
    with open(paths[0], "a", encoding="utf-8") as file:
        file.write("!")
    with pytest.raises(Damaged, match="has changed since"):
        pickle.loads(files).handle(0)
    assert pickle.loads(files).handle(1) == "file 1"


def test_decoded_copies_are_compared_from_time_to_time(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_texts(tmp_path)
    files = SourceFiles(paths, read_text)
    monkeypatch.setattr(source_files, "CHECK_EVERY_S", 1000)
    files.check_soon(0)
    os.unlink(paths[0])
    files.check_soon(0)  # checked a moment ago
    monkeypatch.setattr(source_files, "CHECK_EVERY_S", 0)
    with pytest.raises(Damaged, match="cannot be opened"):
        files.check_soon(0)


def test_a_missing_file_is_named(tmp_path: Any) -> None:
    with pytest.raises(BadStore, match=r"none\.txt cannot be opened"):
        SourceFiles([str(tmp_path / "none.txt")], read_text)


def test_errors_of_libraries_are_shortened() -> None:
    assert describe(OSError("first line\nsecond")) == "OSError: first line"
    assert len(describe(ValueError("x" * 1000))) < 400
    assert describe(KeyError()) == "KeyError"


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_the_install_line_is_named_if_pyarrow_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(MissingExtra, match='pip install "pyarrow>='):
        penstock.open_dataset(tmp_path / name)
