"""Can what a dataset holds open be opened again in a worker? Files, archives, databases.

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
from typing import Any

from penstock.engine.pickling import databases
from penstock.engine.pickling.memmaps import reduce_memmap
from penstock.engine.pickling.process_maps import ProcessMaps

_MAX_TEXT_BYTES = 64 << 20
"""How much of a text file is searched for carriage returns; a quarter of a second, uncached."""


class HandleReducer:
    """Decides for each object of one pickle. ``notes``: what the user should know about it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._maps = ProcessMaps()
        self._hdf5: dict[int, databases.Hdf5File] = {}

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """How to open it again; None when it is no handle, or travels as anything else does.

        Raises:
            TypeError: It is one, and cannot be opened again.
        """
        if isinstance(obj, io.IOBase):
            return _reduce_file(obj) if _is_open_file(obj) else None
        module = type(obj).__module__.partition(".")[0]
        if module == "numpy":
            return reduce_memmap(obj, self._maps, self.notes)
        if module == "zipfile" and type(obj).__name__ == "ZipFile":
            return _reduce_zip(obj)
        if module == "tarfile" and type(obj).__name__ == "TarFile":
            return _reduce_tar(obj)
        if module == "sqlite3" and type(obj).__name__ == "Connection":
            return databases.reduce_sqlite(obj, self.notes)
        if module == "h5py" and is_handle(obj):
            return databases.reduce_hdf5(obj, self._hdf5)
        if type(obj).__name__ == "Environment" and is_handle(obj):
            return databases.reduce_lmdb(obj)
        return None


def is_handle(obj: Any) -> bool:
    """Is this something that is open, at fault as such and not some inner part of it?"""
    if isinstance(obj, io.IOBase):
        return _is_open_file(obj)
    names = {
        "zipfile": ("ZipFile",),
        "tarfile": ("TarFile",),
        "sqlite3": ("Connection",),
        "h5py": ("File", "Group", "Dataset"),
        "lmdb": ("Environment",),
    }
    for module_name, kinds in names.items():
        module = sys.modules.get(module_name)
        if module is not None and type(obj) in (getattr(module, kind) for kind in kinds):
            return True
    return False


def _is_open_file(obj: io.IOBase) -> bool:
    in_memory = isinstance(obj, (io.BytesIO, io.StringIO))
    return not in_memory and obj not in (sys.stdin, sys.stdout, sys.stderr)


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
        return _reopen_binary, (path, 0 if file is raw else -1, position)
    _refuse_carriage_returns(path)
    return _reopen_text, (path, file.encoding, file.errors, position)


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


def _reopen_binary(path: str, buffering: int, position: int) -> Any:
    file = open(path, "rb", buffering)  # noqa: SIM115
    file.seek(position)
    return file


def _reopen_text(path: str, encoding: str, errors: str, position: int) -> Any:
    file = open(path, encoding=encoding, errors=errors)  # noqa: SIM115
    file.seek(position)
    return file


# -- archives --------------------------------------------------------------------------------------


def _reduce_zip(archive: Any) -> tuple[Any, ...]:
    if archive.fp is None:
        raise TypeError("an open archive was expected here; this one is closed")
    if archive.mode != "r":
        raise TypeError(f"an open archive that is written to (mode {archive.mode!r})")
    options = {"metadata_encoding": getattr(archive, "metadata_encoding", None)}
    options = {name: value for name, value in options.items() if value is not None}
    # Made over a file object: that object travels, by its own rules.
    source = archive.fp if archive._filePassed else _path_of(archive.fp, archive.filename)
    return _reopen_zip, (source, archive.pwd, options)


def _reopen_zip(source: Any, password: bytes | None, options: dict[str, Any]) -> Any:
    import zipfile

    archive = zipfile.ZipFile(source, **options)
    archive.pwd = password
    return archive


def _reduce_tar(archive: Any) -> tuple[Any, ...]:
    if archive.closed:
        raise TypeError("an open archive was expected here; this one is closed")
    if archive.mode != "r":
        raise TypeError(f"an open archive that is written to (mode {archive.mode!r})")
    if archive._extfileobj or not hasattr(archive.fileobj, "fileno"):
        raise TypeError("an open archive that was made over another file object or a stream")
    path = _path_of(archive.fileobj, archive.name)
    return _reopen_tar, (path, archive.encoding, archive.errors)


def _reopen_tar(path: str, encoding: str, errors: str) -> Any:
    import tarfile

    return tarfile.open(path, encoding=encoding, errors=errors)
