"""Files of a dataset that each process opens for itself, and that must not change meanwhile.

A dataset remembers the size and modification time of its files. After every read they are compared
with the file that the path names now, so a file that was replaced or rewritten raises an error and
never gives a wrong sample. Files are read at offsets here, or opened by another library (pyarrow).
"""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from penstock.errors import BadStore, Damaged

MAX_OPEN = 64
"""Number of files that a process keeps open for one dataset."""
CHECK_EVERY_S = 0.05
"""How often a file is compared while decoded copies of its content are used."""
CHECK_PAUSE = 100
"""Pause after a check, as a multiple of its duration."""
MOVED = "it was moved or deleted after the dataset was opened."
_TRUNCATED = "the file is truncated, because of an interrupted copy, or has another format."
_Error = TypeVar("_Error", BadStore, Damaged)


class FileStamp(NamedTuple):
    """By which a changed file is recognised. ``version``: modification time in ns, or an ETag."""

    size: int
    version: int | str


def read_stamp(path: str) -> FileStamp:
    """Return the stamp of a file.

    Raises:
        BadStore: The file does not exist, cannot be read, or is not a regular file.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(path, found.st_mode)
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise open_error(path, error) from None
    return FileStamp(found.st_size, found.st_mtime_ns)


def open_regular(path: str, flags: int = 0) -> int:
    """Return a descriptor for reading. Opening a named pipe would wait for a writer.

    Args:
        flags: Not used. An ``opener`` of the built-in ``open`` has it.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    extra = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, os.O_RDONLY | extra)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise _irregular(path, mode)


