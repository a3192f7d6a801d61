"""Windows only: handles for child processes. No other module of the engine asks for the system.

Everything else follows from what is missing there (``fork``, ``poll``, ``memfd_create``, signal
masks) and is tested on Linux with those taken away:
``tests/integration/engine/test_without_posix.py``. These lines run on Windows alone, in the hosted
CI's Windows leg:

- a child inherits the handles that are named, and no Ctrl-C of the console;
- the end of a pipe is a handle, which multiprocessing wraps in a class of its own.

Descriptors of multiprocessing's locks and queues are not sent to workers there (a handle would
have to be duplicated into each process); the dataset that holds one is refused by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

assert sys.platform == "win32"


def inheriting(handles: tuple[int, ...]) -> dict[str, Any]:
    """How subprocess.Popen starts a child that has ``handles``."""
    for handle in handles:
        os.set_handle_inheritable(handle, True)
    return {
        "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP,
        "startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": list(handles)}),
    }


def connect(handle: int) -> Any:
    """The worker's end of the pipe."""
    from multiprocessing import connection

    return connection.PipeConnection(handle)
