"""Writes packed sets so that a crash never leaves a broken one.

    packing.json   first: the source's fingerprint, the schema, the samples per shard
    .part-*/       a shard while it is written
    image-00003.npy ...  its files, renamed when all of them are on the disk
    shard-00003.json     last file of a shard, which marks it as finished
    manifest.json  last of all; then packing.json and the shard records are deleted

A process that is killed at any point leaves finished shards and possibly a ``.part-*`` folder. The
next call continues from there. The caller provides the ``map`` that writes the shards:

    caller: pack_into(map=...)  -- map(write_shard, numbers) -->  workers, threads, a cluster
            manifest            <-- one record per shard ------
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import mmap
import operator
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.errors import AlreadyThere, BadArgument, BadStore, CannotPack, CannotWrite
from penstock.sources.array_files import HEADER_BYTES, make_header
from penstock.sources.checksums import BLOCK_BYTES, block_checksums, file_checksum
from penstock.sources.file_locks import PACKING_LOCK, packing_lock
from penstock.sources.manifest import (
    JOURNAL,
    MANIFEST,
    FieldSchema,
    FileEntry,
    Manifest,
    check_version,
    read_schema,
    read_shard,
    to_json,
)

Map = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
Fetch = Callable[[range], Iterator[tuple[int, Any]]]
"""For the indices of a shard: (index, list of encoded arrays), or (index, error text)."""
PART_PREFIX = ".part-"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """The packing to do. This is the content of ``packing.json``.

    Args:
        shard_rows: Number of source samples per shard. Bad samples can make a shard shorter.
        form, fields, fingerprint, attributes: As in the manifest.
        sample_bytes: Approximate size of a sample.
    """

    num_samples: int
    shard_rows: int
    form: str
    fields: tuple[FieldSchema, ...]
    fingerprint: str
    attributes: dict[str, Any]
    sample_bytes: int

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.shard_rows)

    def indices(self, shard: int) -> range:
        first = shard * self.shard_rows
        return range(first, min(first + self.shard_rows, self.num_samples))

    @classmethod
    def read(cls, path: str) -> PackSpec:
        """Read a journal. Raises BadStore if it is damaged, or of a newer version."""
        try:
            content = json.loads(read_text(path))
            check_version(content, path)
            del content["format"], content["version"]
            content["fields"] = tuple(read_schema(one) for one in content["fields"])
            return cls(**content)
        except BadStore:
            raise
        except Exception as error:
            raise BadStore(
                f"{path} is damaged: {error}",
                remedy=f"remove {os.path.dirname(path)} and pack again",
                path=path,
            ) from None


def make_fingerprint(*parts: Any) -> str:
    """Return a hash of a source and its options. Equal inputs produce the same packed set.

    Example:
        >>> make_fingerprint("a", 1) == make_fingerprint("a", 1) != make_fingerprint("a", 2)
        True
    """
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode("utf-8", "replace")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]


def pack_into(
    folder: str,
    spec: PackSpec,
    fetch: Fetch,
    *,
    map: Map,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Write a packed set, or continue an unfinished one.

    Args:
        fetch: Yields the samples of a shard. Pickled to the processes of ``map``.
        on_shard: Called with the number of finished shards and the total.

    Raises:
        AlreadyThere: The folder contains a finished set, an unfinished set of a different source,
            or other files.
        CannotWrite: No disk space, or no permission.
    """
    with _explain_os_errors(folder):
        os.makedirs(folder, exist_ok=True)
        with packing_lock(folder):
            _begin(folder, spec)
            return _write_rest(folder, spec, fetch, map, on_shard)


def _write_rest(folder: str, spec: PackSpec, fetch: Fetch, map: Map, on_shard: Any) -> Manifest:
    records = _finished_shards(folder, spec)
    left = [number for number in range(spec.num_shards) if number not in records]
    _check_free_space(folder, spec, len(left))
    on_shard(len(records), spec.num_shards)
    write = functools.partial(write_shard, folder, spec, fetch)
    for number, record in map(write, left) if left else ():
        records[number] = record
        on_shard(len(records), spec.num_shards)
    missing = [number for number in left if number not in records]
    if missing:
        raise BadArgument(
            f"map= returned no result for shard {missing[0]} ({len(missing)} of "
            f"{spec.num_shards} shards are missing)",
            remedy="map(function, numbers) must return function(number) for every number",
        )
    manifest = _make_manifest(spec, [records[number] for number in range(spec.num_shards)])
    write_whole(folder, MANIFEST, to_json(manifest))
    for name in sorted(os.listdir(folder)):
        if name.startswith("shard-") and name.endswith(".json"):
            os.unlink(os.path.join(folder, name))
    _clear_parts(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, JOURNAL))
    sync_folder(folder)
    return manifest


# -- one shard -----------------------------------------------------------------------------------


def write_shard(folder: str, spec: PackSpec, fetch: Fetch, number: int) -> tuple[int, Any]:
    """Write one shard and its record. Safe to call twice, even at the same time.

    Called in the processes of ``map``, usually workers.
    """
    with _explain_os_errors(folder):
        part = os.path.join(folder, f"{PART_PREFIX}{number:05d}-{secrets.token_hex(4)}")
        os.mkdir(part)
        try:
            record = _write_samples(part, spec, fetch, number)
            for name in sorted(os.listdir(part)):
                os.replace(os.path.join(part, name), os.path.join(folder, name))
        finally:
            shutil.rmtree(part, ignore_errors=True)
        sync_folder(folder)
        write_whole(folder, _record_name(number), json.dumps(record, sort_keys=True))
    return number, record


def _write_samples(part: str, spec: PackSpec, fetch: Fetch, number: int) -> dict[str, Any]:
    """Write the samples of a shard and return its record: row count, files, and bad samples."""
    rows, bad = 0, []
    with contextlib.ExitStack() as stack:
        fields = [_FieldFiles(stack, part, schema, number) for schema in spec.fields]
        for index, found in fetch(spec.indices(number)):
            if isinstance(found, str):
                bad.append((index, found))
                continue
            for field, value in zip(fields, found, strict=True):
                field.add(value)
            rows += 1
        files = {field.schema.name: field.finish(rows) for field in fields}
    return {"rows": rows, "files": files, "bad": bad}


