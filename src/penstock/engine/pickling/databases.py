"""Reopens HDF5 files, LMDB environments and SQLite connections in a worker.

Each is reopened by its path, read-only, with all options that can be read from the handle. The
parent's handle is not changed. No library is imported in the parent, because the module of the
handle is already loaded.
"""

from __future__ import annotations

import operator
import os
import sys
from pathlib import Path
from typing import Any

_HDF5_DRIVERS = ("sec2", "stdio", "core", "windows")
_LMDB_MAX_DBS = 128
"""An environment does not expose its limit on named databases. This many cost nothing."""


# -- HDF5 ------------------------------------------------------------------------------------------


class Hdf5Reducer:
    """Reduces the HDF5 handles of one pickle. A worker opens each file only once."""

    def __init__(self) -> None:
        self._files: dict[int, Any] = {}
        """Files by their id in the HDF5 library. ``dataset.file`` returns a new Python object for
        the same file each time."""

    def reduce(self, obj: Any) -> tuple[Any, ...]:
        """Reduce a file to its path, and a group or dataset to its file and name."""
        if not obj:
            raise TypeError("the HDF5 handle is closed")
        is_file = isinstance(obj, sys.modules["h5py"].File)
        file = self._files.setdefault(obj.file.id.id, obj if is_file else obj.file)
        if obj is file:
            return _reopen_hdf5, _describe_hdf5(file)
        if is_file:
            return _same, (file,)
        if obj.name is None:
            raise TypeError(f"the HDF5 {type(obj).__name__.lower()} has no name in its file")
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
            f"the HDF5 file is open for writing ({path}, mode {file.mode!r}), and unsaved changes "
            "would be missing. Close it and open it with h5py.File(path, 'r')"
        )
    if file.driver not in _HDF5_DRIVERS:
        raise TypeError(f"the HDF5 driver {file.driver!r} does not use a path ({path})")
    if not os.path.isfile(path):
        raise TypeError(f"the HDF5 file does not exist anymore ({path})")
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
    """Reduce an environment to its path and flags.

    A process can open a path only once. Pickle's memo ensures that an environment held by several
    objects is opened once.
    """
    try:
        path, flags, info = environment.path(), environment.flags(), environment.info()
    except Exception as error:  # lmdb.Error, but lmdb is not imported here
        raise TypeError(f"the LMDB environment is closed ({error})") from error
    if not flags["readonly"]:
        raise TypeError(
            f"the LMDB environment is open for writing ({path}). Open it with "
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
    """Reduce a connection to the path of its database, to be opened read-only."""
    if connection.in_transaction:
        raise TypeError("the SQLite connection has uncommitted changes")
    cursor = connection.cursor()
    cursor.row_factory = None  # the user's factory may return anything
    rows = cursor.execute("PRAGMA database_list").fetchall()
    found = {os.fsdecode(name): os.fsdecode(file) for _, name, file in rows}
    extra = sorted(found.keys() - {"main", "temp"})
    if extra:
        raise TypeError(f"the SQLite connection has attached databases ({', '.join(extra)})")
    path = found["main"]
    if not path:
        raise TypeError("the SQLite database is in memory (':memory:')")
    if not os.path.isfile(path):
        raise TypeError(f"the SQLite database does not exist anymore ({path})")
    notes.append(
        f"the SQLite connection to {path} is reopened read-only in each worker, without its "
        "functions, converters (detect_types) and temporary tables"
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
