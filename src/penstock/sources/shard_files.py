"""The files of one shard while it is being written: rows in, finished arrays out."""

from __future__ import annotations

import array
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.sources.manifest import FieldSchema, FileEntry
from penstock.sources.npy_files import (
    BLOCK_BYTES,
    HEADER_BYTES,
    block_checks,
    check_of,
    make_header,
)

Fetch = Callable[[range], Iterator[tuple[int, Any]]]
"""For the indices of a shard: (index, list of encoded arrays), or (index, text of its error)."""
_BUFFER_BYTES = 1 << 20


class _ArrayFile:
    """One ``.npy`` that grows by its end; its header is written when its length is known."""

    def __init__(self, folder: str, name: str, dtype: np.dtype[Any]) -> None:
        self.path = os.path.join(folder, name)
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._file = open(self.path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115
        self._file.write(bytes(HEADER_BYTES))

    def add(self, items: Any) -> None:
        self._file.write(items)

    def finish(self, shape: tuple[int, ...]) -> FileEntry:
        self._file.flush()
        self._file.seek(0)
        self._file.write(make_header(self._dtype, shape))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with (
            open(self.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            num_bytes, blocks = len(content), block_checks(content)
        entry = FileEntry(name=self._name, bytes=num_bytes, check=check_of(blocks))
        if num_bytes > BLOCK_BYTES:
            self._write_blocks(os.path.join(self._folder, entry.blocks_name), blocks)
        return entry

    def _write_blocks(self, path: str, blocks: np.ndarray) -> None:
        with open(path, "wb") as file:
            file.write(make_header(blocks.dtype, blocks.shape) + blocks.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._file.close()


class _Fixed:
    """A field whose samples all have one shape."""

    def __init__(self, folder: str, schema: FieldSchema, shard: int) -> None:
        self._schema = schema
        self._file = _ArrayFile(folder, schema.file_names(shard)[0], schema.stored)

    def add(self, value: np.ndarray) -> None:
        self._file.add(value.data if value.ndim else value.tobytes())

    def finish(self, rows: int) -> list[FileEntry]:
        return [self._file.finish((rows, *(self._schema.shape or ())))]

    def close(self) -> None:
        self._file.close()


class _Ragged:
    """A field whose samples differ in length: items, offsets, and shapes where needed."""

    def __init__(self, folder: str, schema: FieldSchema, shard: int) -> None:
        dtypes = (schema.stored, np.dtype("<i8"), np.dtype("<i8"))
        names = schema.file_names(shard)
        self._ndim = schema.ndim
        self._files = [
            _ArrayFile(folder, *pair) for pair in zip(names, dtypes[: len(names)], strict=True)
        ]
        self._end = 0
        self._files[1].add(array.array("q", [0]).tobytes())

    def add(self, value: np.ndarray) -> None:
        if value.size:
            self._files[0].add(np.ascontiguousarray(value).reshape(-1).data)
        self._end += value.size
        self._files[1].add(np.array([self._end], "<i8").tobytes())
        if len(self._files) > 2:
            self._files[2].add(np.array(value.shape, "<i8").tobytes())

    def finish(self, rows: int) -> list[FileEntry]:
        shapes: tuple[tuple[int, ...], ...] = ((self._end,), (rows + 1,), (rows, self._ndim))
        pairs = zip(self._files, shapes[: len(self._files)], strict=True)
        return [file.finish(shape) for file, shape in pairs]

    def close(self) -> None:
        for file in self._files:
            file.close()


class ShardFiles:
    """All files of a shard, open for rows."""

    def __init__(self, folder: str, fields: tuple[FieldSchema, ...], shard: int) -> None:
        self._fields = fields
        self._writers: list[_Fixed | _Ragged] = [
            (_Ragged if schema.is_ragged else _Fixed)(folder, schema, shard) for schema in fields
        ]

    def add(self, values: list[np.ndarray]) -> None:
        for writer, value in zip(self._writers, values, strict=True):
            writer.add(value)

    def finish(self, rows: int) -> dict[str, list[FileEntry]]:
        """Headers, checks, and everything on the disk."""
        pairs = zip(self._fields, self._writers, strict=True)
        return {schema.name: writer.finish(rows) for schema, writer in pairs}

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def write_samples(
    files: ShardFiles, fetch: Fetch, indices: range
) -> tuple[int, list[tuple[int, str]]]:
    """Every sample that there is; how many, and what was wrong with the others."""
    rows, bad = 0, []
    for index, found in fetch(indices):
        if isinstance(found, str):
            bad.append((index, found))
            continue
        files.add(found)
        rows += 1
    return rows, bad
