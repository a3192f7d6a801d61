"""``.npy`` files: page-aligned headers, and memory maps of one or many files.

NumPy can open these files as usual. The header is padded to ``HEADER_BYTES``, so the data of every
shard starts at the same offset within a page. That lets one gather span many shards
(:mod:`penstock.sources.columns`). On Linux all files of a field are mapped into one address range,
where NumPy sees their rows as rows of one array:

    reserve:  |---------------------------------------------------------|   addresses only
    map:      |[header|row row row]....|[header|row row]....|[header|row]   each file starts at a
              distance from the first that is a multiple of both the page size and the row size

No descriptor stays open, so a set with many shards does not approach the limit. On other systems
files are mapped one by one, and a gather copies rows in smaller chunks.

Tested by ``tests/unit/sources/test_packed.py``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import BadStore

HEADER_BYTES = 4096
_MAGIC = b"\x93NUMPY\x01\x00"
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_ANONYMOUS, _MAP_NORESERVE = 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def make_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the first ``HEADER_BYTES`` of a ``.npy`` file, format 1.0.

    Example:
        >>> import io
        >>> content = make_header(np.dtype("<i2"), (2,)) + np.array([3, 4], "<i2").tobytes()
        >>> np.load(io.BytesIO(content)).tolist()
        [3, 4]
    """
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    length = HEADER_BYTES - len(_MAGIC) - 2
    if len(text) >= length:
        raise ValueError(f"a shape of {len(shape)} dimensions does not fit the header")
    return _MAGIC + struct.pack("<H", length) + text.ljust(length - 1).encode("ascii") + b"\n"


class MappedArray(NamedTuple):
    """An array and the mapped file that contains it.

    Args:
        offset: Where the data begins in the file.
        file: None if the array is in memory.
    """

    array: np.ndarray
    offset: int = 0
    file: _MappedFile | None = None


def map_file(path: str) -> np.ndarray:
    """Map all bytes of a file for reading. Raises OSError if that is not possible."""
    files = _map_together([path], [os.stat(path).st_size], 1)
    return (_map_alone(path) if files is None else files[0]).content


