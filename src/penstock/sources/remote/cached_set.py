"""Files in object storage, open through the cache of blocks on this machine's disk.

The part that packed sets (:mod:`~penstock.sources.remote.remote_folder`) and other objects
(:mod:`~penstock.sources.remote.object_files`) have in common.

Tested by ``tests/integration/sources/remote/test_remote_sets.py``.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import BadArgument, CannotWrite
from penstock.machine.cache_folder import cache_folder
from penstock.options import check_count
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_layout import BLOCK_BYTES, BlockLayout, describe_bytes
from penstock.sources.remote.downloader_start import CacheOptions, DownloaderStarter
from penstock.sources.remote.object_list import ObjectList

TIMEOUT_S = 120.0
_AHEAD_BYTES = 1 << 30
_MIN_BLOCKS = 4


class CachedSet:
    """Files in object storage.

    Args:
        folder: The set's folder in the cache.
        objects: The list of files, if the set has no manifest.
    """

    draws_nothing = True

    def __init__(
        self,
        layout: BlockLayout,
        folder: str,
        options: CacheOptions,
        objects: ObjectList | None = None,
    ) -> None:
        self.path, self.layout = layout.where, layout
        self.folder, self.options = folder, options
        self.num_bytes = layout.num_bytes
        self.starter = DownloaderStarter(self.path, folder, options, objects)
        self.files = BlockFiles(layout, self.starter, options.timeout_s)
        self.order_notes: list[str] = []

    def blocks_of(
        self, dataset: Any, rows: np.ndarray
    ) -> Iterator[tuple[BlockFiles, np.ndarray, np.ndarray]]:
        """Yield (files, which row, block) for each block that samples of a dataset need."""
        raise NotImplementedError

    def follow(self, dataset: Any, *arguments: Any) -> None:
        """Publish the order of a loader's epoch. See :func:`follow_epoch`."""
        from penstock.sources.remote.epoch_follower import follow_epoch

        follow_epoch(dataset, *arguments)

    def count_network(self, since_ns: int | None = None) -> dict[str, Any]:
        """Return the counters of the cache. All programs that use it are counted together.

        Args:
            since_ns: Also list the downloads since this time, for the timeline.
        """
        found: dict[str, Any] = {"set_bytes": self.num_bytes, "limit_bytes": self.options.max_bytes}
        if since_ns is not None:
            found["downloads"] = self.files.downloads(since_ns)
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


def make_cache_options(
    cache_folder: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    read_ahead_bytes: int | None = None,
    network_timeout_s: float | None = None,
) -> CacheOptions:
    """Return the options of a cache, with the defaults of this machine.

    Raises:
        BadArgument: A value is invalid.
    """
    root = os.path.join(cache_folder or _default_folder(), platform.node() or "local")
    root = os.path.abspath(root)
    reason = "as requested"
    if cache_bytes is None:
        make_private(root)
        reason = "half of the free disk"
        cache_bytes = max(shutil.disk_usage(root).free // 2, _MIN_BLOCKS * BLOCK_BYTES)
    check_count("cache_bytes", cache_bytes)
    if read_ahead_bytes is None:
        read_ahead_bytes = min(_AHEAD_BYTES, cache_bytes // 2)
    check_count("read_ahead_bytes", read_ahead_bytes)
    if cache_bytes < _MIN_BLOCKS * BLOCK_BYTES:
        raise BadArgument(
            f"cache_bytes={cache_bytes} is too small. The cache needs at least "
            f"{_MIN_BLOCKS * BLOCK_BYTES} bytes ({describe_bytes(_MIN_BLOCKS * BLOCK_BYTES)})",
            remedy=f"cache_bytes={64 * BLOCK_BYTES}",
        )
    timeout_s = TIMEOUT_S if network_timeout_s is None else network_timeout_s
    if not timeout_s > 0:
        raise BadArgument(
            f"network_timeout_s={timeout_s!r} must be a positive number of seconds",
            remedy=f"network_timeout_s={TIMEOUT_S:g}",
        )
    return CacheOptions(root, cache_bytes, read_ahead_bytes, float(timeout_s), reason)


def _default_folder() -> str:
    return os.path.join(cache_folder(), "remote")


def make_private(root: str) -> None:
    """Create the cache folder, readable by this user only.

    Raises:
        BadArgument: It exists and belongs to another user, who could change what is read.
        CannotWrite: It cannot be created or written.
    """
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it is not writable")
    except OSError as error:
        raise CannotWrite(
            f"the cache folder {root} cannot be used: {error.strerror or error}",
            remedy="Packed(..., cache_folder='/another/folder')",
            path=root,
        ) from None
    if hasattr(os, "getuid") and os.stat(root).st_uid != os.getuid():
        raise BadArgument(
            f"the cache folder {root} belongs to another user",
            remedy="Packed(..., cache_folder='/a/folder/of/yours')",
        )
