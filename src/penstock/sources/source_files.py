"""Files of a dataset that each process opens for itself, and that must not change meanwhile.

A dataset remembers the size and modification time of its files. Every read compares them with the
file that the path names now, so a file that was replaced or rewritten raises an error and never
gives a wrong sample.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import BadStore, Damaged

MAX_OPEN = 64
"""Number of files that a process keeps open for one dataset."""


class FileStamp(NamedTuple):
    """Size and modification time of a file, by which a changed file is recognised."""

    size: int
    mtime_ns: int


def read_stamp(path: str) -> FileStamp:
    """Return the stamp of a file.

    Raises:
        BadStore: A file does not exist, or cannot be read.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise BadStore(f"{path} cannot be opened: {error.strerror or error}", path=path) from None
    return FileStamp(found.st_size, found.st_mtime_ns)


class _Handle:
    """An open file. Closed when the last thread that reads it lets go of it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        found = os.fstat(self.descriptor)
        self.inode = found.st_ino
        self.stamp = FileStamp(found.st_size, found.st_mtime_ns)
        self.mutex = threading.Lock()

    def pread(self, num_bytes: int, offset: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self.descriptor, num_bytes, offset)
        with self.mutex:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.read(self.descriptor, num_bytes)


class SourceFiles:
    """Files that are read at offsets. Pickled as their paths and stamps, without handles.

    Args:
        paths: The files.
        stamps: Their stamps when the dataset was opened. None: as they are now.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/x.bin"
        >>> with open(path, "wb") as file:
        ...     _ = file.write(b"0123456789")
        >>> files = SourceFiles([path])
        >>> files.read(0, offset=2, num_bytes=3)
        b'234'
    """

    draws_nothing = True

    def __init__(self, paths: Sequence[str], stamps: Sequence[FileStamp] | None = None) -> None:
        self.paths = list(paths)
        self.stamps = [read_stamp(path) for path in self.paths] if stamps is None else list(stamps)
        self._process = os.getpid()
        self._handles: OrderedDict[int, _Handle] = OrderedDict()

    def __len__(self) -> int:
        return len(self.paths)

    def __reduce__(self) -> tuple[object, ...]:
        return SourceFiles, (self.paths, self.stamps)

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the file with this number.

        Raises:
            Damaged: The file has changed since the dataset was opened, or cannot be read.
        """
        handle = self._handle(file)
        path = self.paths[file]
        try:
            parts = [handle.pread(num_bytes, offset)]
            num_read = len(parts[0])
            while num_read < num_bytes and parts[-1]:  # a read gives at most 2 GiB
                parts.append(handle.pread(num_bytes - num_read, offset + num_read))
                num_read += len(parts[-1])
            now = os.stat(path)
        except OSError as error:
            raise Damaged(
                f"{path} cannot be read at byte {offset}: {error.strerror or error}", path=path
            ) from None
        is_same = now.st_ino == handle.inode
        if (now.st_size, now.st_mtime_ns) != self.stamps[file] or not is_same:
            raise changed_error(path)
        if num_read < num_bytes:
            raise Damaged(f"{path} ends before byte {offset + num_bytes}", path=path)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _handle(self, file: int) -> _Handle:
        if self._process != os.getpid():  # a forked process opens its own
            self._process, self._handles = os.getpid(), OrderedDict()
        handles = self._handles
        handle = handles.get(file)
        if handle is not None:
            return handle
        path = self.paths[file]
        try:
            handle = _Handle(path)
        except OSError as error:
            raise Damaged(
                f"{path} cannot be opened: {error.strerror or error}",
                likely="it was moved or deleted after the dataset was opened.",
                path=path,
            ) from None
        if handle.stamp != self.stamps[file]:
            raise changed_error(path)
        handles[file] = handle
        while len(handles) > MAX_OPEN:
            try:
                handles.popitem(last=False)
            except KeyError:  # another thread has removed it
                break
        return handle


def changed_error(path: str) -> Damaged:
    """Return the error for a file that is not the one that was opened."""
    return Damaged(
        f"{path} has changed since the dataset was opened",
        likely="another program has replaced or rewritten it.",
        remedy="open the dataset again when the file is complete",
        path=path,
    )
