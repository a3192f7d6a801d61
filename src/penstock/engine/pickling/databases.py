"""Opens HDF5 files, LMDB environments and SQLite connections again in a worker.

Each by its path, for reading only, with the options that it can tell. The parent's handle stays as
it is. Nothing here imports a library in the parent: the handle's own module is loaded already.
"""

from __future__ import annotations

import operator
import os
import sys
from pathlib import Path
from typing import Any

_HDF5_DRIVERS = ("sec2", "stdio", "core", "windows")
_LMDB_MAX_DBS = 128
"""An environment does not tell how many named databases it allows; this many cost nothing."""


# -- HDF5 ------------------------------------------------------------------------------------------


class Hdf5Reducer:
    """Reduces the HDF5 handles of one pickle: a worker opens each file once."""

    def __init__(self) -> None:
        self._files: dict[int, Any] = {}
        """By their identifier in the library: ``dataset.file`` makes a new Python object each
        time, and all of them are one file."""

    def reduce(self, obj: Any) -> tuple[Any, ...]:
        """A file by its path; a group or dataset by its name in the file."""
        if not obj:
            raise TypeError("an HDF5 handle that is closed")
        is_file = isinstance(obj, sys.modules["h5py"].File)
        file = self._files.setdefault(obj.file.id.id, obj if is_file else obj.file)
        if obj is file:
            return _reopen_hdf5, _describe_hdf5(file)
        if is_file:
            return _same, (file,)
        if obj.name is None:
            raise TypeError(f"an HDF5 {type(obj).__name__.lower()} without a name in its file")
        return operator.getitem, (file, obj.name)


def _reopen_hdf5(path: str, options: dict[str, Any]) -> Any:
    import h5py

    return h5py.File(path, "r", **options)


def _same(file: Any) -> Any:
    return file


def _describe_hdf5(file: Any) -> tuple[str, dict[str, Any]]:
    path = os.path.abspath(os.fsdecode(file.filename))
    if file.mode != "r":
        raise TypeError(
            f"an HDF5 file that is open for writing ({path}, mode {file.mode!r}): what is not "
            "saved yet would be missing. Close it and open it with h5py.File(path, 'r')"
        )
    if file.driver not in _HDF5_DRIVERS:
        raise TypeError(f"an HDF5 file of driver {file.driver!r} ({path}), which has no path")
    if not os.path.isfile(path):
        raise TypeError(f"an HDF5 file that is no longer at {path}")
    access = file.id.get_access_plist()
    _, slots, num_bytes, preemption = access.get_cache()
    options = {
        "libver": file.libver,
        "swmr": bool(file.swmr_mode),
        "rdcc_nslots": slots,
        "rdcc_nbytes": num_bytes,
        "rdcc_w0": preemption,
    }
    if file.driver != "sec2":
        options["driver"] = file.driver
    if hasattr(access, "get_file_locking"):
        is_used, is_lax = access.get_file_locking()
        options["locking"] = "best-effort" if is_used and is_lax else bool(is_used)
    return path, options


# -- LMDB ------------------------------------------------------------------------------------------


def reduce_lmdb(environment: Any) -> tuple[Any, ...]:
    """By its path and flags. One process can open a path once only, and pickle's memo sees to it
    that an environment which several objects hold is opened once.
    """
    try:
        path, flags, info = environment.path(), environment.flags(), environment.info()
    except Exception as error:  # lmdb.Error, of a module that we do not import
        raise TypeError(f"an LMDB environment that is closed ({error})") from error
    if not flags["readonly"]:
        raise TypeError(
            f"an LMDB environment that is open for writing ({path}). Open it with "
            "lmdb.open(path, readonly=True)"
        )
    options = {name: flags[name] for name in ("subdir", "lock", "readahead") if name in flags}
    options.update(map_size=info["map_size"], max_readers=info["max_readers"])
    return _reopen_lmdb, (os.path.abspath(os.fsdecode(path)), options)


def _reopen_lmdb(path: str, options: dict[str, Any]) -> Any:
    import lmdb

    return lmdb.open(path, readonly=True, create=False, max_dbs=_LMDB_MAX_DBS, **options)


# -- SQLite ----------------------------------------------------------------------------------------


def reduce_sqlite(connection: Any, notes: list[str]) -> tuple[Any, ...]:
    """By the path of its database, read-only."""
    if connection.in_transaction:
        raise TypeError("a SQLite connection with changes that are not committed")
    cursor = connection.cursor()
    cursor.row_factory = None  # the user's may give anything
    rows = cursor.execute("PRAGMA database_list").fetchall()
    found = {os.fsdecode(name): os.fsdecode(file) for _, name, file in rows}
    extra = sorted(found.keys() - {"main", "temp"})
    if extra:
        raise TypeError(f"a SQLite connection with attached databases ({', '.join(extra)})")
    path = found["main"]
    if not path:
        raise TypeError("a SQLite connection to a database in memory (':memory:')")
    if not os.path.isfile(path):
        raise TypeError(f"a SQLite connection whose file is no longer at {path}")
    notes.append(
        f"the SQLite connection to {path} is opened again in each worker, read-only; functions, "
        "converters (detect_types) and temporary tables do not come along"
    )
    factories = (connection.row_factory, connection.text_factory)
    return _reopen_sqlite, (path, connection.isolation_level, *factories)


def _reopen_sqlite(path: str, isolation_level: Any, row_factory: Any, text_factory: Any) -> Any:
    import sqlite3

    uri = f"{Path(path).as_uri()}?mode=ro"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=isolation_level, check_same_thread=False
    )
    connection.row_factory = row_factory
    connection.text_factory = text_factory
    return connection
