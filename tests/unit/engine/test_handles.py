"""What is open is opened again where it arrives, or refused by name with the reason."""

from __future__ import annotations

import gzip
import io
import os
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import CannotTravel
from pickled import round_trip
from specimens import assert_same

pytestmark = pytest.mark.legacy

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def arrived(value: Any) -> Any:
    again, pickle_file = round_trip(value)
    pickle_file.close()
    return again


def refusal(value: Any) -> str:
    with pytest.raises(CannotTravel) as info:
        PickledObjects({"dataset": Holder(deep=[Holder(handle=value)])})
    assert info.value.path == "dataset.deep[0].handle"  # type: ignore[attr-defined]
    return str(info.value)


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
            assert file.readline() == b"second\n"  # ours did not move
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
        assert "written to" in refusal(file)


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
        assert "without a name" in refusal(pipe)
    with open(os.open(lines, os.O_RDONLY), "rb") as file:
        assert "without a name" in refusal(file)
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
        assert "written to (mode 'a')" in refusal(opened)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_archive_is_opened_again(tmp_path: Path, mode: str) -> None:
    (tmp_path / "x.txt").write_text("content")
    with tarfile.open(tmp_path / "a.tar", mode) as made:  # type: ignore[call-overload]
        made.add(tmp_path / "x.txt", "x.txt")
        if mode == "w":
            assert "written to" in refusal(made)
    with tarfile.open(tmp_path / "a.tar") as opened, arrived(opened) as again:
        assert again.extractfile("x.txt").read() == b"content"


# -- SQLite ----------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Any]:
    with closing(sqlite3.connect(tmp_path / "a?b.db")) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [(1,), (2,)])
        connection.commit()
        yield connection


def test_a_sqlite_connection_is_opened_again_for_reading(database: Any) -> None:
    database.row_factory = sqlite3.Row
    again, pickle_file = round_trip(database)
    pickle_file.close()
    with closing(again):
        assert [row["x"] for row in again.execute("SELECT x FROM t")] == [1, 2]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            again.execute("INSERT INTO t VALUES (3)")
    assert any("read-only" in note for note in pickle_file.notes)


def test_sqlite_connections_that_live_in_this_process_are_refused(
    database: Any, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(":memory:")) as memory:
        assert "in memory" in refusal(memory)
    database.execute("INSERT INTO t VALUES (3)")
    assert "not committed" in refusal(database)
    database.rollback()
    database.execute("ATTACH ? AS other", (str(tmp_path / "other.db"),))
    assert "attached databases (other)" in refusal(database)


# -- HDF5 ------------------------------------------------------------------------------------------


@pytest.fixture
def hdf5(tmp_path: Path) -> Iterator[Any]:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as made:
        made["group/x"] = np.arange(10)
    with h5py.File(path, "r", rdcc_nbytes=1 << 22) as file:
        yield file


def test_hdf5_files_groups_and_datasets_are_opened_again_as_one_file(hdf5: Any) -> None:
    file, group, data, same = arrived([hdf5, hdf5["group"], hdf5["group/x"], hdf5["group/x"].file])
    assert data[3:5].tolist() == [3, 4]
    assert group["x"].shape == (10,)
    assert (file.mode, data.name) == ("r", "/group/x")
    assert file.id.id == data.file.id.id == group.file.id.id != hdf5.id.id
    assert file.id.get_access_plist().get_cache()[2] == 1 << 22
    assert same is file
    file.close()
    assert hdf5["group/x"][0] == 0  # ours is still open


