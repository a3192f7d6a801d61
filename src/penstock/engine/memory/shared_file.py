"""Shared memory: one file that processes map in parts, removed when its last user closes it.

Linux uses a memfd. It is not subject to ``/dev/shm`` limits, and it is sparse: a page that was
never written costs nothing. Other platforms use one temporary file, which disappears when the last
process closes it.

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
from typing import Any

from penstock.named_tuple import NamedTuple

GRAIN = max(mmap.ALLOCATIONGRANULARITY, 65536)
"""Alignment of mapping offsets. Windows needs 64 KiB. Some arm64 kernels have 64 KiB pages."""
_ZEROS = bytes(1 << 20)
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors from file systems that do not support ``posix_fallocate``."""
_REMEDIES = {
    errno.EMFILE: "ulimit -n 4096",
    errno.ENFILE: "ulimit -n 4096",
    errno.EFBIG: "ulimit -f unlimited",
    errno.ENOMEM: "ulimit -v unlimited",
}


def round_up(num_bytes: int, grain: int = GRAIN) -> int:
    """Round up to a multiple of ``grain``.

    Example:
        >>> round_up(1, 64), round_up(64, 64)
        (64, 64)
    """
    return -(-num_bytes // grain) * grain


class FileHandle(NamedTuple):
    """Tells another process how to open a :class:`SharedFile`: an inherited fd or a path."""

    fd: int = -1
    path: str = ""


class Segment(NamedTuple):
    """A part of the shared file that holds several slots, with one mapping and one descriptor."""

    offset: int
    num_bytes: int


class SharedFile:
    """A growing file in memory. Its owner grows it, and any number of processes can map it.

    Mappings stay valid after :meth:`close`, until their last view is gone.
    """

    fd = -1  # until there is one: Ctrl-C can interrupt __init__
    is_private = False
    """True if a fork copies the memory, so that the child does not see later writes."""

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
        """Create an empty file: a memfd if available, otherwise a temporary file.

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
                if error.errno in _REMEDIES:  # a temporary file would fail too
                    raise explained(error) from None
                note = f"batches are stored in {_temporary_folder()}: no memfd ({error})"
        fd, path = tempfile.mkstemp(prefix="penstock-", dir=_temporary_folder())
        if hasattr(os, "O_TEMPORARY"):  # Windows: workers open it by name, see FileHandle
            os.close(fd)
            return cls(create_by_name(path), path=path, is_sparse=False)
        os.unlink(path)
        file = cls(fd, is_sparse=False)
        file.note = note
        return file

    @classmethod
    def attach(cls, handle: FileHandle) -> SharedFile:
        """Open the parent's file in a worker, from the result of :meth:`handle`."""
        fd = open_by_name(handle.path) if handle.path else handle.fd
        return cls(fd, is_sparse=False)

    def handle(self) -> FileHandle:
        """Return the argument for :meth:`attach` in another process."""
        return FileHandle(path=self.path) if self.path else FileHandle(fd=self.fd)

    def grow(self, num_bytes: int) -> int:
        """Grow the file and return the offset of the new part. Only the owner calls this.

        Space on disk is allocated immediately, so that a full disk raises ``OSError`` here and does
        not cause a SIGBUS in a worker.
        """
        offset, size = self.num_bytes, round_up(max(num_bytes, 1))
        try:
            if self.is_sparse or not hasattr(os, "pwrite"):  # Windows always allocates
                os.ftruncate(self.fd, offset + size)
            else:
                self._allocate(offset, size)
        except OSError as error:
            raise explained(error) from None
        self.num_bytes = offset + size
        return offset

    def _allocate(self, offset: int, size: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, offset, size)
                return
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
        try:
            for first in range(offset, offset + size, len(_ZEROS)):
                written = os.pwrite(self.fd, _ZEROS[: offset + size - first], first)
                if written < min(len(_ZEROS), offset + size - first):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self.fd, offset)  # give back the partial allocation
            raise

    def append(self, content: Any, grain: int = 1) -> int:
        """Write at the end of the file and return the offset. Call :meth:`settle` when done.

        Args:
            content: Any object with a contiguous buffer.
            grain: Alignment of the offset.
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
        """Round the size up after the last :meth:`append`, so that the whole file can be mapped."""
        self.num_bytes = round_up(max(self.num_bytes, 1))
        os.ftruncate(self.fd, self.num_bytes)

    def map(self, offset: int, num_bytes: int, *, private: bool = False) -> mmap.mmap:
        """Map a part of the file. With ``private``, the pages are copy-on-write."""
        if private:
            return self._map(offset, num_bytes, mmap.ACCESS_COPY)
        # Each mmap object holds its own descriptor, so threads share mappings.
        mapping = self._mappings.get((offset, num_bytes))
        if mapping is None:
            mapping = self._map(offset, num_bytes, mmap.ACCESS_WRITE)
            self._mappings[offset, num_bytes] = mapping
        return mapping

    def map_readonly(self, num_bytes: int) -> mmap.mmap:
        """Map the first ``num_bytes`` read-only."""
        return self._map(0, num_bytes, mmap.ACCESS_READ)

    def _map(self, offset: int, num_bytes: int, access: int) -> mmap.mmap:
        length = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        try:
            return mmap.mmap(self.fd, length, offset=offset, access=access)
        except OSError as error:
            raise explained(error) from None

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last mapping."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():
            self.close()


def explained(error: OSError) -> OSError:
    """Return the same error with a remedy added to its message, if the system raised it.

    Example:
        >>> print(explained(OSError(errno.EMFILE, "Too many open files")))
        [Errno 24] Too many open files. Try: ulimit -n 4096
    """
    if error.errno is None:  # raised by a signal handler, such as a TimeoutError
        return error
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why += f" in {_temporary_folder()}, which holds shared memory because there is no memfd"
    remedy = _REMEDIES.get(error.errno, "TMPDIR=/path/with/free/space")
    return OSError(error.errno, f"{why}. Try: {remedy}")


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot allocate memory for batches: there is no memfd_create and no writable "
            f"temporary folder ({error.strerror}). Try: TMPDIR=/path/with/free/space",
        ) from None


def create_by_name(path: str) -> int:
    """Create or open ``path``. Windows deletes the file when the returned descriptor is closed.

    Duplicates count, such as those of mappings. Other processes call :func:`open_by_name`.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
    return os.open(path, flags, 0o600)


def open_by_name(path: str) -> int:
    """Open a file of :func:`create_by_name` in another process."""
    if sys.platform == "win32":  # pragma: no cover
        from penstock.engine.memory import windows_handles as windows

        return windows.open_shared(path)
    return os.open(path, os.O_RDWR)


class PrivateFile(SharedFile):
    """A SharedFile over private memory of this process, without a descriptor or file."""

    is_private = True

    def __init__(self) -> None:
        super().__init__(-1, is_sparse=True)

    def grow(self, num_bytes: int) -> int:
        offset = self.num_bytes
        self.num_bytes += round_up(max(num_bytes, 1))
        return offset

    def map(self, offset: int, num_bytes: int, *, private: bool = False) -> mmap.mmap:
        size = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no fork
            return mmap.mmap(-1, size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # 2 MiB pages. No system uses them by default for shared memory.
            with suppress(OSError):  # not supported by the kernel
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping
