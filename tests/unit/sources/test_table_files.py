"""Files that another library opens: one handle per process, and every change is noticed."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import pytest

import penstock
from penstock.errors import BadStore, Damaged, MissingExtra
from penstock.sources import table_files
from penstock.sources.table_files import TableFiles, describe

pytestmark = pytest.mark.legacy


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def write_files(folder: Any, count: int = 2) -> list[str]:
    paths = [str(folder / f"{number}.txt") for number in range(count)]
    for number, path in enumerate(paths):
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"file {number}")
    return paths


def test_a_file_is_opened_once_and_again_after_pickling(tmp_path: Any) -> None:
    files = TableFiles(write_files(tmp_path), read_text)
    assert files.handle(1) is files.handle(1)
    other = pickle.loads(pickle.dumps(files))
    assert other.handle(1) == "file 1"
    assert other.handle(1) is not files.handle(1)


def test_only_a_number_of_files_stays_open(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "MAX_OPEN", 2)
    files = TableFiles(write_files(tmp_path, 4), read_text)
    first = files.handle(0)
    for number in range(4):
        assert files.handle(number) == f"file {number}"
    assert files.handle(0) is not first


@pytest.mark.parametrize("how", ["rewritten", "replaced", "deleted"])
def test_a_changed_file_raises(tmp_path: Any, how: str) -> None:
    paths = write_files(tmp_path)
    files = TableFiles(paths, read_text)
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
    paths = write_files(tmp_path)
    files = pickle.dumps(TableFiles(paths, read_text))
    with open(paths[0], "a", encoding="utf-8") as file:
        file.write("!")
    with pytest.raises(Damaged, match="has changed since"):
        pickle.loads(files).handle(0)
    assert pickle.loads(files).handle(1) == "file 1"


def test_decoded_copies_are_compared_from_time_to_time(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_files(tmp_path)
    files = TableFiles(paths, read_text)
    monkeypatch.setattr(table_files, "CHECK_EVERY_S", 1000)
    files.check_soon(0)
    os.unlink(paths[0])
    files.check_soon(0)  # checked a moment ago
    monkeypatch.setattr(table_files, "CHECK_EVERY_S", 0)
    with pytest.raises(Damaged, match="cannot be opened"):
        files.check_soon(0)


def test_a_missing_file_is_named(tmp_path: Any) -> None:
    with pytest.raises(BadStore, match=r"none\.txt cannot be opened"):
        TableFiles([str(tmp_path / "none.txt")], read_text)


def test_errors_of_libraries_are_shortened() -> None:
    assert describe(OSError("first line\nsecond")) == "OSError: first line"
    assert len(describe(ValueError("x" * 1000))) < 400
    assert describe(KeyError()) == "KeyError"


@pytest.mark.parametrize(("name", "extra"), [("x.parquet", "arrow"), ("x.arrow", "arrow")])
def test_the_install_line_is_named_if_pyarrow_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(MissingExtra, match=rf"pip install \"penstock\[{extra}\]\""):
        penstock.open_dataset(tmp_path / name)
