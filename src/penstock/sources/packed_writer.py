"""How does a set get onto the disk so that no crash leaves half of it?

    packing.json   first: the source's fingerprint, the schema, how many samples a shard has
    .part-*/       a shard while it is written
    image-00003.npy ...  its files, renamed when all of them are on the disk
    shard-00003.json     last of the shard: from now on it is finished
    manifest.json  last of all; then packing.json and the shards' records go

Whoever is killed, at any moment, leaves finished shards and perhaps a ``.part-*``, and the next
call goes on from there. Shards are written by a ``map`` that the caller brings:

    caller: pack_into(map=...)  -- map(write_shard, numbers) -->  workers, threads, a cluster
            manifest            <-- one record per shard ------
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from penstock.errors import AlreadyThere, BadArgument, BadStore, CannotPack, CannotWrite
from penstock.sources.locks import LOCK, locked
from penstock.sources.manifest import (
    JOURNAL,
    MANIFEST,
    MARK,
    VERSION,
    FieldSchema,
    Manifest,
    check_version,
    read_schema,
    read_shard,
)
from penstock.sources.shard_files import Fetch, ShardFiles, write_samples

Map = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
PART_PREFIX = ".part-"
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be packed, as far as the disk is concerned.

    Args:
        shard_rows: Samples of the source in a shard; bad ones may make it shorter.
        form, fields, fingerprint, attributes: As in the manifest.
        sample_bytes: About how much one takes.
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

    def to_json(self) -> str:
        content = {"format": MARK, "version": VERSION, **asdict(self)}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, path: str) -> Job:
        try:
            content = json.loads(text)
            check_version(content, path)
            values = {key: value for key, value in content.items() if key not in _OUTER}
            values["fields"] = tuple(read_schema(one) for one in values["fields"])
            return cls(**values)
        except BadStore:
            raise
        except Exception as error:
            raise BadStore(
                f"{path} is damaged: {error}",
                remedy=f"remove {os.path.dirname(path)}, and pack again",
                path=path,
            ) from None


_OUTER = ("format", "version")


def make_fingerprint(*parts: Any) -> str:
    """What two sources and their options must share to be one and the same.

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
    job: Job,
    fetch: Fetch,
    *,
    map: Map,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Write a set, or what is left of it to write.

    Args:
        fetch: Gives the samples of a shard; travels to whoever ``map`` sends it to.
        on_shard: Told how many shards of how many are finished.

    Raises:
        AlreadyThere: A finished set, another source's unfinished one, or anything else is there.
        CannotWrite: No room, no right.
    """
    with _naming_trouble(folder), locked(_prepared(folder)):
        _begin(folder, job)
        return _go_on(folder, job, fetch, map, on_shard)


def _go_on(folder: str, job: Job, fetch: Fetch, map: Map, on_shard: Any) -> Manifest:
    records = dict(_finished(folder, job))
    left = [number for number in range(job.num_shards) if number not in records]
    _check_room(folder, job, len(left))
    on_shard(len(records), job.num_shards)
    write = functools.partial(write_shard, folder, job, fetch)
    for number, record in map(write, left) if left else ():
        records[number] = record
        on_shard(len(records), job.num_shards)
    missing = [number for number in range(job.num_shards) if number not in records]
    if missing:
        raise BadArgument(
            f"map= gave no result for shard {missing[0]}, and for {len(missing)} of "
            f"{job.num_shards} in all",
            remedy="map(function, numbers) must return function(number) for each of the numbers",
        )
    manifest = _manifest_of(job, [records[number] for number in range(job.num_shards)])
    write_whole(folder, MANIFEST, manifest.to_json())
    _tidy(folder)
    return manifest


def write_shard(folder: str, job: Job, fetch: Fetch, number: int) -> tuple[int, dict[str, Any]]:
    """One shard, from its samples to its record. Safe to call twice, even at once.

    Called from: whoever ``map`` chose; a worker process, most often.
    """
    with _naming_trouble(folder):
        part = os.path.join(folder, f"{PART_PREFIX}{number:05d}-{secrets.token_hex(4)}")
        os.mkdir(part)
        try:
            files = ShardFiles(part, job.fields, number)
            with contextlib.closing(files):
                rows, bad = write_samples(files, fetch, job.indices(number))
                entries = files.finish(rows)
            for name in sorted(os.listdir(part)):
                os.replace(os.path.join(part, name), os.path.join(folder, name))
        finally:
            shutil.rmtree(part, ignore_errors=True)
        sync_folder(folder)
        record = {
            "rows": rows,
            "files": {name: [asdict(one) for one in some] for name, some in entries.items()},
            "bad": bad,
        }
        write_whole(folder, _record_name(number), json.dumps(record, sort_keys=True))
    return number, record


# -- the folder ----------------------------------------------------------------------------------


def _prepared(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return folder


def refuse_finished(folder: str) -> None:
    """Is there a whole set? Cheap: to be asked before anything is loaded.

    Raises:
        AlreadyThere: There is.
    """
    manifest, journal = (os.path.join(folder, name) for name in (MANIFEST, JOURNAL))
    if os.path.exists(manifest) and not os.path.exists(journal):
        raise AlreadyThere(
            f"{folder} has a packed set already; it is not overwritten",
            remedy=f"penstock.Packed({folder!r}) reads it; pack elsewhere for another",
            path=folder,
        )


def _begin(folder: str, job: Job) -> None:
    """Look at what is there: nothing, the beginning of the same, or something to be left alone."""
    found = set(os.listdir(folder))
    journal = os.path.join(folder, JOURNAL)
    if JOURNAL in found:
        before = Job.from_json(read_text(journal), journal)
        if before.fingerprint != job.fingerprint:
            raise AlreadyThere(
                f"{folder} has the beginning of another packing: {_difference(before, job)}",
                remedy=f"the same call as before to end it, or remove {folder}",
                path=folder,
            )
        _clear_parts(folder)
        return
    refuse_finished(folder)
    # Killed while it wrote its very first file, a packing leaves nothing but that part of it.
    others = sorted(name for name in found - {LOCK} if not _is_first_part(name))
    if others:
        raise AlreadyThere(
            f"{folder} is not empty: it has {others[0]!r}",
            remedy="pack to a folder of its own",
            path=folder,
        )
    _clear_parts(folder)
    write_whole(folder, JOURNAL, job.to_json())


def _difference(before: Job, now: Job) -> str:
    """What keeps two packings apart, as far as the journal tells."""
    if before.num_samples != now.num_samples:
        return f"of {before.num_samples} samples, not {now.num_samples}"
    names = [[schema.name for schema in job.fields] for job in (before, now)]
    if names[0] != names[1]:
        return f"of the fields {names[0]}, not {names[1]}"
    for old, new in zip(before.fields, now.fields, strict=True):
        if old != new:
            return f"field {old.name!r} was {old.kind} of {old.dtype}, shape {old.shape}"
    return "the dataset's class or module, fields=, on_error=, seed= or shard_bytes= differ"


def _is_first_part(name: str) -> bool:
    return name.startswith(PART_PREFIX) and name.endswith(f"-{JOURNAL}")


def _record_name(number: int) -> str:
    return f"shard-{number:05d}.json"


def _finished(folder: str, job: Job) -> Iterator[tuple[int, dict[str, Any]]]:
    for number in range(job.num_shards):
        try:
            record = json.loads(read_text(os.path.join(folder, _record_name(number))))
            shard = read_shard(record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        entries = [entry for some in shard.files.values() for entry in some]
        if all(_has_size(os.path.join(folder, one.name), one.bytes) for one in entries):
            yield number, record


def _has_size(path: str, num_bytes: int) -> bool:
    try:
        return os.path.getsize(path) == num_bytes
    except OSError:
        return False


def _manifest_of(job: Job, records: list[dict[str, Any]]) -> Manifest:
    shards = [read_shard(record) for record in records]
    bad = [(index, text) for record in records for index, text in record["bad"]]
    num_samples = sum(shard.rows for shard in shards)
    if not num_samples:
        raise CannotPack(
            f"all {job.num_samples} samples are bad" if job.num_samples else "there is no sample",
            where=f"sample {bad[0][0]}: {bad[0][1]}" if bad else None,
        )
    return Manifest(
        num_samples=num_samples,
        form=job.form,
        fields=job.fields,
        shards=tuple(shards),
        fingerprint=job.fingerprint,
        attributes=job.attributes,
        bad=tuple(bad),
    )


def _tidy(folder: str) -> None:
    for name in sorted(os.listdir(folder)):
        if name.startswith("shard-") and name.endswith(".json"):
            os.unlink(os.path.join(folder, name))
    _clear_parts(folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, JOURNAL))
    sync_folder(folder)


def _clear_parts(folder: str) -> None:
    """What somebody who was killed had begun: folders of shards, and small files."""
    for name in os.listdir(folder):
        if name.startswith(PART_PREFIX):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def _check_room(folder: str, job: Job, num_shards: int) -> None:
    needed = num_shards * job.shard_rows * job.sample_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CannotWrite(
            f"about {_in_words(needed)} are needed at {folder}, and {_in_words(free)} are free",
            likely=f"{job.num_samples} samples of about {job.sample_bytes} bytes.",
            remedy="another disk; or smaller: a Field with dtype, longer_side or quality",
            path=folder,
        )


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def _naming_trouble(folder: str) -> Iterator[None]:
    try:
        yield
    except (AlreadyThere, CannotWrite):
        raise
    except OSError as error:
        if getattr(error, "code", None):  # one of ours, from the source
            raise
        is_full = error.errno in _FULL
        again = "the same call again: finished shards are kept"
        raise CannotWrite(
            f"{folder or repr(folder)} cannot be written: {error.strerror or error}",
            where=str(error.filename) if error.filename else None,
            likely="the disk is full." if is_full else None,
            remedy=f"make room, then {again}"
            if is_full
            else f"a folder that you may write to; or mend this one, then {again}",
            path=folder,
        ) from error


def write_whole(folder: str, name: str, text: str) -> None:
    """A small file, all of it or none."""
    path = os.path.join(folder, f"{PART_PREFIX}{secrets.token_hex(4)}-{name}")
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    sync_folder(folder)


def sync_folder(folder: str) -> None:
    """Names, too, must reach the disk. Not everywhere can a folder be opened for that."""
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
