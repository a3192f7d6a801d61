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

from penstock.engine.pickling import databases, libraries
from penstock.engine.pickling.memmaps import MemmapReducer
from penstock.engine.pickling.reopenable import opening_call, reopen

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
    "OSFile": "pyarrow.lib",
    "MemoryMappedFile": "pyarrow.lib",
    "BufferReader": "pyarrow.lib",
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
            "pyarrow.lib": libraries.reduce_arrow_file,
        }
        self._is_rejected: dict[type, bool] = {}

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return a reduce value that reopens the handle. None for objects pickled as usual.

        Raises:
            TypeError: The object is a handle that cannot be reopened.
        """
        kind = type(obj)
        module = _module_of_class(kind)
        if module is not None:
            return self._reducers[module](obj)
        if issubclass(kind, io.IOBase):
            if libraries.is_fsspec_file(kind):
                return libraries.reduce_fsspec_file(obj)
            return _reduce_file(obj) if _is_open_file(obj) else None
        if kind not in self._is_rejected:
            self._is_rejected[kind] = libraries.find_rejected(kind) is not None
        if self._is_rejected[kind]:
            raise TypeError(_why_rejected(kind))
        return self._memmaps.reduce(obj)


def reduce_reopenable(obj: Any) -> tuple[Any, ...] | None:
    """Return a reduce value for a handle opened with ``penstock.reopenable``, else None."""
    call = opening_call(obj)
    return None if call is None else (reopen, tuple(call))


def is_handle(obj: Any) -> bool:
    """Return True for an open handle. Errors name the handle, not an object inside it."""
    kind = type(obj)
    if issubclass(kind, io.IOBase):
        return _is_open_file(obj)
    return _module_of_class(kind) is not None or libraries.find_rejected(kind) is not None


def is_shared_by_forks(obj: Any) -> bool:
    """Return True for an open handle whose position forked workers would share."""
    if issubclass(type(obj), io.IOBase):  # pyarrow's files count as such
        is_open = is_handle(obj) and not obj.closed and bool(obj.readable())
        return is_open and not libraries.has_own_position(type(obj))
    rejected = libraries.find_rejected(type(obj))
    return is_handle(obj) if rejected is None else rejected[1].shares_position


def is_handle_class(kind: type) -> bool:
    """Return True if instances of this class are handles."""
    is_known = issubclass(kind, io.IOBase) or _module_of_class(kind) is not None
    return is_known or libraries.find_rejected(kind) is not None


def remedy_for(obj: Any, path: str) -> str | None:
    """Return the line to paste for a handle that is always rejected, else None.

    Args:
        path: The attribute that holds it, such as ``dataset.video``.
    """
    rejected = libraries.find_rejected(type(obj))
    return None if rejected is None else rejected[1].remedy.format(path=path)


def _why_rejected(kind: type) -> str:
    found = libraries.find_rejected(kind)
    assert found is not None
    name, rejected = found
    article = "an" if name[0] in "AEIO" else "a"
    return f"{article} {name} {rejected.reason}"


def _module_of_class(kind: type) -> str | None:
    """Return the module of the class of an archive, database or pyarrow file, or None."""
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
