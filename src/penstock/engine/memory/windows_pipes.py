"""Windows only: pipe handles that a child process inherits.

Only code that needs Windows is here. Most other differences follow from missing features
(``fork``, ``poll``, ``memfd_create``, signal masks). They are tested on Linux with those features
removed: ``tests/integration/engine/test_without_posix.py``. This module runs only on Windows, and
in the windows leg: ``tests/integration/test_windows.py``.

- A child inherits only the listed handles, and does not receive Ctrl-C from the console.
- The end of a pipe is a handle, which multiprocessing wraps in its own class.

On Windows, multiprocessing locks and queues are not sent to workers, because each handle would have
to be duplicated into each process. A dataset that holds one is rejected with an error that names
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

assert sys.platform == "win32"


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
