"""Starts the downloader of a set, in a process of its own.

The downloader is a child of the program whose reader missed it first, and ends with that program.
Several programs can start one at the same time: a file lock lets one of them work, and the others
end at once. The program holds no open pipe or file of it, so the fork server can still be a fork.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

from penstock.errors import StorageFailed
from penstock.machine.child_process import ChildProcess, python_command

_ENTRY = "penstock.sources.remote.downloader:main"
_PAUSE_S = 2.0
"""Time between two starts. A downloader takes the lock within this time on an idle machine."""
_children: list[tuple[int, subprocess.Popen[bytes]]] = []
"""Downloaders and the processes that started them. A forked process has those of its parent too."""
_mutex = threading.Lock()


class CacheOptions(NamedTuple):
    """Options of a cache, as a program gave them."""

    root: str
    max_bytes: int
    ahead_bytes: int
    timeout_s: float
    limit_reason: str = ""


class DownloaderStarter:
    """Starts downloaders for one set.

    Args:
        folder: The folder of this set in the cache.
    """

    def __init__(self, url: str, folder: str, options: CacheOptions) -> None:
        self.url = url
        self.folder = folder
        self.options = options
        self._last_s = 0.0

    def start(self) -> None:
        """Start a downloader, unless this process has just done so. Does not wait for it."""
        with _mutex:
            now_s = time.monotonic()
            if self._last_s and now_s - self._last_s < _PAUSE_S:
                return
            self._last_s = now_s
            command = python_command(_ENTRY, _arguments(self.url, self.options), self.folder)
            nothing = subprocess.DEVNULL
            options: dict[str, Any] = {"start_new_session": True}
            if sys.platform == "win32":
                flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
                options = {"creationflags": flags}
            _forget_ended()
            child = subprocess.Popen(
                command, stdin=nothing, stdout=nothing, stderr=nothing, **options
            )
            _children.append((os.getpid(), child))


def fetch_manifest(url: str, options: CacheOptions) -> str:
    """Fetch the manifest of a set in a short-lived process. Returns the set's cache folder.

    Raises:
        StorageFailed: It could not be fetched.
    """
    command = python_command(_ENTRY.replace(":main", ":fetch"), _arguments(url, options))
    with ChildProcess(command) as child:
        try:
            line = child.read_line(options.timeout_s + 30.0)
            answer = json.loads(line or "")
        except (TimeoutError, ValueError):
            answer = {"kind": "network", "what": f"{url}/manifest.json could not be fetched"}
    if "folder" in answer:
        return str(answer["folder"])
    raise StorageFailed(
        answer["what"],
        likely=answer.get("likely") or None,
        remedy=answer.get("remedy") or None,
        path=url,
    )


def _arguments(url: str, options: CacheOptions) -> str:
    return json.dumps({"url": url, "parent": os.getpid(), **options._asdict()})


def _own_children() -> list[subprocess.Popen[bytes]]:
    return [child for parent, child in _children if parent == os.getpid()]


def _forget_ended() -> None:
    ended = [child for child in _own_children() if child.poll() is not None]
    _children[:] = [one for one in _children if one[1] not in ended]


@atexit.register
def _stop_children() -> None:
    for child in _own_children():
        child.kill()
    for child in _own_children():
        child.wait(5.0)
    _forget_ended()
