"""Where the files of a cache lie: in a folder, or in memory that workers reach by name.

Everything is written with ``pwrite``: a full disk is then an error, where a write through a mapping
would be a signal that ends the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from penstock.errors import AlreadyThere, CannotWrite
from penstock.sources.locks import hold, lock_byte, unlock_byte
from penstock.sources.npy_files import HEADER_BYTES, Mapped, make_header, map_array
from penstock.sources.packed_writer import PART_PREFIX, read_text, write_whole

_LOCK = ".cache.lock"
_MARK = ".making"
_LOCKS = "locks"
_BOOT = "boot"


class Place(Protocol):
    """Files by name, for many processes at once."""

    def making(self) -> Any: ...
    def beginning(self) -> Any: ...
    def described(self, name: str) -> str | None: ...
    def describe(self, name: str, text: str) -> None: ...
    def make(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None: ...
    def make_heap(self, name: str) -> None: ...
    def map(self, name: str) -> Mapped: ...
    def read(self, name: str, start: int, num_bytes: int) -> bytes: ...
    def write(self, name: str, start: int, content: bytes) -> None: ...
    def append(self, name: str, content: bytes) -> int: ...
    def lock(self, row: int) -> Any: ...
    def was_down(self) -> bool: ...
    def note_up(self) -> None: ...


class DiskPlace:
    """A folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}
        self._closer = weakref.finalize(self, _close_all, self._files)
        self._closer.atexit = False
        self._mutex = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def __str__(self) -> str:
        return self.folder

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _descriptor(self, name: str) -> int:
        with self._mutex:
            if name not in self._files:
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
                self._files[name] = os.open(self._path(name), flags, 0o644)
            return self._files[name]

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """One process at a time makes or opens it; the others wait."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            descriptor = os.open(self._path(_LOCK), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CannotWrite(f"{self.folder} cannot be written: {error.strerror}") from error
        try:
            hold(descriptor)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """While the files are made. Raises: AlreadyThere: others' files, which stay as they are.

        The mark tells what a maker who was killed has left from what somebody else put here.
        """
        found = set(os.listdir(self.folder)) - {_LOCK}
        others = sorted(name for name in found if not name.startswith(PART_PREFIX))
        if others and _MARK not in found:
            with contextlib.suppress(OSError):
                os.unlink(self._path(_LOCK))
            raise AlreadyThere(
                f"{self.folder} is not empty: it has {others[0]!r}, and no cache",
                remedy="cached(dataset, 'a folder of its own')",
                path=self.folder,
            )
        self.describe(_MARK, "")
        yield
        os.unlink(self._path(_MARK))

    def described(self, name: str) -> str | None:
        try:
            return read_text(self._path(name))
        except FileNotFoundError:
            return None

    def describe(self, name: str, text: str) -> None:
        write_whole(self.folder, name, text)

    def make(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        descriptor = self._descriptor(name)
        count = int(np.prod(shape, dtype=np.int64))
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, HEADER_BYTES + count * dtype.itemsize)
        self.write(name, 0, make_header(dtype, shape))

    def make_heap(self, name: str) -> None:
        os.ftruncate(self._descriptor(name), 0)

    def map(self, name: str) -> Mapped:
        return map_array(self._path(name))

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
        """Behind what is there: a place is taken under a lock, then written without it."""
        descriptor = self._descriptor(name)
        with self.lock(-1, waits=True), self._mutex:
            start = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, start + len(content))
        self.write(name, start, content)
        return start

    @contextlib.contextmanager
    def lock(self, row: int, *, waits: bool = False) -> Iterator[bool]:
        """The right to write a sample; False: another process has it."""
        descriptor = self._descriptor(_LOCKS)
        is_mine = lock_byte(descriptor, row + 1, waits=waits)
        try:
            yield is_mine
        finally:
            if is_mine:
                unlock_byte(descriptor, row + 1)

    def was_down(self) -> bool:
        """Was the machine started anew since somebody wrote here?"""
        return self.described(_BOOT) != _boot_name()

    def note_up(self) -> None:
        if self.was_down():
            self.describe(_BOOT, _boot_name())


class MemoryPlace(DiskPlace):
    """Files without a name in any folder: they are gone with the process that made them.

    Workers open them through ``/proc`` of that process. Where there is no such thing, a temporary
    folder stands in.
    """

    def __init__(self, num_bytes: int = 0, paths: dict[str, str] | None = None) -> None:
        super().__init__("")
        self._paths: dict[str, str] = {} if paths is None else paths
        self._is_maker = paths is None
        if self._is_maker:
            _check_memory(num_bytes)
        if self._is_maker and not hasattr(os, "memfd_create"):
            self.folder = tempfile.mkdtemp(prefix="penstock-")
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.folder:
            return DiskPlace, (self.folder,)
        self._descriptor(_LOCKS)
        own = {
            name: f"/proc/{os.getpid()}/fd/{descriptor}" for name, descriptor in self._files.items()
        }
        return MemoryPlace, (0, {**own, **self._paths})

    def __str__(self) -> str:
        return "ram"

    def _path(self, name: str) -> str:
        if self.folder:
            return super()._path(name)
        if self._is_maker:
            return f"/proc/self/fd/{self._descriptor(name)}"
        return self._paths[name]

    def _descriptor(self, name: str) -> int:
        if self.folder or not self._is_maker:
            return super()._descriptor(name)
        with self._mutex:
            if name not in self._files:
                self._files[name] = os.memfd_create(f"penstock-{name}")
            return self._files[name]

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        yield  # nobody else knows of it yet

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        yield

    def described(self, name: str) -> str | None:
        return None

    def describe(self, name: str, text: str) -> None:
        """It is made for one dataset, and gone with it."""

    def was_down(self) -> bool:
        return False


def _close_all(files: dict[str, int]) -> None:
    for descriptor in files.values():
        os.close(descriptor)


def _check_memory(num_bytes: int) -> None:
    import psutil

    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise CannotWrite(
            f"about {num_bytes / 1e9:.1f} GB of memory are needed, and {free / 1e9:.1f} are free",
            remedy="cached(dataset, 'a folder on a fast disk')",
        )


def _boot_name() -> str:
    try:
        return read_text("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        import psutil

        return str(int(psutil.boot_time()) // 60)


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
