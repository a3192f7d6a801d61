"""One writer at a time: a lock that ends with its holder, however that one ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from penstock.errors import AlreadyThere

LOCK = ".packing.lock"


def try_lock(descriptor: int) -> bool:
    """Lock an open file, without waiting; False: another process has it."""
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the folder's lock. Raises: AlreadyThere: somebody else holds it."""
    path = os.path.join(folder, LOCK)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # A file that its last holder has removed since we opened it locks nobody out.
        if not try_lock(descriptor) or not os.fstat(descriptor).st_nlink:
            raise AlreadyThere(
                f"{folder} is being packed by another process",
                remedy="wait for it, or stop it and call again: finished shards are kept",
                path=folder,
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> None:
    """Lock an open file; waits."""
    if os.name == "posix":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
    else:
        while not try_lock(descriptor):
            time.sleep(0.05)


def lock_byte(descriptor: int, place: int, *, waits: bool) -> bool:
    """Lock one byte of a file (it need not be there) among processes; False: another has it."""
    if os.name != "posix":
        import msvcrt

        os.lseek(descriptor, place, os.SEEK_SET)
        mode = msvcrt.LK_LOCK if waits else msvcrt.LK_NBLCK  # type: ignore[attr-defined,unused-ignore]
        try:
            msvcrt.locking(descriptor, mode, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, place)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock_byte(descriptor: int, place: int) -> None:
    """Pairs with :func:`lock_byte`."""
    if os.name != "posix":
        import msvcrt

        os.lseek(descriptor, place, os.SEEK_SET)
        with contextlib.suppress(OSError):
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        return
    import fcntl

    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, place)
