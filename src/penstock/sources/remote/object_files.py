"""Objects of other formats (tars, Parquet) in object storage, read through the cache of blocks.

The counterpart of :class:`~penstock.sources.source_files.SourceFiles`. An object is known by its
size and ETag. One that is replaced while a dataset is open is an error that names it, or is not
noticed because all its blocks are in the cache: a sample never comes from two versions.

Indexes (of tars) and footers (of Parquet files) are kept in the cache, by address, size and ETag.

Tested by ``tests/integration/sources/remote/test_remote_objects.py``.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import BadArgument, BadStore
from penstock.sources.remote.address import check_url, require_obstore
from penstock.sources.remote.block_files import BlockFiles
from penstock.sources.remote.block_layout import BLOCK_BYTES, BlockLayout, blocks_between
from penstock.sources.remote.cached_set import CachedSet, make_cache_options, make_private
from penstock.sources.remote.downloader_start import CacheOptions, look_up_objects
from penstock.sources.remote.object_list import (
    ObjectEntry,
    ObjectList,
    is_pattern,
    split_addresses,
)
from penstock.sources.source_files import FileStamp

READABLE = ("packed", "tar", "parquet")
"""Formats that can be read from object storage."""
INDEXES = "indexes"
_NUM_AHEAD = 32
"""Blocks requested ahead while objects are indexed."""


class ObjectFiles(CachedSet):
    """The objects of a dataset. Has the methods of ``SourceFiles``. Pickled without handles.

    Args:
        url: The folder that they have in common.
        open_file: Opens an object, given this and its number. A function of a module.
    """

    def __init__(
        self,
        url: str,
        objects: ObjectList,
        options: CacheOptions,
        open_file: Callable[[ObjectFiles, int], Any] | None = None,
    ) -> None:
        folder = objects.store(options.root, url)
        super().__init__(BlockLayout(objects, url), folder, options, objects)
        self.objects = objects
        self.open_file = open_file
        self.paths = [f"{url}/{one.name}" for one in objects.entries]
        self.stamps = [FileStamp(one.bytes, one.etag) for one in objects.entries]
        self._handles: tuple[int, dict[int, Any]] = (os.getpid(), {})
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self.paths)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectFiles, (self.path, self.objects, self.options, self.open_file)

    def index_path(self, file: int) -> str:
        """Return where the index of an object is kept."""
        stamp, path = self.stamps[file], self.paths[file]
        name = hashlib.sha256(f"{path}\n{stamp.size}\n{stamp.version}".encode()).hexdigest()[:32]
        return os.path.join(self.options.root, INDEXES, name)

    # -- reading ---------------------------------------------------------------------------------

    def handle(self, file: int) -> Any:
        """Return the opened object with this number. A forked process opens its own."""
        with self._mutex:
            if self._handles[0] != os.getpid():
                self._handles = os.getpid(), {}
            found = self._handles[1].get(file)
            if found is None:
                assert self.open_file is not None
                found = self._handles[1][file] = self.open_file(self, file)
            return found

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        """Return bytes of an object. Waits for its blocks."""
        end = min(offset + num_bytes, self.stamps[file].size)
        if offset >= end:
            return b""
        first = int(self.layout.first_blocks[file])
        numbers = range(offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1)
        if len(numbers) > 1:
            self.files.request(first + np.asarray(numbers))
        pieces = [
            self.files.block(first + one)[
                max(0, offset - one * BLOCK_BYTES) : end - one * BLOCK_BYTES
            ]
            for one in numbers
        ]
        return b"".join(piece.tobytes() for piece in pieces)

    def read_parts(self, file: int, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return several parts of an object, given as offsets and numbers of bytes."""
        return [self.read(file, *part) for part in parts]

    def request(self, file: int, parts: Sequence[tuple[int, int]]) -> None:
        """Ask for parts of an object, given as their first and last bytes, without waiting."""
        starts, ends = np.array(parts, np.int64).reshape(-1, 2).T
        blocks, _ = blocks_between(starts, ends)
        self.files.request(int(self.layout.first_blocks[file]) + np.unique(blocks))

    def read_in_order(self, files: Sequence[int]) -> Callable[[int, int, int], bytes]:
        """Return a function like :meth:`read` for objects that are read from start to end.

        The blocks that come next, also those of the next objects, are requested ahead.
        """
        ranges = [np.arange(*self.layout.first_blocks[one : one + 2]) for one in files]
        blocks = np.concatenate([np.empty(0, np.int64), *ranges])
        places = dict(zip(blocks.tolist(), range(len(blocks)), strict=True))
        most = max(2, min(_NUM_AHEAD, self.options.max_bytes // BLOCK_BYTES // 2))
        last = -1

        def read(file: int, offset: int, num_bytes: int) -> bytes:
            nonlocal last
            block = int(self.layout.first_blocks[file]) + offset // BLOCK_BYTES
            place = places.get(block, last)
            if place > last:
                # Files larger than a block are skipped over. Then nothing is known ahead.
                is_next = place == last + 1
                self.files.request(blocks[place : place + (most if is_next else 1)])
                last = place
            return self.read(file, offset, num_bytes)

        return read

    # Objects do not change: another ETag is noticed when a block is fetched.

    def check(self, file: int) -> None:
        pass

    check_soon = check

    def check_all(self) -> None:
        pass

    # -- order -----------------------------------------------------------------------------------

    def blocks_of(
        self, dataset: Any, rows: np.ndarray
    ) -> Iterator[tuple[BlockFiles, np.ndarray, np.ndarray]]:
        files, starts, ends, owners = dataset.find_extents(rows)
        blocks, parts = blocks_between(starts, ends)
        yield self.files, owners[parts], blocks + self.layout.first_blocks[files[parts]]


class ObjectReader(io.RawIOBase):
    """An object as a file of Python, for libraries."""

    def __init__(self, files: ObjectFiles, file: int) -> None:
        super().__init__()
        self._files, self._file, self._at = files, file, 0
        self._size = files.stamps[file].size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        found = self._files.read(
            self._file, self._at, left if size is None or size < 0 else min(size, left)
        )
        self._at += len(found)
        return found


# -- opening -------------------------------------------------------------------------------------


def open_objects(
    named: Sequence[str],
    format: str | None,
    endings: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
) -> tuple[str, list[str] | ObjectFiles]:
    """Return the format of addresses, and what its reader is called with.

    Args:
        named: Objects, patterns and folders.
        endings: Endings of files, by format.
        options: Those of the cache, as in :class:`penstock.Packed`.

    Raises:
        BadStore: There is no such object, or the format is not recognised.
        StorageFailed: The storage cannot be read.
    """
    for one in named:
        require_obstore(check_url(one))
    named = [f"{one.partition(':')[0].lower()}:{one.partition(':')[2]}" for one in named]
    if format == "packed":
        return format, list(named)
    every = tuple(ending for some in endings.values() for ending in some)
    addresses = [one if _is_object(one, every) else f"{one.rstrip('/')}/" for one in named]
    split = split_addresses(addresses)
    if split is None:
        raise BadArgument(
            f"{named[0]} and {named[-1]} are not in one bucket or on one host",
            remedy="torch.utils.data.ConcatDataset([penstock.open_dataset(one) for one in paths])",
        )
    url, names = split
    cache = make_cache_options(**options)
    make_private(cache.root)
    listed = look_up_objects(url, names, cache)
    found = {}
    for address, some in zip(addresses, listed, strict=True):
        if not some:
            raise BadStore(
                f"{address} does not exist" if some is None else f"{address} has no objects",
                likely="the address is wrong, or the objects are in folders below it.",
                remedy=f"penstock doctor {url}",
                path=address,
            )
        found.update({one.name: one for one in some})
    wanted = {name: some for name, some in endings.items() if some and format in (None, name)}
    return _recognise(url, names, list(found.values()), format, wanted, cache)


def _is_object(address: str, endings: tuple[str, ...]) -> bool:
    """Return True for an object or a pattern, False for a folder."""
    last = address.rpartition("/")[2]
    return is_pattern(last) or last.lower().endswith(endings)


def _recognise(
    url: str,
    names: list[str],
    found: list[ObjectEntry],
    format: str | None,
    endings: Mapping[str, tuple[str, ...]],
    cache: CacheOptions,
) -> tuple[str, list[str] | ObjectFiles]:
    if format is None and any(one.name == "manifest.json" for one in found) and names == [""]:
        return "packed", [url]
    shown = [one for one in found if not one.name.rpartition("/")[2].startswith((".", "_"))]
    kinds = {
        name: [one for one in shown if one.name.lower().endswith(some)]
        for name, some in endings.items()
    }
    kinds = {name: some for name, some in kinds.items() if some}
    if len(kinds) == 1 and set(kinds) <= set(READABLE):
        ((name, chosen),) = kinds.items()
        return name, ObjectFiles(url, ObjectList(tuple(chosen)), cache)
    if format is not None and format in READABLE and not kinds and names != [""]:
        return format, ObjectFiles(url, ObjectList(tuple(found)), cache)
    counts = ", ".join(f"{len(some)} of {name!r}" for name, some in kinds.items())
    raise BadStore(
        f"{url} has objects of these formats: {counts}"
        if counts
        else f"the format of {url} is not recognised",
        likely=f"in object storage, {', '.join(READABLE)} are read.",
        remedy="open_dataset(address, format='tar'), or penstock pack SOURCE ADDRESS for other "
        "formats",
        path=url,
    )
