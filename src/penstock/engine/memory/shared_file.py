"""Memory that several processes share: one file, mapped piece by piece, gone with its holders.

Linux uses a memfd, which no ``/dev/shm`` limit touches and which is sparse: an untouched page costs
nothing. Elsewhere it is one temporary file that disappears when the last holder closes it.

    parent: SharedFile.create() -- fd (POSIX) or path (Windows) --> worker: SharedFile.attach()
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

GRAIN = max(mmap.ALLOCATIONGRANULARITY, 65536)
"""Offsets of mappings are multiples of this (Windows: 64 KiB; some arm64 kernels: 64 KiB pages)."""
_ZEROS = bytes(1 << 20)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""What some file systems answer to ``posix_fallocate``."""
_REMEDIES = {
    errno.EMFILE: "ulimit -n 4096",
    errno.ENFILE: "ulimit -n 4096",
    errno.EFBIG: "ulimit -f unlimited",
    errno.ENOMEM: "ulimit -v unlimited",
}


def round_up(num_bytes: int, grain: int = GRAIN) -> int:
    """The next multiple of ``grain``.

    Example:
        >>> round_up(1, 64), round_up(64, 64)
        (64, 64)
    """
    return -(-num_bytes // grain) * grain


@dataclass(frozen=True, kw_only=True)
class FileHandle:
    """How another process opens a :class:`SharedFile`: an inherited descriptor, or a path."""

    fd: int = -1
    path: str = ""


class SharedFile:
    """A growing file in memory. One process owns its size; any number map pieces of it.

    Pairs with: :meth:`close`. Mappings stay valid after it, until their last view is gone.
    """

    is_private = False
    """Does a fork copy the memory, so that the child never sees what is written later?"""

    def __init__(self, fd: int, *, path: str = "", is_sparse: bool) -> None:
        self.fd = fd
        self.path = path
        self.is_sparse = is_sparse
        self.num_bytes = 0
        self.note = ""
        self._mappings: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = (
            weakref.WeakValueDictionary()
        )

    @classmethod
    def create(cls, *, allow_memfd: bool = True) -> SharedFile:
        """Make an empty one: a memfd where the system has it, else a temporary file.

        Example:
            >>> file = SharedFile.create()
            >>> offset = file.grow(10)
            >>> file.map(offset, 10)[:3]
            b'\\x00\\x00\\x00'
            >>> file.close()
        """
        note = ""
        if allow_memfd and hasattr(os, "memfd_create"):
            try:
                return cls(os.memfd_create("penstock", os.MFD_CLOEXEC), is_sparse=True)
            except OSError as error:  # an old kernel or a seccomp filter
                if error.errno in _REMEDIES:  # a file would not do better
                    raise explained(error) from None
                note = f"batches lie in a file in {_temporary_folder()}: no memfd here ({error})"
        fd, path = tempfile.mkstemp(prefix="penstock-", dir=_temporary_folder())
        if hasattr(os, "O_TEMPORARY"):  # Windows: workers open it by name, see FileHandle
            os.close(fd)
            return cls(_open_by_name(path), path=path, is_sparse=False)
        os.unlink(path)
        file = cls(fd, is_sparse=False)
        file.note = note
        return file

    @classmethod
    def attach(cls, handle: FileHandle) -> SharedFile:
        """Open in a worker what the parent created. Pairs with :meth:`handle`."""
        fd = _open_by_name(handle.path) if handle.path else handle.fd
        return cls(fd, is_sparse=False)

    def handle(self) -> FileHandle:
        """What :meth:`attach` needs in the other process."""
        return FileHandle(path=self.path) if self.path else FileHandle(fd=self.fd)

    def grow(self, num_bytes: int) -> int:
        """Add room at the end and return its offset. Only the owner calls this.

        A file on disk is really allocated, so that a full disk is an ``OSError`` here and not a
        SIGBUS in a worker.
        """
        offset, room = self.num_bytes, round_up(max(num_bytes, 1))
        try:
            if self.is_sparse or not hasattr(os, "pwrite"):  # Windows allocates what it is told
                os.ftruncate(self.fd, offset + room)
            else:
                self._allocate(offset, room)
        except OSError as error:
            raise explained(error) from None
        self.num_bytes = offset + room
        return offset

    def _allocate(self, offset: int, room: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, offset, room)
                return
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
        try:
            for first in range(offset, offset + room, len(_ZEROS)):
                written = os.pwrite(self.fd, _ZEROS[: offset + room - first], first)
                if written < min(len(_ZEROS), offset + room - first):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self.fd, offset)  # what it did get is of no use
            raise

    def append(self, content: Any, grain: int = 1) -> int:
        """Write at the end, through the descriptor; returns where. Pairs with :meth:`settle`.

        Args:
            content: Anything with a contiguous buffer.
            grain: It begins at a multiple of this.
        """
        start = round_up(self.num_bytes, grain)
        for piece in (bytes(start - self.num_bytes), content):
            view = memoryview(piece).cast("B")
            os.lseek(self.fd, self.num_bytes, os.SEEK_SET)
            while view.nbytes:
                try:
                    written = os.write(self.fd, view[: 1 << 30])  # Windows and macOS stop at 2 GiB
                except OSError as error:
                    raise explained(error) from None
                self.num_bytes += written
                view = view[written:]
        return start

    def settle(self) -> None:
        """Round the size up after the last :meth:`append`, so that all of it can be mapped."""
        self.num_bytes = round_up(max(self.num_bytes, 1))
        os.ftruncate(self.fd, self.num_bytes)

    def map(self, offset: int, num_bytes: int, *, private: bool = False) -> mmap.mmap:
        """Map a piece; ``private`` gives copy-on-write pages of this process."""
        if private:
            return self._map(offset, num_bytes, mmap.ACCESS_COPY)
        # Every mapping costs a descriptor (mmap keeps its own), so threads share theirs.
        mapping = self._mappings.get((offset, num_bytes))
        if mapping is None:
            mapping = self._map(offset, num_bytes, mmap.ACCESS_WRITE)
            self._mappings[offset, num_bytes] = mapping
        return mapping

    def map_readonly(self, num_bytes: int) -> mmap.mmap:
        """Map the beginning read-only."""
        return self._map(0, num_bytes, mmap.ACCESS_READ)

    def _map(self, offset: int, num_bytes: int, access: int) -> mmap.mmap:
        length = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        try:
            return mmap.mmap(self.fd, length, offset=offset, access=access)
        except OSError as error:
            raise explained(error) from None

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last mapping."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():
            self.close()


