"""An open packed set in object storage: its manifest, and its files through the cache.

The counterpart of :class:`~penstock.sources.packed_folder.PackedFolder`. Workers receive the URL
and the cache folder, and read the manifest there.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import os
import platform
import shutil
from typing import Any

import numpy as np

from penstock.errors import BadArgument, CannotWrite
from penstock.machine.cache_folder import cache_folder
from penstock.options import check_count
from penstock.sources.columns import Column, FixedColumn, RaggedColumn
from penstock.sources.manifest import MANIFEST, FieldSchema, FileEntry
from penstock.sources.packed_folder import read_manifest
from penstock.sources.remote.address import check_url, require_obstore
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_layout import (
    BLOCK_BYTES,
    BlockLayout,
    describe_bytes,
    item_dtypes,
)
from penstock.sources.remote.downloader_start import CacheOptions, DownloaderStarter, fetch_manifest
from penstock.sources.remote.remote_rows import RemoteRows

TIMEOUT_S = 120.0
_AHEAD_BYTES = 1 << 30
_MIN_BLOCKS = 4


class RemoteFolder:
    """An open set. Pickled as its URL and cache folder; workers open it without the network.

    Args:
        folder: The set's folder in the cache. None: fetch the manifest to find it.
    """

    draws_nothing = True

    def __init__(self, url: str, options: CacheOptions, folder: str | None = None) -> None:
        self.path = check_url(url)
        self.options, is_new = options, False
        if folder is None or not os.path.exists(os.path.join(folder, MANIFEST)):
            require_obstore(url)
            make_private(options.root)
            folder = fetch_manifest(self.path, options)
            is_new = True
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.schemas, self.form = self.manifest.fields, self.manifest.form
        self.layout = BlockLayout(self.manifest, self.path)
        self.num_bytes = self.layout.num_bytes
        starter = DownloaderStarter(self.path, folder, options)
        self.files = BlockFiles(self.layout, starter, options.timeout_s)
        self.columns: dict[str, Column] = {one.name: self._open(one) for one in self.schemas}
        self.order_notes: list[str] = []
        if is_new:  # while the program prepares its first batch
            starter.start()

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

    def follow(self, dataset: Any, *arguments: Any) -> None:
        """Publish the order of a loader's epoch. See :func:`follow_epoch`."""
        from penstock.sources.remote.epoch_follower import follow_epoch

        follow_epoch(dataset, *arguments)

    def count_network(self) -> dict[str, Any]:
        """Return the counters of the cache. All programs that use it are counted together."""
        found: dict[str, Any] = {"set_bytes": self.num_bytes, "limit_bytes": self.options.max_bytes}
        return {**found, "is_ahead": not self.order_notes, **self.files.counters()}

    @property
    def plan_notes(self) -> list[str]:
        """What the plan says about the cache."""
        options = self.options
        return [
            f"{self.path} has {describe_bytes(self.num_bytes)}. Blocks of "
            f"{describe_bytes(BLOCK_BYTES)} are kept in {self.folder}, at most "
            f"{describe_bytes(options.max_bytes)} ({options.limit_reason}), and downloaded up to "
            f"{describe_bytes(options.ahead_bytes)} ahead.",
            *self.order_notes,
        ]


def open_remote(
    url: str,
    *,
    folder: str | os.PathLike[str] | None,
    max_bytes: int | None,
    ahead_bytes: int | None,
    timeout_s: float | None,
    verify: str,
) -> RemoteFolder:
    """Open a set in object storage for :class:`penstock.Packed`."""
    if verify == "full":
        raise BadArgument(
            "verify='full' would download the whole set; blocks of a remote set are always "
            "verified when they arrive",
            remedy="Packed(url) without verify=",
        )
    root = os.path.join(folder or cache_folder() / "remote", platform.node() or "local")
    root = os.path.abspath(root)
    reason = "as requested"
    if max_bytes is None:
        make_private(root)
        reason = "half of the free disk"
        max_bytes = max(shutil.disk_usage(root).free // 2, _MIN_BLOCKS * BLOCK_BYTES)
    if ahead_bytes is None:
        ahead_bytes = min(_AHEAD_BYTES, max_bytes // 2)
    check_count("cache_bytes", max_bytes)
    check_count("read_ahead_bytes", ahead_bytes)
    if max_bytes < _MIN_BLOCKS * BLOCK_BYTES:
        raise BadArgument(
            f"cache_bytes={max_bytes} is less than {_MIN_BLOCKS} blocks of {BLOCK_BYTES} bytes",
            remedy=f"cache_bytes={64 * BLOCK_BYTES}",
        )
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    if not timeout_s > 0:
        raise BadArgument(
            f"network_timeout_s={timeout_s!r} must be a positive number of seconds",
            remedy=f"network_timeout_s={TIMEOUT_S:g}",
        )
    return RemoteFolder(url, CacheOptions(root, max_bytes, ahead_bytes, float(timeout_s), reason))


def make_private(root: str) -> None:
    """Create the cache folder, readable by this user only.

    Raises:
        BadArgument: It exists and belongs to another user, who could change what is read.
    """
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
    except OSError as error:
        raise CannotWrite(
            f"the cache folder {root} cannot be created: {error.strerror or error}",
            remedy="Packed(..., cache_folder='/another/folder')",
            path=root,
        ) from None
    if hasattr(os, "getuid") and os.stat(root).st_uid != os.getuid():
        raise BadArgument(
            f"the cache folder {root} belongs to another user",
            remedy="Packed(..., cache_folder='/a/folder/of/yours')",
        )
