"""Datasets in chunk files that begin with a table of offsets, as those of MDS and LitData do.

    uint32 count | uint32 offset of each sample, and the end | ... | sample | sample | ...

All integers are little-endian. A chunk is a block. Its table of offsets is kept, and samples are
read one by one.

Tested by ``tests/unit/sources/test_mds_dataset.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import BadStore, Damaged, PenstockError
from penstock.sources.blocks import BlockReader, refuse_unknown_fields
from penstock.sources.source_files import SourceFiles, describe, open_error, read_json

_INCOMPLETE = "the set was not completely written or copied."
_COPY_AGAIN = 'copy the file again from its source, or DataLoader(..., on_error="skip")'


class Chunk(NamedTuple):
    """A chunk: its path, its samples, and its size in bytes according to the index."""

    path: str
    num_samples: int
    num_bytes: int


class ChunkReader(BlockReader):
    """Base class of datasets in chunk files.

    Args:
        chunks: All chunks. Those without samples are left out.
        names: The fields that transforms can have.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        names: Sequence[str],
        *,
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self._chunks = [chunk for chunk in chunks if chunk.num_samples]
        counts = [chunk.num_samples for chunk in self._chunks]
        super().__init__(np.cumsum([0, *counts]), transforms=transforms, fields=names)
        refuse_unknown_fields(self._transforms, names)
        self._files = SourceFiles([chunk.path for chunk in self._chunks])
        for chunk, stamp in zip(self._chunks, self._files.stamps, strict=True):
            check_size(chunk, stamp.size)

    # -- for subclasses --------------------------------------------------------------------------

    def _decode(self, item: memoryview) -> Any:
        """Return the sample in these bytes."""
        raise NotImplementedError

    # -- samples ---------------------------------------------------------------------------------

    def _read_block(self, block: int) -> Any:
        """Return the offsets of a chunk's samples, and the end of the last."""
        chunk = self._chunks[block]
        needed = 4 * (chunk.num_samples + 2)
        if needed > chunk.num_bytes:
            raise self._damaged(block, f"it is too short for {chunk.num_samples} samples")
        header = np.frombuffer(self._files.read(block, 0, needed), "<u4")
        count, offsets = int(header[0]), header[1:].astype(np.int64)
        if count != chunk.num_samples:
            raise self._damaged(block, f"it has {count} samples; the index {chunk.num_samples}")
        is_valid = offsets[0] >= needed and (np.diff(offsets) >= 0).all()
        if not is_valid or offsets[-1] > chunk.num_bytes:
            raise self._damaged(block, "its table of offsets is invalid")
        return offsets

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        offsets = self._block(block)
        sizes = offsets[np.add(rows, 1)] - offsets[rows]
        parts = zip(offsets[rows].tolist(), sizes.tolist(), strict=True)
        items = self._files.read_parts(block, parts)
        return [self._decoded(item, block, row) for item, row in zip(items, rows, strict=True)]

    def _decoded(self, item: bytes, block: int, row: int) -> Any:
        try:
            return self._decode(memoryview(item))
        except PenstockError:
            raise
        except Exception as error:  # damaged bytes raise many types
            if self._transforms:  # the user's transform may have raised it
                raise
            raise self._damaged(block, describe(error), row) from error

    def _damaged(self, block: int, why: str, row: int | None = None) -> Damaged:
        path = self._chunks[block].path
        first = int(self._block_starts[block])
        what = f"{path} cannot be read: {why}"
        if row is not None:
            what = f"sample {first + row} cannot be read: {why}"
        return Damaged(
            what,
            where=f"{path}, sample {row} of it" if row is not None else None,
            likely="bytes of the file have changed since it was written.",
            remedy=_COPY_AGAIN,
            path=path,
        )


def check_size(chunk: Chunk, num_bytes: int) -> None:
    """Check the size of a chunk against its index.

    Raises:
        BadStore: It differs.
    """
    if num_bytes != chunk.num_bytes:
        raise BadStore(
            f"{chunk.path} has {num_bytes} bytes; index.json says {chunk.num_bytes}",
            likely="the file is truncated, because of an interrupted copy, or is from another set.",
            remedy="copy the folder again from its source",
            path=chunk.path,
        )


def read_index(folder: str, key: str) -> dict[str, Any]:
    """Return the content of a folder's ``index.json``, which has a list ``key``.

    Raises:
        BadStore: There is none, or it is not such an index.
    """
    path = os.path.join(folder, "index.json")
    try:
        found = read_json(path)
    except OSError as error:
        raise open_error(path, error, likely=_INCOMPLETE) from None
    except ValueError as error:
        what = f"{path} cannot be read: {describe(error)}"
        raise BadStore(what, likely=_INCOMPLETE, path=path) from None
    if not isinstance(found, dict) or not isinstance(found.get(key), list):
        raise BadStore(f"{path} has no list {key!r}", path=path)
    return found


def refuse_pickle(name: str, folder: str) -> BadStore:
    """Return the error for a pickled field."""
    return BadStore(
        f"field {name!r} of {folder} is pickled, and a pickle can run any code when it is loaded",
        remedy="open_dataset(path, allow_pickle=True) if you trust the files, or columns=[...] "
        "without this field",
        path=folder,
    )
