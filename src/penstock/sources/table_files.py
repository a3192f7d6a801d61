"""Files that a library opens: kept open in each process, and checked for changes at every read.

:class:`~penstock.sources.source_files.SourceFiles` reads bytes itself. Here another library
(pyarrow, Lance) or a memory map has the file open, so the file behind the path is compared after
every read from it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import BadStore, Damaged
from penstock.sources.source_files import MAX_OPEN, FileStamp, changed_error, read_stamp

CHECK_EVERY_S = 0.05
"""How often a file is compared while decoded copies of its content are used."""


class TableFiles:
    """Files opened by a library. Pickled as their paths and stamps, without handles.

    Args:
        paths: The files.
        open_file: Opens a file by its path. A function of a module, because it is pickled.
        stamps: The stamps of the files when the dataset was opened. None: as they are now.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/x.txt"
        >>> with open(path, "w") as file:
        ...     _ = file.write("abc")
        >>> files = TableFiles([path], os.path.getsize)
        >>> files.handle(0)
        3
    """

    def __init__(
        self,
        paths: Sequence[str],
        open_file: Callable[[str], Any],
        stamps: Sequence[FileStamp] | None = None,
    ) -> None:
        self.paths = list(paths)
        self.stamps = [read_stamp(path) for path in self.paths] if stamps is None else list(stamps)
        self._open_file = open_file
        self._process = os.getpid()
        self._mutex = threading.Lock()
        self._handles: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._checked_s: dict[int, float] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return TableFiles, (self.paths, self._open_file, self.stamps)

    def handle(self, file: int) -> Any:
        """Return the opened file with this number. A forked process opens its own.

        Raises:
            Damaged: The file is gone, or another than when the dataset was opened.
        """
        if self._process != os.getpid():
            self._mutex, self._handles = threading.Lock(), OrderedDict()
            self._process = os.getpid()
        with self._mutex:
            found = self._handles.get(file)
            if found is None:
                inode = self._inode(file)
                opened = self._open_file(self.paths[file])
                if self._inode(file) != inode:
                    raise changed_error(self.paths[file])
                found = self._handles[file] = opened, inode
                while len(self._handles) > MAX_OPEN:
                    self._handles.popitem(last=False)
        return found[0]

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

    def _inode(self, file: int) -> int:
        path = self.paths[file]
        try:
            now = os.stat(path)
        except OSError as error:
            raise Damaged(
                f"{path} cannot be opened: {error.strerror or error}",
                likely="it was moved or deleted after the dataset was opened.",
                path=path,
            ) from None
        if (now.st_size, now.st_mtime_ns) != self.stamps[file]:
            raise changed_error(path)
        return now.st_ino


def open_error(path: str, error: BaseException) -> BadStore:
    """Return the error for a file that a library cannot open."""
    return BadStore(
        f"{path} cannot be opened: {describe(error)}",
        likely="the file is truncated, because of an interrupted copy, or has another format.",
        remedy="copy the file again from its source",
        path=path,
    )


def describe(error: BaseException) -> str:
    """Return the first line of a library's error, shortened.

    Example:
        >>> describe(ValueError("not a table"))
        'ValueError: not a table'
    """
    text = " ".join(str(error).split("\n")[0].split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
