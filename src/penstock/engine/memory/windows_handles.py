"""Windows only: handles of pipes and of temporary files.

Only code that needs Windows is here. Most other differences follow from missing features
(``fork``, ``poll``, ``memfd_create``, signal masks). They are tested on Linux with those features
removed: ``tests/integration/engine/test_without_posix.py``. This module runs only on Windows, and
in the windows leg: ``tests/integration/test_windows.py``.

- A child inherits only the listed handles, and does not receive Ctrl-C from the console.
- The end of a pipe is a handle, which multiprocessing wraps in its own class. A write of that class
  waits until the other side has read all but 8 KiB.
- Other processes can open a file that its creator deletes on closing. They must not open it in the
  same way: as soon as one of them closed it, no process could open it any more.

On Windows, multiprocessing locks and queues are not sent to workers, because each handle would have
to be duplicated into each process. A dataset that holds one is rejected with an error that names
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from contextlib import suppress
from typing import Any

assert sys.platform == "win32"

import _winapi  # noqa: E402
import msvcrt  # noqa: E402

_SHARE_ALL = 7
_IO_INCOMPLETE = 996


def inheriting(handles: tuple[int, ...]) -> dict[str, Any]:
    """Return the subprocess.Popen arguments for a child that inherits ``handles``."""
    for handle in handles:
        os.set_handle_inheritable(handle, True)
    return {
        "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP,
        "startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": list(handles)}),
    }


def connect(handle: int) -> Any:
    """Return the worker's end of the pipe."""
    from multiprocessing import connection

    return connection.PipeConnection(handle)


class Writer:
    """Writes to a pipe without waiting for its reader. The system keeps the order."""

    def __init__(self, pipe: Any) -> None:
        self._handle = pipe.fileno()
        self._pending: deque[Any] = deque()

    def send_bytes(self, body: bytes) -> None:
        """Begin to write one message. Raises OSError if this or an earlier write has failed."""
        while self._pending:
            _, error = self._pending[0].GetOverlappedResult(False)
            if error == _IO_INCOMPLETE:
                break
            self._pending.popleft()
        self._pending.append(_winapi.WriteFile(self._handle, body, overlapped=True)[0])

    def close(self) -> None:
        """Cancel what the reader has not read. Called before the pipe is closed."""
        while self._pending:
            write = self._pending.popleft()
            with suppress(OSError):  # the reader is gone
                write.cancel()
                write.GetOverlappedResult(True)


def open_shared(path: str) -> int:
    """Open a file that its creator deletes on closing. Returns a descriptor."""
    access = _winapi.GENERIC_READ | _winapi.GENERIC_WRITE
    handle = _winapi.CreateFile(path, access, _SHARE_ALL, 0, _winapi.OPEN_EXISTING, 0, 0)
    return msvcrt.open_osfhandle(handle, os.O_RDWR | os.O_BINARY)