def test_an_hdf5_file_that_is_written_to_is_refused_with_the_reason(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["x"] = np.arange(3)
        assert "open for writing" in refusal(file)
        assert "not saved yet" in refusal(file["x"])


def test_closed_and_pathless_hdf5_handles_are_refused(hdf5: Any) -> None:
    h5py = pytest.importorskip("h5py")
    content = io.BytesIO(Path(hdf5.filename).read_bytes())
    with h5py.File(content, "r") as over_memory:
        assert "driver 'fileobj'" in refusal(over_memory)
    assert "closed" in refusal(over_memory)


# -- LMDB ------------------------------------------------------------------------------------------


@pytest.fixture
def lmdb_path(tmp_path: Path) -> str:
    lmdb = pytest.importorskip("lmdb")
    path = str(tmp_path / "a.lmdb")
    with lmdb.open(path, subdir=False, max_dbs=2, map_size=1 << 20) as made:
        with made.begin(write=True) as transaction:
            transaction.put(b"k", b"v")
        named = made.open_db(b"named")
        with made.begin(write=True) as transaction:
            transaction.put(b"n", b"w", db=named)
    return path


def test_an_lmdb_environment_tells_how_to_open_it(lmdb_path: str) -> None:
    import lmdb

    from penstock.engine.pickling.databases import _reopen_lmdb
    from penstock.engine.pickling.handles import HandleReducer

    options: Any = {"subdir": False, "lock": False, "readahead": False, "max_dbs": 2}
    with lmdb.open(lmdb_path, readonly=True, **options) as environment:
        reduced = HandleReducer().reduce(environment)
    assert reduced is not None
    function, arguments = reduced
    assert function is _reopen_lmdb
    with function(*arguments) as again:  # only now: one process opens a path once
        flags = again.flags()
        assert (flags["readonly"], flags["lock"], flags["readahead"]) == (True, False, False)
        with again.begin() as transaction:
            assert transaction.get(b"k") == b"v"
        with again.begin(db=again.open_db(b"named", create=False)) as transaction:
            assert transaction.get(b"n") == b"w"


def test_an_lmdb_environment_that_is_written_to_or_closed_is_refused(lmdb_path: str) -> None:
    import lmdb

    with lmdb.open(lmdb_path, subdir=False) as environment:
        assert "open for writing" in refusal(environment)
    assert "closed" in refusal(environment)


# -- memory maps -----------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "the whole": lambda mapped: mapped,
    "rows": lambda mapped: mapped[10:200],
    "every second row": lambda mapped: mapped[::2],
    "backwards": lambda mapped: mapped[::-1, 5:290:3],
    "transposed": lambda mapped: mapped.T,
    "as a plain array": lambda mapped: np.asarray(mapped)[3:],
    "other words": lambda mapped: mapped.view(np.uint8),
}


@pytest.fixture
def mapped_path(tmp_path: Path) -> Path:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(90_000).reshape(300, 300))
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_memmap_and_its_views_are_mapped_again(mapped_path: Path, name: str, mode: Any) -> None:
    view = VIEWS[name](np.load(mapped_path, mmap_mode=mode))
    again, pickle_file = round_trip(view)
    assert pickle_file.location.num_bytes < 4096
    assert_same(np.ascontiguousarray(again), np.ascontiguousarray(view))
    assert (type(again), again.strides) == (type(view), view.strides)
    assert again.flags.writeable == view.flags.writeable
    assert not np.shares_memory(again, view)
    pickle_file.close()


def test_a_plain_array_is_not_mapped_again() -> None:
    _, pickle_file = round_trip(np.arange(90_000))
    assert pickle_file.location.num_bytes > 90_000 * 8
    pickle_file.close()


def test_a_worker_that_writes_to_a_memmap_changes_its_own_view_only(mapped_path: Path) -> None:
    original = np.load(mapped_path, mmap_mode="r+")
    again = arrived(original)
    again[:] = -1
    assert original.min() == 0
    assert np.load(mapped_path).min() == 0
    original[0, 0] = 7  # in the file at once, so seen by those who map it later
    assert arrived(original)[0, 0] == 7


@linux_only
def test_a_private_memmap_travels_by_value_once_it_was_written_to(mapped_path: Path) -> None:
    private = np.load(mapped_path, mmap_mode="c")
    assert private.sum() == 90_000 * 89_999 // 2
    _, pickle_file = round_trip(private)
    assert pickle_file.location.num_bytes < 4096
    pickle_file.close()
    private[5, 5] = -1
    again, pickle_file = round_trip(private)
    assert again[5, 5] == -1
    assert pickle_file.location.num_bytes > 90_000 * 8
    assert any("holds writes" in note for note in pickle_file.notes)
    pickle_file.close()


@linux_only
def test_a_memmap_whose_file_is_gone_or_replaced_travels_by_value(mapped_path: Path) -> None:
    mapped = np.load(mapped_path, mmap_mode="r")
    kept = mapped_path.rename(mapped_path.with_suffix(".old"))
    assert_same(np.asarray(arrived(mapped)), np.load(kept))
    np.save(mapped_path, np.zeros((300, 300), int))
    again, pickle_file = round_trip(mapped)
    assert_same(np.asarray(again), np.load(kept))
    assert any("another file" in note for note in pickle_file.notes)
    pickle_file.close()
