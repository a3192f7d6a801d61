"""Databases are reopened read-only in a worker, or refused with their name and the reason."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.pickling import arrived, refusal, round_trip

pytestmark = pytest.mark.legacy


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
    assert "uncommitted changes" in refusal(database)
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
    assert hdf5["group/x"][0] == 0  # the parent's handle is still open


def test_an_hdf5_file_that_is_written_to_is_refused_with_the_reason(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file["x"] = np.arange(3)
        assert "open for writing" in refusal(file)
        assert "unsaved changes" in refusal(file["x"])


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
    with function(*arguments) as again:  # opened here because a process can open a path only once
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
