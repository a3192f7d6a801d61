"""File locks between processes. The system releases them when the holder exits.

Tested by ``tests/faults/sources/test_cache_killed.py``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from penstock.errors import AlreadyThere

PACKING_LOCK = ".packing.lock"
_RETRY_S = 0.05


def lock_file(descriptor: int, *, waits: bool) -> bool:
    """Lock an open file until it is closed. Returns False if another process holds the lock."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            return False
        return True
    while not (is_mine := _lock_byte_on_windows(descriptor, 0)) and waits:
        time.sleep(_RETRY_S)
    return is_mine


def unlock_file(descriptor: int) -> None:
    """Release the lock of a file that another process has locked and handed down. POSIX only."""
    if os.name == "posix":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def packing_lock(folder: str) -> Iterator[None]:
    """Hold the folder's lock. Raises AlreadyThere if another process holds it."""
    path = os.path.join(folder, PACKING_LOCK)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    is_mine = False
    try:
        # If the last holder has removed the file since we opened it, our lock has no effect.
        is_mine = lock_file(descriptor, waits=False) and os.fstat(descriptor).st_nlink > 0
        if not is_mine:
            raise AlreadyThere(
                f"{folder} is being packed by another process",
                remedy="wait for it, or stop it and call again (finished shards are kept)",
                path=folder,
            )
        yield
    finally:
        if is_mine:
            close_and_remove(descriptor, path)
        else:
            os.close(descriptor)


def close_and_remove(descriptor: int, path: str) -> None:
    """Remove a file whose lock this process holds, and release the lock.

    POSIX removes the file before another process can lock it. Windows removes only closed files,
    and refuses if another process has opened the file since.
    """
    if os.name == "posix":
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)
    if os.name != "posix":
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def byte_lock(descriptor: int, place: int, *, waits: bool = False) -> Iterator[bool]:
    """Lock one byte of a file, which need not exist. Yields False if another process has it."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, place)
            is_mine = True
        except (BlockingIOError, PermissionError):
            is_mine = False
    else:
        while not (is_mine := _lock_byte_on_windows(descriptor, place)) and waits:
            time.sleep(_RETRY_S)
    try:
        yield is_mine
    finally:
        if is_mine and os.name == "posix":
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)
        elif is_mine:
            _lock_byte_on_windows(descriptor, place, unlock=True)


def _lock_byte_on_windows(descriptor: int, place: int, *, unlock: bool = False) -> bool:
    import msvcrt

    os.lseek(descriptor, place, os.SEEK_SET)
    mode = msvcrt.LK_UNLCK if unlock else msvcrt.LK_NBLCK  # type: ignore[attr-defined,unused-ignore]
    try:
        msvcrt.locking(descriptor, mode, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True
