"""Locks of a set's folder in the cache: which process is its downloader, and which may start one.

Without NumPy, because the process that fetches the manifest takes them first.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from penstock.sources.file_locks import lock_file

LOCK = "downloader.lock"
START_LOCK = "start.lock"
"""Has the number of starts so far. Its time of change is that of the last one."""
PAUSE_S = 2.0
"""Time between two starts for one set."""
_STARTING_S = 60.0
"""How long a downloader can take to start before another one is tried."""


def lock_set(options: dict[str, Any], folder: str) -> bool:
    """Become the downloader of a set. Returns False if another process is."""
    for path in (options["root"], folder):  # again, if the user has removed them
        os.makedirs(path, mode=0o700, exist_ok=True)
    return lock_file(
        os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o600), waits=False
    )


@contextlib.contextmanager
def turn_to_start(folder: str) -> Iterator[int | None]:
    """Yield the locked file of the process that may start a downloader now, None in others."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    turn = os.open(os.path.join(folder, START_LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        has_lock, found = lock_file(turn, waits=False), os.fstat(turn)
        limit_s = PAUSE_S if has_lock else _STARTING_S
        if found.st_size and 0 <= time.time() - found.st_mtime < limit_s:
            yield None
            return
        os.lseek(turn, 1, os.SEEK_SET)  # Windows has locked the first byte
        number = int(os.read(turn, 20) or 0) + 1
        os.lseek(turn, 1, os.SEEK_SET)
        os.write(turn, str(number).encode())
        yield turn
    finally:
        os.close(turn)
