"""One array in one file: a ``.npy`` whose data begins on a page, and the checks of its bytes.

NumPy opens these files like any other. The header is padded to ``HEADER_BYTES`` so that the data of
every shard has the same place modulo a page: that lets one gather reach over many shards
(:mod:`penstock.sources.columns`).
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
import zlib
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import BadStore
from penstock.sources.mapped_span import SpanFile

HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 20
"""Bytes under one checksum: what a first read of a single row has to look at."""
_MAGIC = b"\x93NUMPY\x01\x00"


def make_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The first ``HEADER_BYTES`` of a ``.npy`` file, format 1.0.

    Example:
        >>> import io
        >>> content = make_header(np.dtype("<i2"), (2,)) + np.array([3, 4], "<i2").tobytes()
        >>> np.load(io.BytesIO(content)).tolist()
        [3, 4]
    """
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    room = HEADER_BYTES - len(_MAGIC) - 2
    if len(text) >= room:
        raise ValueError(f"a shape of {len(shape)} dimensions does not fit the header")
    return _MAGIC + struct.pack("<H", room) + text.ljust(room - 1).encode("ascii") + b"\n"


class Mapped(NamedTuple):
    """A file's array, and the mapping that it lies in."""

    array: np.ndarray
    mapping: Any
    """Takes ``madvise``."""
    offset: int
    """Where the data begins in the file."""
    content: Any
    """All bytes of the file, as a buffer."""

    def moved(self, file: SpanFile) -> Mapped:
        """The same array in another mapping of its file."""
        data = file.content[self.offset : self.offset + self.array.nbytes]
        array = data.view(self.array.dtype).reshape(self.array.shape)
        return Mapped(array, file, self.offset, file.content)


def map_array(path: str) -> Mapped:
    """Map a ``.npy`` file for reading.

    Raises:
        BadStore: It is no ``.npy``, holds objects, or is shorter than its header says.
        OSError: It is not there, or may not be read.
    """
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        dtype, shape, offset = _read_header(file, path)
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if num_bytes < offset + count * dtype.itemsize:
            raise BadStore(
                f"{path} has {num_bytes} bytes; {dtype} of shape {shape} needs "
                f"{offset + count * dtype.itemsize}",
                likely="it was cut off: a full disk, or a copy that did not end.",
                remedy="copy the file again from where it was made",
                path=path,
            )
        mapping = _map(file.fileno())
    if not count:
        return Mapped(np.empty(shape, dtype), mapping, offset, mapping)
    flat = np.frombuffer(mapping, dtype, count, offset)
    return Mapped(flat.reshape(shape), mapping, offset, mapping)


def _map(descriptor: int) -> mmap.mmap:
    keywords: dict[str, Any] = {"access": mmap.ACCESS_READ}
    if sys.version_info >= (3, 13) and os.name == "posix":
        keywords["trackfd"] = False  # a thousand shards must not hold a thousand descriptors
    return mmap.mmap(descriptor, 0, **keywords)


def _read_header(file: io.BufferedReader, path: str) -> tuple[np.dtype[Any], Any, int]:
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # whatever the bytes made of NumPy's parser
        raise BadStore(
            f"{path} is no .npy file: {' '.join(str(error).split())[:200]}",
            likely="its first bytes are damaged, or something else wrote it.",
            remedy="copy the file again from where it was made",
            path=path,
        ) from None
    if dtype.hasobject:
        raise BadStore(
            f"{path} holds Python objects, which only pickle could read: refused", path=path
        )
    if is_fortran and len(shape) > 1:
        raise BadStore(
            f"{path} lies in Fortran order: its samples are not rows of the file",
            remedy=f"np.save({path!r}, np.ascontiguousarray(np.load({path!r})))",
            path=path,
        )
    return dtype, shape, file.tell()


# -- checks --------------------------------------------------------------------------------------


def block_checks(content: Any) -> np.ndarray:
    """CRC-32 of each block of a file's bytes.

    Example:
        >>> block_checks(b"123456789").tolist() == [0xCBF43926]
        True
    """
    view = memoryview(content).cast("B")
    starts = range(0, len(view), BLOCK_BYTES)
    return np.array([zlib.crc32(view[at : at + BLOCK_BYTES]) for at in starts], dtype="<u4")


def check_of(blocks: np.ndarray) -> int:
    """One number for all of them: the CRC-32 of the blocks' own, as little-endian words."""
    return zlib.crc32(np.ascontiguousarray(blocks, dtype="<u4").tobytes())