def _irregular(path: str, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or socket"
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", path)


def read_json(path: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is not JSON.
    """
    with open(path, encoding="utf-8", opener=open_regular) as file:
        return json.load(file)


class OpenFile:
    """An open file. Closed when the last thread that reads it lets go of it."""

    def __init__(self, path: str) -> None:
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._mutex = threading.Lock()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes at an offset, fewer at the end of the file."""
        data = self._pread(num_bytes, offset)
        while len(data) < num_bytes:  # one call gives at most 2 GiB
            more = self._pread(num_bytes - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, num_bytes, offset)
        with self._mutex:
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.read(self._descriptor, num_bytes)


class SourceFiles:
    """The files of a dataset. Pickled as their paths and stamps, without handles.

    Args:
        paths: The files.
        open_file: Opens a file by its path. A function of a module, because it is pickled.
            :meth:`read` needs the default.
        stamps: The stamps of the files when the dataset was opened. None: as they are now.

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

    def __init__(
        self,
        paths: Sequence[str],
        open_file: Callable[[str], Any] = OpenFile,
        stamps: Sequence[FileStamp] | None = None,
    ) -> None:
        self.paths = list(paths)
        self.stamps = [read_stamp(path) for path in self.paths] if stamps is None else list(stamps)
        self._open_file = open_file
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._handles: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._checked_s: dict[int, float] = {}
        self._next_check_s, self._next_file = 0.0, -1

    def __len__(self) -> int:
        return len(self.paths)

    def __reduce__(self) -> tuple[object, ...]:
        return SourceFiles, (self.paths, self._open_file, self.stamps)

    def handle(self, file: int) -> Any:
        """Return the opened file with this number. A forked process opens its own.

        Raises:
            Damaged: The file is gone, or another than when the dataset was opened.
        """
        if self._process != os.getpid():
            self._mutex, self._handles = threading.Lock(), OrderedDict()
            self._process = os.getpid()
        found = self._handles.get(file)
        if found is not None:
            return found[0]
        with self._mutex:
            if file in self._handles:  # another thread has opened it
                return self._handles[file][0]
            inode = self._inode(file)
            try:
                opened = self._open_file(self.paths[file])
            except OSError as error:
                raise open_error(self.paths[file], error, Damaged, MOVED) from None
            if self._inode(file) != inode:
                raise changed_error(self.paths[file])
            self._handles[file] = opened, inode
            while len(self._handles) > MAX_OPEN:
                self._handles.popitem(last=False)
        return opened

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        """Return bytes of a file. See :meth:`read_parts`."""
        return self.read_parts(file, [(offset, num_bytes)])[0]

    def read_parts(self, file: int, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return several parts of a file, given as offsets and numbers of bytes.

        Raises:
            Damaged: The file has changed since the dataset was opened, or cannot be read.
        """
        handle: OpenFile = self.handle(file)
        path, offset, found = self.paths[file], 0, []
        try:
            for offset, num_bytes in parts:
                found.append(handle.read(offset, num_bytes))
                if len(found[-1]) < num_bytes:
                    self.check(file)
                    raise Damaged(f"{path} ends before byte {offset + num_bytes}", path=path)
        except OSError as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(
                f"{path} cannot be read at byte {offset}: {error.strerror or error}", path=path
            ) from None
        self.check(file)
        return found

    def check_all(self) -> None:
        for file in range(len(self.paths)):
            self.check(file)

    def check(self, file: int) -> None:
        """Raise Damaged unless the path still names the file that was opened."""
        inode = self._inode(file)
        found = self._handles.get(file)
        if found is not None and found[1] != inode:
            raise changed_error(self.paths[file])

    def check_soon(self, file: int) -> None:
        """Like :meth:`check`, at most every ``CHECK_EVERY_S`` for each file."""
        now_s = time.monotonic()
        if now_s - self._checked_s.get(file, -math.inf) >= CHECK_EVERY_S:
            self.check(file)
            self._checked_s[file] = now_s

    def check_next_soon(self) -> None:
        """Check one file after the other, in about a hundredth of the time.

        Called before maps of the files are read, because reading beyond the end of a file that has
        become shorter ends the process. A single file is checked before nearly every batch.
        """
        start_s = time.monotonic()
        if start_s >= self._next_check_s and self.paths:
            self._next_file = (self._next_file + 1) % len(self.paths)
            self.check(self._next_file)
            end_s = time.monotonic()
            self._next_check_s = end_s + CHECK_PAUSE * (end_s - start_s)

    def _inode(self, file: int) -> int:
        path = self.paths[file]
        try:
            now = os.stat(path)
        except OSError as error:
            raise open_error(path, error, Damaged, MOVED) from None
        if (now.st_size, now.st_mtime_ns) != self.stamps[file]:
            raise changed_error(path)
        return now.st_ino


def open_error(
    path: str,
    error: BaseException,
    kind: type[_Error] = BadStore,  # type: ignore[assignment]
    likely: str | None = None,
) -> _Error:
    """Return the error for a file or folder that the system or a library cannot open."""
    if isinstance(error, PermissionError) or "permission denied" in str(error).lower():
        place, rights = _find_denied(path)
        return kind(
            f"{path} cannot be opened: permission denied",
            where=None if place == path else place,
            likely=f"the user of this process may not read {place}.",
            remedy=f"chmod {rights} {shlex.quote(place)}, as its owner",
            path=path,
        )
    if isinstance(error, OSError) and error.strerror:  # of the system, and not of a library
        return kind(f"{path} cannot be opened: {error.strerror}", likely=likely, path=path)
    return kind(
        f"{path} cannot be opened: {describe(error)}",
        likely=likely or _TRUNCATED,
        remedy="copy the file again from its source",
        path=path,
    )


def _find_denied(path: str) -> tuple[str, str]:
    """Return the folder on the way to a path, or the path, that may not be read, and its cure."""
    whole = os.path.abspath(path)
    folders = [whole] if os.path.isdir(whole) else []
    while whole != (whole := os.path.dirname(whole)):
        folders.append(whole)
    for folder in reversed(folders):
        if not os.access(folder, os.X_OK) or (folder == path and not os.access(folder, os.R_OK)):
            return folder, "a+rx"
    return path, "a+r"


def describe(error: BaseException) -> str:
    """Return the first line of a library's error, shortened.

    Example:
        >>> describe(ValueError("not a table"))
        'ValueError: not a table'
    """
    text = " ".join(str(error).split("\n")[0].split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def changed_error(path: str) -> Damaged:
    """Return the error for a file that is not the one that was opened."""
    return Damaged(
        f"{path} has changed since the dataset was opened",
        likely="another program has replaced or rewritten it.",
        remedy="open the dataset again when the file is complete",
        path=path,
    )
