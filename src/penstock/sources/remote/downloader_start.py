"""Starts the downloader of a set, in a process of its own.

The downloader is a child of the program that opened the set first, or whose reader missed it first,
and ends with that program. Many processes can miss it at the same time. One of them starts it: the
lock of ``start.lock`` passes to the new process, which releases it after its first heartbeat. The
program holds no open pipe or file of it, so the fork server can still be a fork.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.errors import StorageFailed
from penstock.machine.child_process import ChildProcess, python_command
from penstock.sources.remote.object_list import ObjectEntry, ObjectList
from penstock.sources.remote.set_locks import PAUSE_S, turn_to_start

_log = logging.getLogger("penstock")
_PACKAGE = "penstock.sources.remote"
_QUIET_S = 2.0
"""How long a set can take to open before the reason is logged."""
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
        objects: The list of files, written again if the folder was removed. None: the downloader
            fetches the manifest.
    """

    def __init__(
        self, url: str, folder: str, options: CacheOptions, objects: ObjectList | None = None
    ) -> None:
        self.url = url
        self.folder = folder
        self.options = options
        self._objects = objects
        self._last_s = 0.0

    def start(self) -> None:
        """Start a downloader, unless one is being started. Does not wait for it."""
        with _mutex:
            now_s = time.monotonic()
            if self._last_s and now_s - self._last_s < PAUSE_S:
                return
            self._last_s = now_s
            with turn_to_start(self.folder) as turn:
                if turn is None:
                    return
                if self._objects is not None:
                    self._objects.store(self.options.root, self.url)
                arguments = _arguments(self.url, self.options)
                command = python_command(
                    f"{_PACKAGE}.downloader:main", arguments, self.folder, str(turn)
                )
                options: dict[str, Any] = {"start_new_session": True, "pass_fds": (turn,)}
                if sys.platform == "win32":
                    flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
                    options = {"creationflags": flags}
                _forget_ended()
                nothing = subprocess.DEVNULL
                child = subprocess.Popen(
                    command, stdin=nothing, stdout=nothing, stderr=nothing, **options
                )
                _children.append((os.getpid(), child))


def open_set(url: str, options: CacheOptions) -> str:
    """Fetch the manifest of a set, and start its downloader. Returns the set's cache folder.

    Raises:
        StorageFailed: It could not be fetched.
    """
    return str(_ask("open_set", url, options)["folder"])


def look_up_objects(
    url: str, names: Sequence[str], options: CacheOptions
) -> list[list[ObjectEntry] | None]:
    """Return the objects that names, patterns and folders stand for. See ``find_objects``.

    Raises:
        StorageFailed: They could not be looked up.
    """
    found = _ask("look_up", url, options, json.dumps(list(names)).encode())["objects"]
    return [None if some is None else [ObjectEntry(*one) for one in some] for some in found]


def _ask(function: str, url: str, options: CacheOptions, send: bytes = b"") -> dict[str, Any]:
    """Return the answer of a process that talks to the network, which may become a downloader."""
    command = python_command(f"{_PACKAGE}.set_lookup:{function}", _arguments(url, options))
    with ChildProcess(command, send=send) as child:
        try:
            answer = _read_answer(child, options.timeout_s)
        except (TimeoutError, ValueError):
            answer = {"kind": "network", "what": f"{url} could not be read"}
        if answer.get("stays"):
            with _mutex:
                _forget_ended()
                _children.append((os.getpid(), child.release()))
    if "what" not in answer:
        return dict(answer)
    raise StorageFailed(
        answer["what"],
        likely=answer.get("likely") or None,
        remedy=answer.get("remedy") or None,
        path=url,
    )


def _read_answer(child: ChildProcess, timeout_s: float) -> dict[str, Any]:
    """Return the answer. Long waits are logged, once, with their cause."""
    start_s, is_told = time.monotonic(), False
    while True:
        left_s = start_s + timeout_s + 30.0 - time.monotonic()
        answer: dict[str, Any] = json.loads(child.read_line(left_s) or "")
        if "trying" not in answer:
            return answer
        if not is_told and time.monotonic() - start_s > _QUIET_S:
            is_told = True
            _log.warning(
                "%s; trying again for up to %g s (network_timeout_s=%g)",
                answer["trying"],
                timeout_s / 2,
                timeout_s,
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
