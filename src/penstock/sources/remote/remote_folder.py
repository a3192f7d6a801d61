"""An open packed set in object storage: its manifest, and its files through the cache.

The counterpart of :class:`~penstock.sources.packed_folder.PackedFolder`. Workers receive the URL
and the cache folder, and read the manifest there.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import BadArgument
from penstock.sources.columns import Column, FixedColumn, RaggedColumn
from penstock.sources.manifest import MANIFEST, FieldSchema, FileEntry
from penstock.sources.packed_folder import read_manifest
from penstock.sources.remote.address import check_url, require_obstore
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_layout import BlockLayout, item_dtypes
from penstock.sources.remote.cached_set import CachedSet, make_cache_options, make_private
from penstock.sources.remote.downloader_start import CacheOptions, open_set
from penstock.sources.remote.remote_rows import RemoteRows, blocks_of_rows


class RemoteFolder(CachedSet):
    """An open set. Pickled as its URL and cache folder; workers open it without the network.

    Args:
        folder: The set's folder in the cache. None: fetch the manifest to find it.
    """

    def __init__(self, url: str, options: CacheOptions, folder: str | None = None) -> None:
        url = check_url(url)
        if folder is None or not os.path.exists(os.path.join(folder, MANIFEST)):
            require_obstore(url)
            make_private(options.root)
            folder = open_set(url, options)
        self.manifest = read_manifest(folder, url)
        self.schemas, self.form = self.manifest.fields, self.manifest.form
        super().__init__(BlockLayout(self.manifest, url), folder, options)
        self.columns: dict[str, Column] = {one.name: self._open(one) for one in self.schemas}

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFolder, (self.path, self.options, self.folder)

    def _open(self, schema: FieldSchema) -> Column:
        kinds = item_dtypes(schema)
        shards = [
            [
                self._rows(entry, dtype, shape, None if extra is None else shard.rows + extra)
                for entry, (dtype, shape, extra) in zip(
                    shard.files[schema.name], kinds, strict=True
                )
            ]
            for shard in self.manifest.shards
        ]
        if not schema.is_ragged:
            return FixedColumn([one[0] for one in shards])
        return RaggedColumn([(one[0], one[1], one[2] if len(one) > 2 else None) for one in shards])

    def _rows(
        self, entry: FileEntry, dtype: np.dtype[Any], shape: tuple[int, ...], rows: int | None
    ) -> RemoteRows:
        row_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        num_rows = self.layout.check_rows(entry, row_bytes, rows)
        return RemoteRows(self.files, self.layout.numbers[entry.name], num_rows, dtype, shape)

    def blocks_of(
        self, dataset: Any, rows: np.ndarray
    ) -> Iterator[tuple[BlockFiles, np.ndarray, np.ndarray]]:
        if dataset._rows is not None:
            rows = dataset._rows_at(rows)
        for column in dataset._columns:
            yield from blocks_of_rows(column, rows)


def open_remote(url: str, verify: str, **options: Any) -> RemoteFolder:
    """Open a set in object storage for :class:`penstock.Packed`."""
    if verify == "full":
        raise BadArgument(
            "verify='full' would download the whole set; blocks of a remote set are always "
            "verified when they arrive",
            remedy="Packed(url) without verify=",
        )
    return RemoteFolder(url, make_cache_options(**options))
