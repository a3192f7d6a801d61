"""Open handles are reopened in the worker, or rejected by name with the reason."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.pickling import Holder, arrived, refusal

pytestmark = pytest.mark.legacy


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_bytes("ä first\nsecond\nthird\n".encode())
    return path


# -- files -----------------------------------------------------------------------------------------


def test_a_binary_file_is_opened_again_at_its_place(lines: Path) -> None:
    with open(lines, "rb") as file:
        file.readline()
        with arrived(file) as again:
            assert again.readline() == b"second\n"
            assert file.readline() == b"second\n"  # the original did not move
            assert (type(again), again.mode) == (type(file), "rb")
            assert again.fileno() != file.fileno()


def test_an_unbuffered_file_stays_unbuffered(lines: Path) -> None:
    with open(lines, "rb", buffering=0) as file, arrived(file) as again:
        assert type(again) is io.FileIO


def test_a_text_file_keeps_its_encoding_and_its_place(lines: Path) -> None:
    with open(lines, encoding="latin-1") as file:
        file.readline()
        with arrived(file) as again:
            assert again.encoding == "latin-1"
            assert again.readline() == "second\n"
    with open(lines, encoding="utf-8", errors="replace") as file, arrived(file) as again:
        assert again.readline() == "ä first\n"
        assert again.errors == "replace"


def test_a_relative_name_leads_to_the_same_file(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(lines.parent)
    with open(lines.name, "rb") as file, arrived(file) as again:
        assert again.name == str(lines)


def test_one_file_that_two_objects_hold_is_opened_once(lines: Path) -> None:
    with open(lines, "rb") as file:
        one, two = arrived([Holder(file=file), Holder(file=file)])
    assert one.file is two.file
    one.file.close()


def test_a_file_that_is_written_to_is_refused(lines: Path) -> None:
    with open(lines, "r+b") as file:
        assert "opened for writing" in refusal(file)


def test_a_file_that_was_deleted_or_replaced_is_refused(lines: Path) -> None:
    with open(lines, "rb") as file:
        lines.unlink()
        assert "deleted or replaced" in refusal(file)
        lines.write_bytes(b"another")
        assert "deleted or replaced" in refusal(file)


def test_a_closed_file_is_refused(lines: Path) -> None:
    with open(lines, "rb") as file:
        pass
    assert "closed" in refusal(file)


def test_pipes_and_files_without_a_name_are_refused(lines: Path) -> None:
    read, write = os.pipe()
    os.close(write)
    with open(read, "rb") as pipe:
        assert "has no name" in refusal(pipe)
    with open(os.open(lines, os.O_RDONLY), "rb") as file:
        assert "has no name" in refusal(file)
    with open(os.devnull, "rb") as device:
        assert "pipe, a socket or a device" in refusal(device)


def test_a_compressed_file_is_refused_by_name(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        file.write(b"x")
    with gzip.open(tmp_path / "a.gz", "rb") as file:
        assert "GzipFile" in refusal(file)


def test_a_text_file_with_carriage_returns_is_refused_and_a_binary_one_is_not(lines: Path) -> None:
    lines.write_bytes(b"a\r\nb\r\n")
    with open(lines, newline="") as file:
        message = refusal(file)
    assert "newline=" in message
    assert "'rb'" in message
    with open(lines, "rb") as file, arrived(file) as again:
        assert again.read() == b"a\r\nb\r\n"


def test_a_text_file_in_the_middle_of_a_loop_is_refused(lines: Path) -> None:
    with open(lines) as file:
        next(file)
        assert "position" in refusal(file)


# -- archives --------------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x.txt", "content")
    return path


def test_a_zip_archive_is_opened_again(archive: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        opened.setpassword(b"secret")
        with arrived(opened) as again:
            assert again.read("x.txt") == b"content"
            assert again.pwd == b"secret"


def test_a_zip_archive_over_a_file_object_takes_it_along(archive: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(archive.read_bytes())) as opened, arrived(opened) as again:
        assert again.read("x.txt") == b"content"


def test_a_zip_archive_that_is_written_to_is_refused(archive: Path) -> None:
    with zipfile.ZipFile(archive, "a") as opened:
        assert "open for writing (mode 'a')" in refusal(opened)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_archive_is_opened_again(tmp_path: Path, mode: str) -> None:
    (tmp_path / "x.txt").write_text("content")
    with tarfile.open(tmp_path / "a.tar", mode) as made:  # type: ignore[call-overload]
        made.add(tmp_path / "x.txt", "x.txt")
        if mode == "w":
            assert "open for writing" in refusal(made)
    with tarfile.open(tmp_path / "a.tar") as opened, arrived(opened) as again:
        assert again.extractfile("x.txt").read() == b"content"
