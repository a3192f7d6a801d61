"""Handles of pyarrow, fsspec, torchcodec, Lance and obstore: reopened, or rejected with a remedy.

Datasets, file systems and stores of these libraries have their own pickling, which opens them again
in the worker. Open files are reopened by path and position here. Handles that do not expose how
they were opened are rejected, with the line of :func:`penstock.reopenable` that records it. pickle
would send some of them as a pointer into the memory of this process.

Tested by ``tests/integration/engine/pickling/test_format_libraries.py``.
"""

from __future__ import annotations

import copyreg
import os
import sys
from typing import Any

from penstock.named_tuple import NamedTuple

_UNKNOWN = "does not expose the path and the options that it was opened with"
_STREAM = "is a stream that only one process can read"
_IN_MEMORY = "exists only in the memory of this process"


class Rejected(NamedTuple):
    """A class whose instances cannot be reopened.

    Args:
        reason: Completes the sentence "a <class> ...".
        remedy: The line to paste. ``{path}`` is replaced by the attribute that holds the handle.
        shares_position: True if forked workers would move each other's position in the file.
    """

    module: str
    reason: str
    remedy: str
    shares_position: bool = False


_OPEN_IN_WORKER = "create it in __getitem__ or __iter__ from a dataset in {path}"
_REJECTED = {
    "VideoDecoder": Rejected(
        "torchcodec.decoders",
        _UNKNOWN,
        "{path} = penstock.reopenable(VideoDecoder, path)",
        shares_position=True,
    ),
    "AudioDecoder": Rejected(
        "torchcodec.decoders",
        _UNKNOWN,
        "{path} = penstock.reopenable(AudioDecoder, path)",
        shares_position=True,
    ),
    "ParquetFile": Rejected(
        "pyarrow.parquet", _UNKNOWN, "{path} = penstock.reopenable(pq.ParquetFile, path)"
    ),
    "RecordBatchFileReader": Rejected(
        "pyarrow.ipc", _UNKNOWN, "{path} = penstock.reopenable(pyarrow.ipc.open_file, path)"
    ),
    "RecordBatchStreamReader": Rejected("pyarrow.ipc", _STREAM, _OPEN_IN_WORKER),
    "RecordBatchReader": Rejected("pyarrow.lib", _STREAM, _OPEN_IN_WORKER),
    "Scanner": Rejected("pyarrow.dataset", _STREAM, _OPEN_IN_WORKER),
    "LanceScanner": Rejected("lance.dataset", _STREAM, _OPEN_IN_WORKER),
    "LanceFileReader": Rejected(
        "lance.file", _UNKNOWN, "{path} = penstock.reopenable(LanceFileReader, path)"
    ),
    "MemoryStore": Rejected(
        "obstore.store", _IN_MEMORY, "{path} = obstore.store.LocalStore(folder)"
    ),
    "MemoryFileSystem": Rejected(
        "fsspec.implementations.memory", _IN_MEMORY, "{path} = fsspec.filesystem('file')"
    ),
}
_THREADED = {
    "LocalStore": "obstore.store",
    "S3Store": "obstore.store",
    "GCSStore": "obstore.store",
    "AzureStore": "obstore.store",
    "HTTPStore": "obstore.store",
    "MemoryStore": "obstore.store",
    "LanceDataset": "lance.dataset",
    "ParquetFile": "pyarrow.parquet",
    "FileSystemDataset": "pyarrow.dataset",
}
"""Classes that read with threads of their library, and their modules."""
_FSSPEC_FILES = {
    "LocalFileOpener": "fsspec.implementations.local",
    "AbstractBufferedFile": "fsspec.spec",
    "PickleableTextIOWrapper": "fsspec.core",
}


def has_threads(kind: type) -> bool:
    """Return True if objects of this class read with threads, which a forked worker lacks."""
    return any(
        base.__name__ in _THREADED and base is _class_in(_THREADED[base.__name__], base.__name__)
        for base in kind.__mro__
    )