def map_shared(path: str, num_bytes: int) -> np.ndarray:
    """Map the first bytes of a file for reading and writing. All processes see the changes.

    Raises:
        OSError: The file cannot be opened or mapped.
    """
    with open(path, "r+b") as file:
        if sys.platform != "linux":
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
        libc, flags = _libc(), _PROT_READ | _PROT_WRITE  # Python's mmap keeps a descriptor open
        address = libc.mmap(None, num_bytes, flags, _MAP_SHARED, file.fileno(), 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
    owner = _Memory(None, {})
    weakref.finalize(owner, libc.munmap, address, num_bytes).atexit = False
    return array_at(address, (num_bytes,), owner)


Opener = Callable[[str, int], int]
"""The ``opener`` of Python's ``open``."""


def map_array(path: str, opener: Opener | None = None) -> MappedArray:
    """Map one ``.npy`` file. See :func:`map_arrays`."""
    return map_arrays([path], opener)[0]


def map_arrays(paths: list[str], opener: Opener | None = None) -> list[MappedArray]:
    """Map ``.npy`` files for reading. On Linux, their distances are multiples of the row size.

    Args:
        opener: Opens the files, except on Linux.

    Raises:
        BadStore: A file cannot be opened, is not a ``.npy`` file, contains objects, or is shorter
            than its header says.
    """
    headers = [_read_header(path, opener) for path in paths]
    row_bytes = max((header.row_bytes for header in headers), default=0)
    sizes = [header.file_bytes for header in headers]
    files = _map_together(paths, sizes, row_bytes)
    if files is None:
        files = [_map_alone(path, opener) for path in paths]
    return [
        MappedArray(
            file.content[header.offset :][: header.data_bytes]
            .view(header.dtype)
            .reshape(header.shape),
            header.offset,
            file,
        )
        for header, file in zip(headers, files, strict=True)
    ]


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    file_bytes: int

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or 0 without rows, because an untrusted header may state any shape."""
        return self.data_bytes // self.shape[0] if self.shape and self.shape[0] else 0


def _read_header(path: str, opener: Opener | None) -> _Header:
    copy_again = "copy the file again from its source"
    try:
        with open(path, "rb", opener=opener) as file:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, is_fortran, dtype = read(file)
            np.broadcast_to(np.empty((), dtype), shape)  # raises for impossible sizes
            header = _Header(dtype, shape, file.tell(), os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise BadStore(f"{path} cannot be opened: {error.strerror or error}", path=path) from None
    except Exception as error:  # NumPy's parser raises many types for damaged bytes
        raise BadStore(
            f"{path} is not a .npy file: {' '.join(str(error).split())[:200]}",
            likely="its first bytes are damaged, or another program wrote it.",
            remedy=copy_again,
            path=path,
        ) from None
    if dtype.hasobject:
        raise BadStore(
            f"{path} contains Python objects, which would have to be unpickled. Penstock does not "
            "unpickle data",
            path=path,
        )
    if is_fortran and len(shape) > 1:
        raise BadStore(
            f"{path} is in Fortran order, so its samples are not rows of the file",
            remedy=f"np.save({path!r}, np.ascontiguousarray(np.load({path!r})))",
            path=path,
        )
    needed = header.offset + header.data_bytes
    if header.file_bytes < needed:
        raise BadStore(
            f"{path} has {header.file_bytes} bytes; {dtype} of shape {shape} needs {needed}",
            likely="the file is truncated, because of a full disk or an interrupted copy.",
            remedy=copy_again,
            path=path,
        )
    return header


class _MappedFile:
    """All bytes of a file, and a function to advise the kernel about them.

    Args:
        advise: Like ``mmap.madvise``.
    """

    def __init__(self, content: np.ndarray, advise: Any) -> None:
        self.content = content
        self.madvise = advise


def _map_alone(path: str, opener: Opener | None = None) -> _MappedFile:
    keywords: dict[str, Any] = {"access": mmap.ACCESS_READ}
    if sys.version_info >= (3, 13) and os.name == "posix":
        keywords["trackfd"] = False  # so that a thousand shards do not hold a thousand descriptors
    with open(path, "rb", opener=opener) as file:
        mapping = mmap.mmap(file.fileno(), 0, **keywords)
    return _MappedFile(np.frombuffer(mapping, np.uint8), getattr(mapping, "madvise", None))


class AddressRange:
    """A range of addresses, unmapped when the last array in it is gone."""

    def __init__(self, num_bytes: int) -> None:
        self.libc = _libc()
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = self.libc.mmap(None, num_bytes, _PROT_NONE, flags, -1, 0)
        if self.address == _FAILED:
            raise OSError(ctypes.get_errno(), "no address range available")
        weakref.finalize(self, self.libc.munmap, self.address, num_bytes).atexit = False

    def map_file(self, path: str, start: int, num_bytes: int) -> _MappedFile:
        address = self.address + start
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                raise OSError(f"the size of {path} has changed")
            flags = _MAP_SHARED | _MAP_FIXED
            found = self.libc.mmap(address, num_bytes, _PROT_READ, flags, file.fileno(), 0)
            if found == _FAILED:
                raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")

        def advise(option: int, first: int = 0, length: int = num_bytes) -> None:
            self.libc.madvise(address + first, length, option)

        return _MappedFile(array_at(address, (num_bytes,), self, is_readonly=True), advise)

    def clear(self, start: int, num_bytes: int) -> None:
        """Unmap a file. Its addresses stay reserved."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self.libc.mmap(self.address + start, num_bytes, _PROT_NONE, flags, -1, 0)


def _map_together(paths: list[str], sizes: list[int], row_bytes: int) -> list[_MappedFile] | None:
    """Map files at distances that are multiples of the row size. None if that is not possible."""
    if sys.platform != "linux" or not row_bytes:
        return None
    step = math.lcm(row_bytes, mmap.PAGESIZE)
    starts = np.cumsum([0, *(-(-size // step) * step for size in sizes)]).tolist()
    try:
        addresses = AddressRange(starts[-1])
        return list(map(addresses.map_file, paths, starts, sizes))
    except (OSError, AttributeError):  # an address limit, or a C library without these functions
        return None


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, whole = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, size, whole, whole, whole, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    libc.madvise.argtypes = (ctypes.c_void_p, size, whole)
    return libc


class _Memory:
    """Memory described by NumPy's array interface."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def array_at(
    address: int, shape: tuple[int, ...], owner: Any, *, is_readonly: bool = False
) -> np.ndarray:
    """Return memory as an array of bytes, which keeps ``owner`` alive.

    The garbage collector does not traverse arrays, so ``owner`` must not refer to the array.
    """
    interface = {
        "shape": shape,
        "typestr": "|u1",
        "data": (address, is_readonly),
        "version": 3,
    }
    return np.asarray(_Memory(owner, interface))
