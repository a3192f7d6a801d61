"""Lance datasets, read by Lance's own ``take``. A fragment is a block.

A batch is one call of ``take``, whatever fragments its rows are in. The version that was opened is
read until the dataset is opened again. Each process opens the dataset for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.engine.memory.batch_layout import LayoutError
from penstock.errors import BadStore, Damaged, MissingExtra
from penstock.sources.blocks import resolve_index
from penstock.sources.parquet_dataset import join_chunks
from penstock.sources.table_files import TableFiles, describe, open_error
from penstock.sources.table_reader import (
    BlockColumns,
    TableBlock,
    TableField,
    TableReader,
    TableSchema,
    copy_rows,
    make_columns,
)


class LanceDataset(TableReader):
    """Rows of a Lance dataset. See :func:`penstock.open_dataset`."""

    unit = "fragment"

    def __init__(
        self,
        path: str,
        version: int,
        blocks: Sequence[TableBlock],
        fields: Mapping[str, TableField],
        *,
        decode: bool,
        transforms: Mapping[str, Callable[[Any], Any]] | None,
    ) -> None:
        files = TableFiles(_find_manifest(path, version), os.path.getsize)
        super().__init__(files, blocks, fields, decode=decode, transforms=transforms)
        self._path = path
        self._version = version
        self._opened: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None}

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
            return BlockColumns(make_columns(arrays, self._fields, decode=self._decode), 0)
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

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        start = int(self._block_starts[block])
        return self._many([start + row for row in rows])

    def _many(self, indices: Sequence[int]) -> list[Any]:
        places = [resolve_index(index, len(self)) for index in indices]
        if not places:
            return []
        content = self._rows(places)
        return [self._sample(content, row) for row in range(len(places))]

    def _read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        columns = self._rows(index.tolist()).columns
        every = np.arange(len(index))
        for target, (name, column) in zip(out, columns.items(), strict=True):
            rows = column.rows()
            if rows is None or rows.shape[1:] != self._first_shapes()[name]:
                raise LayoutError
            copy_rows(rows, every, target, every)


def open_lance(
    paths: Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    decode: bool = True,
    transforms: Mapping[str, Callable[[Any], Any]] | None = None,
    allow_pickle: bool = False,
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
    dataset = open_lance_dataset(path, version)
    try:
        schema, found = dataset.schema, int(dataset.version)
        counts = [fragment.count_rows() for fragment in dataset.get_fragments()]
    except Exception as error:
        raise open_error(path, error) from None
    found_schema = TableSchema(columns)
    found_schema.add(path, schema, has_rows=any(counts))
    blocks = [TableBlock(0, number, count) for number, count in enumerate(counts) if count]
    fields = found_schema.fields
    return LanceDataset(path, found, blocks, fields, decode=decode, transforms=transforms)


def _find_manifest(path: str, version: int) -> list[str]:
    """Return the manifest of a version, which never changes unless the dataset is replaced."""
    names = (f"{version}.manifest", f"{2**64 - 1 - version:020}.manifest")
    paths = [os.path.join(path, "_versions", name) for name in names]
    return [one for one in paths if os.path.exists(one)]


def open_lance_dataset(path: str, version: int | None = None) -> Any:
    """Return Lance's own dataset.

    Raises:
        MissingExtra: pylance is not installed.
    """
    try:
        import lance
    except ImportError:
        raise MissingExtra(
            "Lance datasets need pylance, which is not installed",
            remedy='pip install "penstock[lance]"',
        ) from None
    try:
        return lance.dataset(path, version=version)
    except Exception as error:
        raise open_error(path, error) from None