# -- rejected handles ------------------------------------------------------------------------------


def find_rejected(kind: type) -> tuple[str, Rejected] | None:
    """Return the entry for a class or its base class. None if the class has its own pickling."""
    for base in kind.__mro__:
        entry = _REJECTED.get(base.__name__)
        if entry is not None and base is _class_in(entry.module, base.__name__):
            return None if _is_pickled_by_user(kind, base) else (base.__name__, entry)
    return None


def _class_in(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _is_pickled_by_user(kind: type, base: type) -> bool:
    if kind in copyreg.dispatch_table:
        return True
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in names)


# -- pyarrow ---------------------------------------------------------------------------------------


def reduce_arrow_file(file: Any) -> tuple[Any, ...]:
    """Reduce a file of pyarrow to its path and position, and a BufferReader to its content."""
    if file.closed:
        raise TypeError("the file is closed")
    kind = type(file).__name__
    if kind == "BufferReader":
        position = file.tell()
        content = file.read_at(file.size(), 0)
        return _reopen_arrow_file, (kind, content, position)
    if not file.readable() or file.writable():
        raise TypeError("a file opened for writing belongs to the process that opened it")
    return _reopen_arrow_file, (kind, path_of_descriptor(file.fileno()), file.tell())


def _reopen_arrow_file(kind: str, source: Any, position: int) -> Any:
    import pyarrow

    openers = {
        "OSFile": pyarrow.OSFile,
        "MemoryMappedFile": pyarrow.memory_map,
        "BufferReader": pyarrow.BufferReader,
    }
    file = openers[kind](source)
    file.seek(position)
    return file


def has_own_position(kind: type) -> bool:
    """Return True if a file of this class keeps its position in its process, not in the kernel."""
    names = ("MemoryMappedFile", "BufferReader")
    return any(kind is _class_in("pyarrow.lib", name) for name in names)


def path_of_descriptor(fd: int) -> str:
    """Return the path of an open file (Linux).

    Raises:
        TypeError: The path is unknown, or is a different file by now.
    """
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        raise TypeError("the path of the open file is known only on Linux") from error
    try:
        is_same = os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        is_same = False
    if not is_same:
        raise TypeError(f"the open file was deleted or replaced after it was opened ({path})")
    return path


# -- fsspec ----------------------------------------------------------------------------------------


def is_fsspec_file(kind: type) -> bool:
    """Return True if the class is a file of fsspec, or of a library based on it."""
    return any(
        base.__name__ in _FSSPEC_FILES
        and base is _class_in(_FSSPEC_FILES[base.__name__], base.__name__)
        for base in kind.__mro__
    )


def reduce_fsspec_file(file: Any) -> tuple[Any, ...] | None:
    """Check a file of fsspec, whose own pickling opens it again at the same position.

    A text file is reduced here. Its own pickling would continue after the bytes read ahead.
    """
    if file.closed:
        raise TypeError("the file is closed")
    if type(file) is _class_in("fsspec.core", "PickleableTextIOWrapper"):
        _, encoding, errors, newline = file.args[:4]
        options = {"encoding": encoding, "errors": errors, "newline": newline}
        return _reopen_fsspec_text, (file.buffer, options, file.tell())
    if file.mode != "rb":
        raise TypeError("a file opened for writing belongs to the process that opened it")
    if isinstance(file, _class_in("fsspec.implementations.local", "LocalFileOpener") or ()):
        _refuse_replaced(file)
    return None


def _refuse_replaced(file: Any) -> None:
    try:
        is_same = os.path.samestat(os.fstat(file.fileno()), os.stat(file.path))
    except OSError:
        is_same = False
    if not is_same:
        raise TypeError(f"the open file was deleted or replaced after it was opened ({file.path})")


def _reopen_fsspec_text(buffer: Any, options: dict[str, Any], position: int) -> Any:
    from fsspec.core import PickleableTextIOWrapper

    file = PickleableTextIOWrapper(buffer, **options)
    file.seek(position)
    return file
