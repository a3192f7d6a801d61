"""Writes packed sets so that a crash never leaves a broken one.

    packing.json   first: the source's fingerprint, the schema, the samples per shard
    .part-*/       a shard while it is written
    image-00003.npy ...  its files, renamed when all of them are on the disk
    shard-00003.json     last file of a shard, which marks it as finished
    manifest.json  last of all; then packing.json and the shard records are deleted

Samples that take long are written in smaller pieces, which the caller joins to the same shards:

    piece-00003-00001/   the files of some samples of shard 3, and their record

A process that is killed at any point leaves finished shards and pieces, and possibly a ``.part-*``
folder. The next call continues from there. The caller provides the ``map`` that writes them:

    caller: pack_into(map=...)  -- map(write_piece, numbers) -->  workers, threads, a cluster
            shards, manifest    <-- one record per piece ------
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
from dataclasses import asdict, dataclass, replace
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
PART_PREFIX, PIECE_PREFIX = ".part-", "piece-"
_PIECE_RECORD = "record.json"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """The packing to do. This is the content of ``packing.json``.

    Args:
        shard_rows: Number of source samples per shard. Bad samples can make a shard shorter.
        form, fields, fingerprint, attributes: As in the manifest.
        strict_fingerprint: The fingerprint with ``on_error="raise"``. Shards of that packing have
            no bad samples, so this one can continue it.
        sample_bytes: Approximate size of a sample.
        sample_s: Approximate time to load and encode a sample.
        piece_rows: Number of source samples per piece. 0: each shard is one piece. It has no effect
            on the result.
    """

    num_samples: int
    shard_rows: int
    form: str
    fields: tuple[FieldSchema, ...]
    fingerprint: str
    attributes: dict[str, Any]
    sample_bytes: int
    sample_s: float = 0.0
    piece_rows: int = 0
    strict_fingerprint: str = ""

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.shard_rows)

    @property
    def shard_pieces(self) -> int:
        """The number of pieces of a full shard."""
        return -(-self.shard_rows // self.piece_rows) if self.piece_rows else 1

    def pieces(self, shard: int) -> list[int]:
        """Return the numbers of the pieces of a shard, in order."""
        first = shard * self.shard_pieces
        numbers = range(first, first + self.shard_pieces)
        return [number for number in numbers if self.indices(number)]

    def indices(self, piece: int) -> range:
        """Return the source samples of a piece."""
        shard, place = divmod(piece, self.shard_pieces)
        rows = self.piece_rows or self.shard_rows
        end = min((shard + 1) * self.shard_rows, self.num_samples)
        first = shard * self.shard_rows + place * rows
        return range(first, max(first, min(first + rows, end)))

    @classmethod
    def read(cls, path: str) -> PackSpec:
        """Read a journal. Raises BadStore if it is damaged, or of a newer version."""
        try:
            content = json.loads(read_text(path))
            check_version(content, path)
            del content["format"], content["version"]
            content["fields"] = tuple(read_schema(one) for one in content["fields"])
            spec = cls(**content)
            if type(spec.piece_rows) is not int or spec.piece_rows < 0:
                raise ValueError(f"piece_rows is {spec.piece_rows!r}")
            return spec
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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    max_kept: int | None = None,
) -> Manifest:
    """Write a packed set, or continue an unfinished one.

    Args:
        fetch: Yields the samples of a piece. Pickled to the processes of ``map``.
        on_progress: Called with the number of samples that are done and the total.
        max_kept: Number of shards on the disk at a time, if ``map`` moves finished ones away.

    Raises:
        AlreadyThere: The folder contains a finished set, an unfinished set of a different source,
            or other files.
        CannotWrite: No disk space, or no permission.
    """
    is_new = not os.path.exists(folder)
    with _explain_os_errors(folder):
        os.makedirs(folder, exist_ok=True)
        try:
            with packing_lock(folder):
                spec = _begin(folder, spec)
                return _write_rest(folder, spec, fetch, map, on_progress, max_kept)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(folder)
            raise


def _write_rest(
    folder: str, spec: PackSpec, fetch: Fetch, map: Map, on_progress: Any, max_kept: int | None
) -> Manifest:
    records = finished_shards(folder, spec)
    waiting = {
        shard: _unfinished_pieces(folder, spec, shard)
        for shard in range(spec.num_shards)
        if shard not in records
    }
    left = [number for numbers in waiting.values() for number in numbers]
    num_left = sum(len(spec.indices(number)) for number in left)
    num_kept = min(num_left, (max_kept or num_left) * spec.shard_rows)
    if spec.shard_pieces > 1 and waiting:  # pieces are removed after they were joined
        num_kept += min(spec.shard_rows, spec.num_samples)
    _check_free_space(folder, spec, num_left, num_kept)
    if not os.path.exists(os.path.join(folder, JOURNAL)):
        write_whole(folder, JOURNAL, to_json(spec))
    on_progress(spec.num_samples - num_left, spec.num_samples)
    for shard in [shard for shard, numbers in waiting.items() if not numbers]:
        records[shard] = _join_pieces(folder, spec, shard)  # stopped before it was joined
    write = functools.partial(write_piece, folder, spec, fetch)
    num_missing = len(left)
    for number, record in map(write, left) if left else ():
        shard = number // spec.shard_pieces
        if number not in waiting[shard]:
            continue  # a map that runs a number twice
        waiting[shard].remove(number)
        num_missing -= 1
        if spec.shard_pieces == 1:
            records[shard] = record
        elif not waiting[shard]:
            records[shard] = _join_pieces(folder, spec, shard)
        num_left -= len(spec.indices(number))
        on_progress(spec.num_samples - num_left, spec.num_samples)
    if num_missing:
        number = next(numbers[0] for numbers in waiting.values() if numbers)
        raise BadArgument(
            f"map= returned no result for number {number} ({num_missing} of {len(left)} results "
            "are missing)",
            remedy="map(function, numbers) must return function(number) for every number",
        )
    manifest = _make_manifest(spec, [records[number] for number in range(spec.num_shards)])
    write_whole(folder, MANIFEST, to_json(manifest))
    for name in sorted(os.listdir(folder)):
        if name.startswith("shard-") and name.endswith(".json"):
            os.unlink(os.path.join(folder, name))
    _clear(folder, PART_PREFIX, PIECE_PREFIX)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, JOURNAL))
    sync_folder(folder)
    return manifest


# -- shards and pieces ---------------------------------------------------------------------------


def write_piece(folder: str, spec: PackSpec, fetch: Fetch, number: int) -> tuple[int, Any]:
    """Write a piece, or a whole shard, and its record. Safe to call twice, even at the same time.

    Called in the processes of ``map``, usually workers.
    """
    shard = number // spec.shard_pieces
    with _explain_os_errors(folder), _part(folder, number) as part:
        record = _write_samples(part, spec, fetch, number)
        if spec.shard_pieces == 1:
            _finish_shard(folder, part, shard, record)
            return number, record
        write_whole(part, _PIECE_RECORD, json.dumps(record, sort_keys=True))
        finished = _piece_folder(folder, spec, number)
        if _is_unfinished(finished):  # otherwise another process has written the same piece
            shutil.rmtree(finished, ignore_errors=True)
            os.rename(part, finished)
        sync_folder(folder)
    return number, record


def _join_pieces(folder: str, spec: PackSpec, shard: int) -> dict[str, Any]:
    """Write a shard from its pieces, byte for byte as without pieces. Returns its record."""
    pieces = [_piece_folder(folder, spec, number) for number in spec.pieces(shard)]
    records = [_read_record(piece, _PIECE_RECORD) for piece in pieces]
    with _part(folder, shard) as part:
        rows = sum(record["rows"] for record in records)
        with contextlib.ExitStack() as stack:
            fields = [_FieldFiles(stack, part, schema, shard) for schema in spec.fields]
            for piece in pieces:
                for field in fields:
                    field.add_piece(piece)
            files = {field.schema.name: field.finish(rows) for field in fields}
        bad = [one for record in records for one in record["bad"]]
        record = {"rows": rows, "files": files, "bad": bad}
        _finish_shard(folder, part, shard, record)
    for piece in pieces:
        shutil.rmtree(piece, ignore_errors=True)
    return record


@contextlib.contextmanager
def _part(folder: str, number: int) -> Iterator[str]:
    """Create a folder for unfinished files. It is removed at the end if it still exists."""
    part = os.path.join(folder, f"{PART_PREFIX}{number:05d}-{secrets.token_hex(4)}")
    os.mkdir(part)
    try:
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _finish_shard(folder: str, part: str, shard: int, record: dict[str, Any]) -> None:
    for name in sorted(os.listdir(part)):
        os.replace(os.path.join(part, name), os.path.join(folder, name))
    sync_folder(folder)
    write_record(folder, shard, record)


def _piece_folder(folder: str, spec: PackSpec, number: int) -> str:
    shard, place = divmod(number, spec.shard_pieces)
    return os.path.join(folder, f"{PIECE_PREFIX}{shard:05d}-{place:05d}")


def _write_samples(part: str, spec: PackSpec, fetch: Fetch, number: int) -> dict[str, Any]:
    """Write the samples of a piece and return its record: row count, files, and bad samples."""
    rows, bad = 0, []
    with contextlib.ExitStack() as stack:
        shard = number // spec.shard_pieces
        fields = [_FieldFiles(stack, part, schema, shard) for schema in spec.fields]
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
        self._names = schema.file_names(shard)
        self._files = [
            stack.enter_context(_ArrayFile(os.path.join(folder, name))) for name in self._names
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

    def add_piece(self, folder: str) -> None:
        """Add the samples of a piece. Their offsets continue those of the pieces before."""
        for place, name in enumerate(self._names):
            with open(os.path.join(folder, name), "rb") as file:
                file.seek(HEADER_BYTES)
                if place == 1:
                    offsets = np.frombuffer(file.read(), "<i8")
                    self._files[1].write((offsets[1:] + self._num_items).tobytes())
                else:
                    shutil.copyfileobj(file, self._files[place], _BUFFER_BYTES)
        if self.schema.is_ragged:
            self._num_items += int(offsets[-1])

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


def _begin(folder: str, spec: PackSpec) -> PackSpec:
    """Start in an empty folder, or continue the same packing. Refuse anything else.

    Returns:
        The packing to do, with the pieces of the one that is continued.
    """
    found = set(os.listdir(folder))
    if JOURNAL in found:
        before = PackSpec.read(os.path.join(folder, JOURNAL))
        if before.fingerprint not in (spec.fingerprint, spec.strict_fingerprint):
            raise AlreadyThere(
                f"{folder} contains a different unfinished packing: {_difference(before, spec)}",
                remedy=f"repeat the earlier call to finish it, or remove {folder}",
                path=folder,
            )
        _clear(folder, PART_PREFIX)
        spec = replace(spec, piece_rows=before.piece_rows)
        if before.fingerprint != spec.fingerprint:
            write_whole(folder, JOURNAL, to_json(spec))
        return spec
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
    _clear(folder, PART_PREFIX)
    num_joined = spec.num_samples + spec.shard_rows
    has_room = num_joined * spec.sample_bytes <= shutil.disk_usage(folder).free
    return spec if has_room else replace(spec, piece_rows=0)


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


def write_record(folder: str, number: int, record: dict[str, Any]) -> None:
    """Mark a shard as finished. ``is_moved`` in the record: its files are in another place."""
    write_whole(folder, _record_name(number), json.dumps(record, sort_keys=True))


def finished_shards(folder: str, spec: PackSpec) -> dict[int, dict[str, Any]]:
    """Return the records of complete shards by number."""
    records = {}
    for number in range(spec.num_shards):
        with contextlib.suppress(Exception):  # missing or changed: the shard is packed again
            records[number] = _read_record(folder, _record_name(number))
    return records


def _unfinished_pieces(folder: str, spec: PackSpec, shard: int) -> list[int]:
    """Return the numbers of the pieces of a shard that are not complete."""
    if spec.shard_pieces == 1:
        return [shard]
    pieces = spec.pieces(shard)
    return [number for number in pieces if _is_unfinished(_piece_folder(folder, spec, number))]


def _is_unfinished(piece: str) -> bool:
    try:
        _read_record(piece, _PIECE_RECORD)
    except Exception:
        return True
    return False


def _read_record(folder: str, name: str) -> dict[str, Any]:
    """Read the record of a shard or a piece. Raises if it or one of its files is not complete."""
    record: dict[str, Any] = json.loads(read_text(os.path.join(folder, name)))
    is_moved = record.get("is_moved") is True
    for entry in read_shard(record).entries:
        if not is_moved and os.path.getsize(os.path.join(folder, entry.name)) != entry.bytes:
            raise BadStore(f"{entry.name} is not complete", path=folder)
    record["bad"] = [(operator.index(index), str(text)) for index, text in record["bad"]]
    return record


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


def _clear(folder: str, *prefixes: str) -> None:
    """Remove unfinished shards, files of killed processes, and pieces that are joined."""
    for name in os.listdir(folder):
        if name.startswith(prefixes):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def _check_free_space(folder: str, spec: PackSpec, num_left: int, num_kept: int) -> None:
    """Raise unless there is room for ``num_kept`` samples, which include copies."""
    needed = num_kept * spec.sample_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CannotWrite(
            f"packing {num_left} samples to {folder} needs about {_in_words(needed)}, but "
            f"{_in_words(free)} are free",
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
        is_ours = bool(getattr(error, "code", None))
        if is_ours or getattr(error, "sample_index", None) is not None:  # raised by a sample
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
