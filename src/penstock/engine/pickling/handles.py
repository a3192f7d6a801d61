"""Opens in each worker what a dataset holds open: files, archives, databases, mapped arrays.

    parent: HandleReducer.reduce(handle) -> "open that file, like this, at this place"
    worker: opens it, for reading

An open file belongs to the process that opened it: two processes that share one also share its
position. What was opened for reading, by name, is opened again in each worker. Anything else is
refused with the reason, and :mod:`penstock.engine.pickling.error_path` says where it was found. No
library is imported for this: what is not loaded cannot be held.
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
"""How much of a text file is searched for carriage returns; a quarter of a second, uncached."""
_MODULES = {
    "ZipFile": "zipfile",
    "TarFile": "tarfile",
    "Connection": "sqlite3",
    "File": "h5py",
    "Group": "h5py",
    "Dataset": "h5py",
    "Environment": "lmdb",
}
"""Classes of things that are open, and the modules that have them."""


class HandleReducer:
    """Reduces the open handles of one pickle. ``notes``: what the user should know about it."""

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
        """How to open it again; None when it is no handle, or is pickled as anything else is.

        Raises:
            TypeError: It is one, and cannot be opened again.
        """
        if issubclass(type(obj), io.IOBase):
            return _reduce_file(obj) if _is_open_file(obj) else None
        module = _module_of(obj)
        if module is not None:
            return self._reducers[module](obj)
        return self._memmaps.reduce(obj)


def is_handle(obj: Any) -> bool:
    """Is this something that is open, at fault as such and not some inner part of it?"""
    is_file = issubclass(type(obj), io.IOBase)
    return _is_open_file(obj) if is_file else _module_of(obj) is not None


def is_handle_class(kind: type) -> bool:
    """Is every instance of this class a handle?"""
    return issubclass(kind, io.IOBase) or _module_of_class(kind) is not None


def _module_of(obj: Any) -> str | None:
    """The library of an archive or a database; None for anything else."""
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
        raise TypeError("an open file was expected here; this one is closed")
    buffer = file.buffer if type(file) is io.TextIOWrapper else file
    raw = getattr(buffer, "raw", buffer)
    if type(raw) is not io.FileIO:
        kind = type(file).__name__
        raise TypeError(f"an open file of this kind ({kind}) is bound to its process")
    if raw.writable():
        raise TypeError("an open file that is written to belongs to the process that opened it")
    path = _path_of(raw, raw.name)
    try:
        position = file.tell()
    except OSError as error:
        raise TypeError(f"an open file whose position is not known ({error})") from error
    if type(file) is not io.TextIOWrapper:
        options: dict[str, Any] = {"mode": "rb", "buffering": 0 if file is raw else -1}
    else:
        _refuse_carriage_returns(path)
        options = {"encoding": file.encoding, "errors": file.errors}
    return _reopen_file, (path, options, position)


def _path_of(opened: Any, name: Any) -> str:
    """The absolute name of an open file, if that name still leads to it."""
    if isinstance(name, int):
        raise TypeError("an open file without a name (it was made from a descriptor)")
    found = os.fstat(opened.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise TypeError(f"an open file that is a pipe, a socket or a device ({name})")
    path = os.path.abspath(os.fsdecode(name))
    try:
        is_same = os.path.samestat(found, os.stat(path))
    except OSError:
        is_same = False
    if not is_same:
        raise TypeError(f"an open file that was deleted or replaced since it was opened ({path})")
    return path


def _refuse_carriage_returns(path: str) -> None:
    """Python does not tell with which ``newline=`` a file was opened; without \\r all are alike."""
    size = os.path.getsize(path)
    if size == 0:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if size <= _MAX_TEXT_BYTES and content.find(b"\r") < 0:
            return
    what = "is large" if size > _MAX_TEXT_BYTES else "has carriage returns"
    raise TypeError(
        f"an open file in text mode that {what} ({path}): nobody can tell with which newline= it "
        "was opened. Opened with mode 'rb' it can travel"
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
    # Made over a file object: that object is sent, by its own rules.
    source = archive.fp if archive._filePassed else _path_of(archive.fp, archive.filename)
    return _reopen_zip, (source, archive.pwd, options)


def _check_archive(archive: Any, *, is_closed: bool) -> None:
    if is_closed:
        raise TypeError("an open archive was expected here; this one is closed")
    if archive.mode != "r":
        raise TypeError(f"an open archive that is written to (mode {archive.mode!r})")


def _reopen_zip(source: Any, password: bytes | None, options: dict[str, Any]) -> Any:
    import zipfile

    archive = zipfile.ZipFile(source, **options)
    archive.pwd = password
    return archive


def _reduce_tar(archive: Any) -> tuple[Any, ...]:
    _check_archive(archive, is_closed=archive.closed)
    if archive._extfileobj or not hasattr(archive.fileobj, "fileno"):
        raise TypeError("an open archive that was made over another file object or a stream")
    path = _path_of(archive.fileobj, archive.name)
    return _reopen_tar, (path, archive.encoding, archive.errors)


def _reopen_tar(path: str, encoding: str, errors: str) -> Any:
    import tarfile

    return tarfile.open(path, encoding=encoding, errors=errors)
