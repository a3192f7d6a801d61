"""Lance datasets, read by Lance's own ``take``. A block is a few MiB of rows of a fragment.

Rows of blocks that are wanted often, as in the block order, are taken from the whole block, which
is read at once: a row of 12 KB then takes 7 microseconds instead of 35 to 47. All other rows of a
batch are one call of ``take``. The version that was opened is read until the dataset is opened
again. Each process opens the dataset for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import BadStore, Damaged, MissingExtra
from penstock.options import check_count
from penstock.sources.blocks import BlockTouches, ReadOptions, resolve_index
from penstock.sources.parquet_dataset import join_chunks
from penstock.sources.source_files import SourceFiles, describe, open_error
from penstock.sources.table_reader import (
    BlockColumns,
    TableBlock,
    TableField,
    TableReader,
    TableSchema,
    copy_rows,
    make_columns,
)

_BLOCK_BYTES = 4 << 20
_MAX_ROWS = 4096
"""Limits of a block: bytes in the files, all columns together, and rows."""


class LanceDataset(TableReader):
    """Rows of a Lance dataset. See :func:`penstock.open_dataset`."""

    unit = "fragment"
    plan_notes = ()  # rows that are not in the cache are taken without their block

    def __init__(
        self,
        path: str,
        version: int,
        blocks: Sequence[TableBlock],
        fields: Mapping[str, TableField],
        options: ReadOptions,
    ) -> None:
        files = SourceFiles(_find_manifest(path, version), os.path.getsize)
        super().__init__(files, blocks, fields, options)
        self._path = path
        self._version = version
        self._opened: tuple[int, Any] | None = None
        self._touches = BlockTouches()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None, "_touches": BlockTouches()}

    def _dataset(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open_lance_dataset(self._path, self._version)
        return self._opened[1]

    def _rows(self, places: list[int]) -> BlockColumns:
        """Return the rows at these indices, as the rows of one block."""
        for file in range(len(self._files.paths)):
            self._files.check(file)
        try:
            table = self._dataset().take(places, columns=list(self._fields))
            arrays = {name: join_chunks(table.column(name)) for name in self._fields}
            if table.num_rows != len(places):
                raise ValueError(f"{table.num_rows} rows instead of {len(places)}")
            columns = make_columns(arrays, self._fields, decode=self._decode)
            return BlockColumns(columns, table.nbytes)
        except (BadStore, MissingExtra):
            raise
        except Exception as error:
            raise Damaged(
                f"{self._path} cannot be read: {describe(error)}",
                where=f"samples {min(places)} to {max(places)}",
                likely="a file of the dataset has changed, or its version was removed by cleanup.",
                remedy='open it again, or DataLoader(..., on_error="skip")',
                path=self._path,
            ) from None

    def _read_block(self, block: int) -> BlockColumns:
        first, end = self._block_starts[block : block + 2].tolist()
        return self._rows(list(range(first, end)))

    def _parts(self, places: np.ndarray) -> Iterator[tuple[BlockColumns, np.ndarray, np.ndarray]]:
        """Yield columns, the rows of them that are wanted, and their positions in ``places``."""
        blocks = self._block_starts.searchsorted(places, side="right") - 1
        cache, rest = self._cached_blocks(), []
        for block in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == block)
            if block in cache or self._touches.add(block, len(here), self._blocks[block].num_rows):
                yield self._block(block), places[here] - self._block_starts[block], here
            else:
                rest.append(here)
        if rest:
            here = np.concatenate(rest)
            here = here[np.argsort(places[here])]  # rows in order are faster to take
            yield self._rows(places[here].tolist()), np.arange(len(here)), here

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        start = int(self._block_starts[block])
        return self._many([start + row for row in rows])

    def _many(self, indices: Sequence[int]) -> list[Any]:
        places = np.array([resolve_index(index, len(self)) for index in indices], np.int64)
        samples: list[Any] = [None] * len(places)
        for content, rows, here in self._parts(places):
            for row, place in zip(rows.tolist(), here.tolist(), strict=True):
                samples[place] = self._sample(content, row)
        return samples

    def _read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        for content, rows, here in self._parts(index):
            for target, (name, column) in zip(out, content.columns.items(), strict=True):
                copy_rows(self._rows_of(name, column), rows, target, here)


def open_lance(
    paths: Sequence[str],
    options: ReadOptions,
    *,
    version: int | None = None,
) -> LanceDataset:
    """Open a Lance dataset. Called by :func:`penstock.open_dataset`.

    Args:
        version: The version to read. None: the latest one.

    Raises:
        BadStore: The folder is not a Lance dataset, or its version does not exist.
        MissingExtra: pylance is not installed.
    """
    path = paths[0]
    if version is not None:
        version = check_count("version", version, 1)
        if not _find_manifest(path, version):
            raise _unknown_version(path, version)
    dataset = open_lance_dataset(path, version)
    try:
        schema, found = dataset.schema, int(dataset.version)
        fragments = [(one, one.count_rows()) for one in dataset.get_fragments()]
    except Exception as error:
        raise open_error(path, error) from None
    found_schema = TableSchema(options)
    found_schema.add(path, schema, has_rows=any(count for _, count in fragments))
    blocks = [
        block
        for number, (fragment, count) in enumerate(fragments)
        for block in _split_fragment(number, count, _count_bytes(path, fragment))
    ]
    return LanceDataset(path, found, blocks, found_schema.fields, options)


def _count_bytes(path: str, fragment: Any) -> int:
    """Return the size of a fragment's files, or 0 if they are not local."""
    found = [file.path for file in fragment.data_files()]
    found = [one if isinstance(one, str) else one() for one in found]  # old: a method
    names = [os.path.join(path, "data", one) for one in found]
    return sum(os.path.getsize(name) for name in names if os.path.exists(name))


def _split_fragment(number: int, num_rows: int, num_bytes: int) -> Iterator[TableBlock]:
    """Yield the blocks of a fragment."""
    row_bytes = max(1, num_bytes // max(1, num_rows))
    step = max(1, min(_MAX_ROWS, _BLOCK_BYTES // row_bytes))
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        yield TableBlock(0, number, count, count * row_bytes)


def _find_manifest(path: str, version: int) -> list[str]:
    """Return the manifest of a version, which never changes unless the dataset is replaced."""
    names = (f"{version}.manifest", f"{2**64 - 1 - version:020}.manifest")
    paths = [os.path.join(path, "_versions", name) for name in names]
    return [one for one in paths if os.path.exists(one)]


def _unknown_version(path: str, version: int) -> BadStore:
    known = sorted(one["version"] for one in open_lance_dataset(path).versions())
    shown = ", ".join(map(str, known[-5:]))
    return BadStore(
        f"{path} has no version {version}. Its latest versions are {shown}",
        likely="it was removed by cleanup, or was never written.",
        remedy=f"open_dataset({path!r}, version={known[-1]})",
        path=path,
    )


def open_lance_dataset(path: str, version: int | None = None) -> Any:
    """Return Lance's own dataset.

    Raises:
        MissingExtra: pylance is not installed.
    """
    try:
        import lance
    except ImportError:
        raise MissingExtra.named(
            "lance", "Lance datasets need pylance, which is not installed"
        ) from None
    try:
        return lance.dataset(path, version=version)
    except Exception as error:
        raise open_error(path, error) from None
