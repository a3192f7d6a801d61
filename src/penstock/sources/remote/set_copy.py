"""Copies a packed set between places, and uploads one while it is packed.

    packing.json     first: what is copied or packed, so that only the same one is continued
    pixels-00000.npy ...   the files, each verified with its checksum before it is written
    manifest.json    last, so that a reader finds a whole set or none; then packing.json is deleted

A copy that is killed continues with the files that are not there yet. Nothing is overwritten.
A set that is packed to an address is written to a folder of this machine, shard by shard. Each
shard is uploaded while the next ones are packed, then deleted here.

Tested by ``tests/integration/sources/remote/test_object_store.py``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import AlreadyThere, Damaged, StorageFailed
from penstock.machine.cache_folder import cache_folder
from penstock.sources.checksums import BLOCK_BYTES, block_checksums, file_checksum
from penstock.sources.manifest import JOURNAL, MANIFEST, FileEntry, Manifest, read_shard
from penstock.sources.packed_writer import Map, PackSpec, finished_shards, write_record
from penstock.sources.remote.address import check_url, refuse_single_slash, require_obstore
from penstock.sources.remote.object_store import FetchFailed, ObjectStore

_NUM_FILES = 4
"""Files copied at the same time. Each is in memory while it is copied."""
_MAX_WAITING = 8
"""Packed shards that wait for their upload. Packing waits for the upload beyond that."""
_RETRY_S = 60.0


def copy_set(
    source: str,
    target: str,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Copy a packed set, or continue a copy. Returns its manifest.

    Args:
        source, target: Folders, or addresses in object storage.
        on_file: Called with the number of files that are there, and of all files.

    Raises:
        AlreadyThere: The target holds a set, or an unfinished copy of another one.
        Damaged: A file of the source differs from what was packed.
        StorageFailed: A file could not be read or written.
    """
    with _explained():
        return _copy(_open(source), _open(target), on_file)


def refuse_set(target: str) -> None:
    """Raise AlreadyThere if there is a set at an address."""
    with _explained():
        _refuse_set(_open(target))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except FetchFailed as error:
        facts = error.facts
        raise StorageFailed(
            facts["what"], likely=facts["likely"] or None, remedy=facts["remedy"] or None
        ) from None


def upload_while_packing(target: str, spec: PackSpec, pack: Callable[..., Any], map: Map) -> None:
    """Pack a set to an address, or continue to do so.

    Args:
        pack: Called with a folder, the ``map`` that writes its shards, and the number of shards
            that are on the disk at a time.
    """
    # The same for each on_error, so that a packing that a bad sample stopped can go on.
    name = hashlib.sha256(f"{target} {spec.strict_fingerprint}".encode()).hexdigest()[:32]
    folder = os.path.join(cache_folder(), "packing", name)
    manifest = os.path.join(folder, MANIFEST)
    with _explained(), ThreadPoolExecutor(_NUM_FILES, "penstock-upload") as pool:
        uploads = _ShardUploads(folder, _open(target), spec, pool)
        try:
            if not os.path.exists(manifest):  # else all shards are there
                uploads.add_earlier()
                pack(folder, uploads.wrap(map), 2 * _MAX_WAITING)
            uploads.finish()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    shutil.rmtree(folder)


class _ShardUploads:
    """The uploads of one packing."""

    def __init__(
        self, folder: str, target: ObjectStore, spec: PackSpec, pool: ThreadPoolExecutor
    ) -> None:
        self._folder, self._target, self._spec, self._pool = folder, target, spec, pool
        self._source = _open(folder)
        self._running: set[Future[None]] = set()
        _begin(target, {"packing": spec.fingerprint}, {"packing": spec.strict_fingerprint})

    def add_earlier(self) -> None:
        """Upload the shards that an earlier try has packed but not uploaded."""
        for number, record in finished_shards(self._folder, self._spec).items():
            if not record.get("is_moved"):
                self._add(number, record)
        self._wait_for_all_but(0)

    def wrap(self, map: Map) -> Map:
        """Return a ``map`` that also uploads the shards that are written."""

        def run(function: Callable[[int], Any], numbers: Iterable[int]) -> Iterator[Any]:
            for number, record in map(function, numbers):
                self._add(number, record)
                yield number, record
            self._wait_for_all_but(0)

        return run

    def finish(self) -> None:
        self._target.write(MANIFEST, Path(self._folder, MANIFEST).read_bytes())
        self._target.delete(JOURNAL)

    def _add(self, number: int, record: dict[str, Any]) -> None:
        self._running.add(self._pool.submit(self._upload, number, record))
        self._wait_for_all_but(_MAX_WAITING)

    def _wait_for_all_but(self, most: int) -> None:
        while len(self._running) > most:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()

    def _upload(self, number: int, record: dict[str, Any]) -> None:
        entries = read_shard(record).entries
        for entry in entries:
            _copy_file(self._source, self._target, entry)
        write_record(self._folder, number, {**record, "is_moved": True})
        for entry in entries:
            for name in (entry.name, entry.blocks_name):
                Path(self._folder, name).unlink(missing_ok=True)


def _open(place: str) -> ObjectStore:
    if "://" not in place:
        refuse_single_slash(place)
        os.makedirs(place, exist_ok=True)
        place = Path(place).resolve().as_uri()
    place = check_url(place)
    require_obstore(place)
    return ObjectStore(place, _RETRY_S)


def _copy(
    source: ObjectStore, target: ObjectStore, on_file: Callable[[int, int], None]
) -> Manifest:
    content = source.read(MANIFEST)
    manifest = Manifest.from_json(content.decode("utf-8"), f"{source.url}/{MANIFEST}")
    _begin(target, {"copy of": hashlib.sha256(content).hexdigest()})
    entries = manifest.entries
    on_file(0, len(entries))
    with ThreadPoolExecutor(_NUM_FILES, "penstock-copy") as pool:
        copies = [pool.submit(_copy_file, source, target, entry) for entry in entries]
        try:
            for done, one in enumerate(as_completed(copies), start=1):
                one.result()
                on_file(done, len(entries))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    target.write(MANIFEST, content)
    target.delete(JOURNAL)
    return manifest


def _begin(target: ObjectStore, *contents: dict[str, str]) -> None:
    """Refuse a place that holds something else, and mark the copy as unfinished.

    Args:
        contents: The copy to do, and others that it can continue.
    """
    _refuse_set(target)
    journals = [json.dumps(content).encode() for content in contents]
    found = None if target.size_of(JOURNAL) is None else target.read(JOURNAL)
    if found is None or found in journals[1:]:
        target.write(JOURNAL, journals[0])
    elif found != journals[0]:
        raise AlreadyThere(
            f"{target.url} contains an unfinished copy of a different set",
            remedy="finish that copy, delete the files there, or copy to a different place",
            path=target.url,
        )


def _refuse_set(target: ObjectStore) -> None:
    if target.size_of(MANIFEST) is not None:
        raise AlreadyThere(
            f"{target.url} already contains a packed set, which is not overwritten",
            remedy=f"read it with penstock.Packed({target.url!r}), or copy to a different place",
            path=target.url,
        )


def _copy_file(source: ObjectStore, target: ObjectStore, entry: FileEntry) -> None:
    """Copy a file and its checksums, unless both are there."""
    units = None
    if entry.bytes > BLOCK_BYTES:
        units = source.read(entry.blocks_name)
        if target.size_of(entry.blocks_name) != len(units):
            target.write(entry.blocks_name, units)
    if target.size_of(entry.name) == entry.bytes:
        return
    content = source.read(entry.name)
    found = block_checksums(content)
    is_same = units is None or np.array_equal(np.load(io.BytesIO(units)), found)
    if len(content) != entry.bytes or file_checksum(found) != entry.check or not is_same:
        raise Damaged(
            f"{source.url}/{entry.name} differs from what was packed, so it is not copied",
            likely="bytes changed on the disk or during an earlier copy.",
            remedy="copy from another place, or pack again",
            path=source.url,
            file=entry.name,
        )
    target.write(entry.name, content)