class _FieldFiles:
    """The files of one field in a shard: rows, or items with offsets and possibly shapes."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: str, schema: FieldSchema, shard: int
    ) -> None:
        self.schema = schema
        self._files = [
            stack.enter_context(_ArrayFile(os.path.join(folder, name)))
            for name in schema.file_names(shard)
        ]
        self._num_items = 0
        if schema.is_ragged:
            self._files[1].add_whole(0)

    def add(self, value: np.ndarray) -> None:
        if value.size:
            self._files[0].write(np.ascontiguousarray(value).reshape(-1).data)
        if self.schema.is_ragged:
            self._num_items += value.size
            self._files[1].add_whole(self._num_items)
        if self.schema.has_shapes:
            self._files[2].add_whole(*value.shape)

    def finish(self, rows: int) -> list[dict[str, Any]]:
        """Write headers and checksums, and wait until everything is on disk."""
        schema, whole = self.schema, np.dtype("<i8")
        forms: list[tuple[np.dtype[Any], tuple[int, ...]]]
        if schema.shape is not None:
            forms = [(schema.stored, (rows, *schema.shape))]
        else:
            forms = [(schema.stored, (self._num_items,)), (whole, (rows + 1,))]
            forms += [(whole, (rows, schema.ndim))] if schema.has_shapes else []
        return [file.finish(*form) for file, form in zip(self._files, forms, strict=True)]


class _ArrayFile:
    """A ``.npy`` file that is appended to. Its header is written when its length is known."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "w+b", buffering=_BUFFER_BYTES)  # noqa: SIM115
        self._file.write(bytes(HEADER_BYTES))
        self.write = self._file.write

    def __enter__(self) -> _ArrayFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add_whole(self, *numbers: int) -> None:
        self.write(np.array(numbers, "<i8").tobytes())

    def finish(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> dict[str, Any]:
        file = self._file
        file.flush()
        file.seek(0)
        file.write(make_header(dtype, shape))
        _sync_file(file)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            num_bytes, blocks = len(content), block_checksums(content)
        folder, name = os.path.split(self._path)
        entry = FileEntry(name=name, bytes=num_bytes, check=file_checksum(blocks))
        if num_bytes > BLOCK_BYTES:
            with open(os.path.join(folder, entry.blocks_name), "wb") as other:
                other.write(make_header(blocks.dtype, blocks.shape) + blocks.tobytes())
                _sync_file(other)
        return asdict(entry)


# -- the folder ----------------------------------------------------------------------------------


def refuse_finished(folder: str) -> None:
    """Raise if ``folder`` contains a finished set. Cheap, so call it before loading anything.

    Raises:
        AlreadyThere: The folder contains a finished set.
    """
    manifest, journal = (os.path.join(folder, name) for name in (MANIFEST, JOURNAL))
    if os.path.exists(manifest) and not os.path.exists(journal):
        if os.path.exists(os.path.join(folder, PACKING_LOCK)):
            # Left by a packing that was killed at its end. Taking the lock removes it.
            with contextlib.suppress(AlreadyThere, OSError), packing_lock(folder):
                pass
        raise AlreadyThere(
            f"{folder} already contains a packed set, which is not overwritten",
            remedy=f"read it with penstock.Packed({folder!r}), or pack to a different folder",
            path=folder,
        )


def _begin(folder: str, spec: PackSpec) -> None:
    """Start in an empty folder, or continue the same packing. Refuse anything else."""
    found = set(os.listdir(folder))
    if JOURNAL in found:
        before = PackSpec.read(os.path.join(folder, JOURNAL))
        if before.fingerprint != spec.fingerprint:
            raise AlreadyThere(
                f"{folder} contains a different unfinished packing: {_difference(before, spec)}",
                remedy=f"repeat the earlier call to finish it, or remove {folder}",
                path=folder,
            )
        _clear_parts(folder)
        return
    refuse_finished(folder)
    # A packing that was killed while writing its first file leaves only a part of that file.
    others = sorted(
        name
        for name in found - {PACKING_LOCK}
        if not (name.startswith(PART_PREFIX) and name.endswith(f"-{JOURNAL}"))
    )
    if others:
        raise AlreadyThere(
            f"{folder} is not empty: it contains {others[0]!r}",
            remedy="pack to an empty folder",
            path=folder,
        )
    _clear_parts(folder)
    write_whole(folder, JOURNAL, to_json(spec))


def _difference(before: PackSpec, now: PackSpec) -> str:
    """Describe how two packings differ, as far as the journal shows."""
    if before.num_samples != now.num_samples:
        return f"it has {before.num_samples} samples, not {now.num_samples}"
    names = [[schema.name for schema in spec.fields] for spec in (before, now)]
    if names[0] != names[1]:
        return f"it has the fields {names[0]}, not {names[1]}"
    for old, new in zip(before.fields, now.fields, strict=True):
        if old != new:
            return f"field {old.name!r} was {old.kind} of {old.dtype}, shape {old.shape}"
    return "the dataset's class or module, fields=, on_error=, seed= or shard_bytes= differ"


def _record_name(number: int) -> str:
    return f"shard-{number:05d}.json"


def _finished_shards(folder: str, spec: PackSpec) -> dict[int, dict[str, Any]]:
    """Return the records of complete shards by number."""
    records = {}
    for number in range(spec.num_shards):
        try:
            record = json.loads(read_text(os.path.join(folder, _record_name(number))))
            entries = read_shard(record).entries
            sizes = [os.path.getsize(os.path.join(folder, entry.name)) for entry in entries]
            record["bad"] = [(operator.index(index), str(text)) for index, text in record["bad"]]
        except Exception:  # missing or changed: the shard is packed again
            continue
        if sizes == [entry.bytes for entry in entries]:
            records[number] = record
    return records


def _make_manifest(spec: PackSpec, records: list[dict[str, Any]]) -> Manifest:
    shards = tuple(read_shard(record) for record in records)
    bad = tuple((index, text) for record in records for index, text in record["bad"])
    num_samples = sum(shard.rows for shard in shards)
    if not num_samples:
        raise CannotPack(
            f"all {spec.num_samples} samples are bad"
            if spec.num_samples
            else "there are no samples",
            where=f"sample {bad[0][0]}: {bad[0][1]}" if bad else None,
        )
    return Manifest(
        num_samples=num_samples,
        form=spec.form,
        fields=spec.fields,
        shards=shards,
        fingerprint=spec.fingerprint,
        attributes=spec.attributes,
        bad=bad,
    )


def _clear_parts(folder: str) -> None:
    """Remove unfinished shards and files of killed processes."""
    for name in os.listdir(folder):
        if name.startswith(PART_PREFIX):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def _check_free_space(folder: str, spec: PackSpec, num_shards: int) -> None:
    needed = num_shards * spec.shard_rows * spec.sample_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CannotWrite(
            f"packing to {folder} needs about {_in_words(needed)}, but {_in_words(free)} are free",
            likely=f"{spec.num_samples} samples of about {spec.sample_bytes} bytes.",
            remedy="a different disk, or smaller data: a Field with dtype, longer_side or quality",
            path=folder,
        )


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def _explain_os_errors(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if getattr(error, "code", None):  # one of our errors, from here or from the source
            raise
        is_full = error.errno in _FULL
        again = "repeat the call (finished shards are kept)"
        raise CannotWrite(
            f"{folder or repr(folder)} cannot be written: {error.strerror or error}",
            where=str(error.filename) if error.filename else None,
            likely="the disk is full." if is_full else None,
            remedy=f"free some space, then {again}"
            if is_full
            else f"use a folder with write permission, or repair this one, then {again}",
            path=folder,
        ) from error


# -- small files ---------------------------------------------------------------------------------


def write_whole(folder: str, name: str, text: str) -> None:
    """Write a small file atomically."""
    path = os.path.join(folder, f"{PART_PREFIX}{secrets.token_hex(4)}-{name}")
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            _sync_file(file)
        os.replace(path, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    sync_folder(folder)


def _sync_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str) -> None:
    """Write the file names of a folder to disk, if the system supports it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
