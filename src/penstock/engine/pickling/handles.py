"""Reopens a dataset's open handles in each worker: files, archives, databases, mapped arrays.

    parent: HandleReducer.reduce(handle) -> path, options and position
    worker: opens the path for reading

An open file belongs to the process that opened it. Two processes that share a file also share its
position. A handle that was opened by name for reading is reopened in each worker. Any other handle
is rejected with a reason, and :mod:`penstock.engine.pickling.error_path` adds its location. No
library is imported for this, because a library that is not loaded has no open handles.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from penstock.engine.pickling import databases
from penstock.engine.pickling.memmaps import MemmapReducer

_MAX_TEXT_BYTES = 64 << 20
"""Text files up to this size are searched for carriage returns. Takes 0.25 s, uncached."""
_MODULES = {
    "ZipFile": "zipfile",
    "TarFile": "tarfile",
    "Connection": "sqlite3",
    "File": "h5py",
    "Group": "h5py",
    "Dataset": "h5py",
    "Environment": "lmdb",
}
"""Classes of open handles, and their modules."""


class HandleReducer:
    """Reduces the open handles of one pickle. ``notes`` collects messages for the user."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._memmaps = MemmapReducer(self.notes)
        hdf5 = databases.Hdf5Reducer()
        self._reducers: dict[str | None, Callable[[Any], tuple[Any, ...]]] = {
            "zipfile": _reduce_zip,
            "tarfile": _reduce_tar,
            "sqlite3": lambda connection: databases.reduce_sqlite(connection, self.notes),
            "h5py": hdf5.reduce,
            "lmdb": databases.reduce_lmdb,
        }

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return a reduce value that reopens the handle. None for objects pickled as usual.

        Raises:
            TypeError: The object is a handle that cannot be reopened.
        """
        if issubclass(type(obj), io.IOBase):
            return _reduce_file(obj) if _is_open_file(obj) else None
        module = _module_of(obj)
        if module is not None:
            return self._reducers[module](obj)
        return self._memmaps.reduce(obj)


def is_handle(obj: Any) -> bool:
    """Return True for an open handle. Errors name the handle, not an object inside it."""
    is_file = issubclass(type(obj), io.IOBase)
    return _is_open_file(obj) if is_file else _module_of(obj) is not None


def is_handle_class(kind: type) -> bool:
    """Return True if instances of this class are handles."""
    return issubclass(kind, io.IOBase) or _module_of_class(kind) is not None


def _module_of(obj: Any) -> str | None:
    """Return the module of an archive or database handle, or None."""
    return _module_of_class(type(obj))


def _module_of_class(kind: type) -> str | None:
    name = kind.__name__
    module = _MODULES.get(name)
    is_of_it = module is not None and kind is getattr(sys.modules.get(module), name, None)
    return module if is_of_it else None


def _is_open_file(obj: io.IOBase) -> bool:
    in_memory = isinstance(obj, (io.BytesIO, io.StringIO))
    is_standard = any(obj is stream for stream in (sys.stdin, sys.stdout, sys.stderr))
    return not in_memory and not is_standard


# -- files -----------------------------------------------------------------------------------------


def _reduce_file(file: Any) -> tuple[Any, ...]:
    if file.closed:
        raise TypeError("the file is closed")
    buffer = file.buffer if type(file) is io.TextIOWrapper else file
    raw = getattr(buffer, "raw", buffer)
    if type(raw) is not io.FileIO:
        kind = type(file).__name__
        raise TypeError(f"an open file of type {kind} belongs to the process that opened it")
    if raw.writable():
        raise TypeError("a file opened for writing belongs to the process that opened it")
    path = _path_of(raw, raw.name)
    try:
        position = file.tell()
    except OSError as error:
        raise TypeError(f"the position of the open file is unknown ({error})") from error
    if type(file) is not io.TextIOWrapper:
        options: dict[str, Any] = {"mode": "rb", "buffering": 0 if file is raw else -1}
    else:
        _refuse_carriage_returns(path)
        options = {"encoding": file.encoding, "errors": file.errors}
    return _reopen_file, (path, options, position)


def _path_of(opened: Any, name: Any) -> str:
    """Return the absolute path of an open file. Raises if the path is not that file."""
    if isinstance(name, int):
        raise TypeError("the open file has no name (it was opened from a descriptor)")
    found = os.fstat(opened.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise TypeError(f"the open file is a pipe, a socket or a device ({name})")
    path = os.path.abspath(os.fsdecode(name))
    try:
        is_same = os.path.samestat(found, os.stat(path))
    except OSError:
        is_same = False
    if not is_same:
        raise TypeError(f"the open file was deleted or replaced after it was opened ({path})")
    return path


def _refuse_carriage_returns(path: str) -> None:
    """Raise TypeError if the file contains carriage returns or is too large to search.

    Python does not expose the ``newline=`` of a file. Without \\r, all values are equivalent.
    """
    size = os.path.getsize(path)
    if size == 0:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if size <= _MAX_TEXT_BYTES and content.find(b"\r") < 0:
            return
    what = "is large" if size > _MAX_TEXT_BYTES else "contains carriage returns"
    raise TypeError(
        f"the open text file {what} ({path}), and Python does not expose its newline= setting. "
        "Open it with mode 'rb' instead"
    )


def _reopen_file(path: str, options: dict[str, Any], position: int) -> Any:
    file = open(path, **options)  # noqa: SIM115
    file.seek(position)
    return file


# -- archives --------------------------------------------------------------------------------------


def _reduce_zip(archive: Any) -> tuple[Any, ...]:
    _check_archive(archive, is_closed=archive.fp is None)
    options = {"metadata_encoding": getattr(archive, "metadata_encoding", None)}
    options = {name: value for name, value in options.items() if value is not None}
    # If it was opened from a file object, that object is reduced in turn.
    source = archive.fp if archive._filePassed else _path_of(archive.fp, archive.filename)
    return _reopen_zip, (source, archive.pwd, options)


def _check_archive(archive: Any, *, is_closed: bool) -> None:
    if is_closed:
        raise TypeError("the archive is closed")
    if archive.mode != "r":
        raise TypeError(f"the archive is open for writing (mode {archive.mode!r})")


def _reopen_zip(source: Any, password: bytes | None, options: dict[str, Any]) -> Any:
    import zipfile

    archive = zipfile.ZipFile(source, **options)
    archive.pwd = password
    return archive


def _reduce_tar(archive: Any) -> tuple[Any, ...]:
    _check_archive(archive, is_closed=archive.closed)
    if archive._extfileobj or not hasattr(archive.fileobj, "fileno"):
        raise TypeError("the archive was opened from a file object or a stream")
    path = _path_of(archive.fileobj, archive.name)
    return _reopen_tar, (path, archive.encoding, archive.errors)


def _reopen_tar(path: str, encoding: str, errors: str) -> Any:
    import tarfile

    return tarfile.open(path, encoding=encoding, errors=errors)