def explained(error: OSError) -> OSError:
    """The same error, with what to do about it.

    Example:
        >>> print(explained(OSError(errno.EMFILE, "Too many open files")))
        [Errno 24] Too many open files. Try: ulimit -n 4096
    """
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why += f" in {_temporary_folder()}, where shared memory lies as there is no memfd here"
    remedy = _REMEDIES.get(error.errno or 0, "TMPDIR=/a/folder/with/room")
    return OSError(error.errno, f"{why}. Try: {remedy}")


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise OSError(
            error.errno,
            f"memory for batches needs memfd_create or a folder to write to, and there is neither: "
            f"{error.strerror}. Try: TMPDIR=/a/folder/with/room",
        ) from None


def _open_by_name(path: str) -> int:
    """A descriptor with which the file disappears once all others of it are closed, too."""
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
    return os.open(path, flags)


class PrivateFile(SharedFile):
    """The same interface over memory of this process alone: no descriptor, no file."""

    is_private = True

    def __init__(self) -> None:
        super().__init__(-1, is_sparse=True)

    def grow(self, num_bytes: int) -> int:
        offset = self.num_bytes
        self.num_bytes += round_up(max(num_bytes, 1))
        return offset

    def map(self, offset: int, num_bytes: int, *, private: bool = False) -> mmap.mmap:
        size = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where nothing forks
            return mmap.mmap(-1, size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Pages of 2 MiB, which memory that processes share gets nowhere by default.
            with suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping
