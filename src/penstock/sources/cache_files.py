"""The files of a cache, in a folder or in memory that workers open by name.

All writes use ``pwrite``, so a full disk raises ``OSError``. A write through a memory map would
raise SIGBUS.

Tested by ``tests/unit/sources/test_cache.py``.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from penstock.engine.memory.shared_file import create_by_name, open_by_name
from penstock.sources.array_files import HEADER_BYTES, make_header, map_array
from penstock.sources.file_locks import byte_lock

_LOCKS = "locks"


class CacheFolder:
    """Named files in a folder, which many processes read and write at the same time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        self._mutex = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheFolder, (self.folder,)

    def __str__(self) -> str:
        return self.folder

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        return os.open(self.path(name), flags, 0o644)

    def _descriptor(self, name: str) -> int:
        with self._mutex:
            if name not in self._descriptors:
                self._descriptors[name] = self._open(name)
            return self._descriptors[name]

    def make_array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Create a ``.npy`` file of zeros, sparse until written."""
        self.make_heap(name)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        os.ftruncate(self._descriptor(name), HEADER_BYTES + num_bytes)
        self.write(name, 0, make_header(dtype, shape))

    def make_heap(self, name: str) -> None:
        """Create an empty file for :meth:`append`."""
        os.ftruncate(self._descriptor(name), 0)

    def map(self, name: str) -> np.ndarray:
        return map_array(self.path(name)).array

    def read(self, name: str, start: int, num_bytes: int) -> bytes:
        found = _pread(self._descriptor(name), num_bytes, start)
        if len(found) != num_bytes:
            raise OSError(f"{name} ends before byte {start + num_bytes}")
        return found

    def write(self, name: str, start: int, content: bytes) -> None:
        descriptor, view = self._descriptor(name), memoryview(content)
        while view:
            written = _pwrite(descriptor, view, start)
            view, start = view[written:], start + written

    def append(self, name: str, content: bytes) -> int:
        """Write at the end and return the offset. Only the reservation holds the lock."""
        descriptor, locks = self._descriptor(name), self._descriptor(_LOCKS)
        # File locks belong to the process. Without the mutex, threads would release each other's.
        with self._mutex, byte_lock(locks, 0, waits=True):
            start = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, start + len(content))
        self.write(name, start, content)
        return start

    def lock(self, row: int) -> AbstractContextManager[bool]:
        """Lock a sample for writing. Yields False if another process holds the lock."""
        return byte_lock(self._descriptor(_LOCKS), row + 1)


class CacheMemory(CacheFolder):
    """Files in memory, which vanish with the process that created them. Linux only.

    Args:
        paths: In another process, the paths of the creator's files under ``/proc``.
    """

    def __init__(self, paths: dict[str, str] | None = None) -> None:
        super().__init__("ram")
        self._paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        self._descriptor(_LOCKS)
        own = {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in self._descriptors.items()}
        return CacheMemory, ({**own, **(self._paths or {})},)

    def path(self, name: str) -> str:
        return f"/proc/self/fd/{self._descriptor(name)}"

    def _open(self, name: str) -> int:
        if self._paths is not None:
            return os.open(self._paths[name], os.O_RDWR)
        return os.memfd_create(f"penstock-{name}")


class TemporaryFiles(CacheFolder):
    """Files that the system deletes when their creator exits or is killed. Windows only.

    Args:
        prefix: Start of all paths.
        is_owner: True in the process that creates the files.
    """

    def __init__(self, prefix: str, *, is_owner: bool = False) -> None:
        super().__init__(prefix)
        self._is_owner = is_owner

    def __reduce__(self) -> tuple[Any, ...]:
        self._descriptor(_LOCKS)
        return TemporaryFiles, (self.folder,)

    def path(self, name: str) -> str:
        return f"{self.folder}-{name}"

    def _open(self, name: str) -> int:
        path = self.path(name)
        return create_by_name(path) if self._is_owner else open_by_name(path)

    def map(self, name: str) -> np.ndarray:
        return map_array(self.path(name), lambda path, _: open_by_name(path)).array


def _close_all(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


if hasattr(os, "pread"):
    _pread, _pwrite = os.pread, os.pwrite
else:
    _seeking = threading.Lock()

    def _pread(descriptor: int, num_bytes: int, start: int) -> bytes:
        with _seeking:
            os.lseek(descriptor, start, os.SEEK_SET)
            return os.read(descriptor, num_bytes)

    def _pwrite(descriptor: int, content: Any, start: int) -> int:
        with _seeking:
            os.lseek(descriptor, start, os.SEEK_SET)
            return os.write(descriptor, content)
