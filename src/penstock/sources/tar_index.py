"""The index of a tar archive: where each sample and each of its fields lies.

An index is a file of arrays, mapped when the dataset is opened. It lies beside the archive
(``shard.tar.penstock-index``), or in the cache folder if the archive's folder cannot be written. It
holds the archive's size and modification time, and is built again if they differ. Each field has a
checksum of its header, key, name, size and place in the sample, so a wrong index is noticed when a
sample is read.

    samples   first_fields[s] .. first_fields[s + 1]    their fields
              key_ends[s] .. key_ends[s + 1]            their key, in keys
    fields    offsets, sizes, checks, names             place of the content, checksum, field name
    blocks    block_starts                              samples that are read together
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import BadStore, Damaged
from penstock.machine.cache_folder import cache_folder
from penstock.sources.array_files import map_file
from penstock.sources.source_files import FileStamp, open_regular, read_stamp
from penstock.sources.tar_headers import BLOCK, Member, scan_members, split_name

ENDING = ".penstock-index"
BLOCK_BYTES = 2 << 20
"""Samples are read together up to this size."""
_MAGIC = b"PENSTOCK TAR INDEX 1\n"
_ALIGNMENT = 64
_PART_AGE_S = 3600.0
_ARRAYS = [
    "block_starts",
    "first_fields",
    "key_ends",
    "offsets",
    "sizes",
    "checks",
    "names",
    "keys",
]


class TarIndex:
    """The samples of one archive.

    Args:
        stamp: The archive's stamp when it was indexed.
        field_names: The names of all fields that occur.
        arrays: See above.
    """

    draws_nothing = True

    def __init__(
        self, stamp: FileStamp, field_names: Sequence[str], arrays: dict[str, np.ndarray]
    ) -> None:
        self.stamp = stamp
        self.field_names = tuple(field_names)
        self.arrays = arrays
        self.block_starts = arrays["block_starts"]
        self.first_fields = arrays["first_fields"]
        self.offsets = arrays["offsets"]
        self.sizes = arrays["sizes"]
        self.checks = arrays["checks"]
        self.names = arrays["names"]
        self._key_ends = arrays["key_ends"]
        self._keys = arrays["keys"]

    def __len__(self) -> int:
        return len(self.first_fields) - 1

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        (key,) = self.keys(sample, sample + 1)
        return key.decode("utf-8", "surrogateescape")

    def keys(self, first: int, last: int) -> list[bytes]:
        """Return the keys of the samples ``first`` to ``last - 1``."""
        ends = self._key_ends[first : last + 1].tolist()
        text = self._keys[ends[0] : ends[-1]].tobytes()
        return [text[one - ends[0] : other - ends[0]] for one, other in pairwise(ends)]

    def find_checks(self, starts: list[int], sizes: list[int]) -> list[int]:
        """Return the CRC-32 that header, key and name of each field of some samples must have.

        Args:
            starts: Part of ``first_fields``.
            sizes: The sizes of the samples' fields.
        """
        checks = self.checks[starts[0] : starts[-1]].tolist()
        places = (
            (place, last - first)
            for first, last in pairwise(starts)
            for place in range(last - first)
        )
        return [
            check ^ field_mark(place, count, size)
            for check, (place, count), size in zip(checks, places, sizes, strict=True)
        ]

    def extents(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where each of some samples begins and ends in the archive."""
        firsts = self.offsets[self.first_fields[samples]].astype(np.int64) - BLOCK
        lasts = self.first_fields[samples + 1].astype(np.int64) - 1
        return firsts, self.offsets[lasts].astype(np.int64) + self.sizes[lasts].astype(np.int64)

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Return where the samples ``first`` to ``last - 1`` begin and end in the archive."""
        start = int(self.offsets[self.first_fields[first]]) - BLOCK
        end = int(self.first_fields[last]) - 1
        return start, int(self.offsets[end]) + int(self.sizes[end])


# Building


def build_index(path: str, tell: Callable[[int], None] = lambda place: None) -> TarIndex:
    """Read the headers of an archive.

    Args:
        tell: Called with the number of bytes done, from time to time.

    Raises:
        BadStore: See :func:`~penstock.sources.tar_headers.scan_members`. Or a sample has a field
            twice.
        Damaged: The archive changed meanwhile.
    """
    stamp = read_stamp(path)
    descriptor = open_regular(path)
    try:
        index = index_members(scan_members(descriptor, path), path, stamp, tell)
    finally:
        os.close(descriptor)
    if read_stamp(path) != stamp:
        raise Damaged(
            f"{path} has changed while it was read",
            likely="it is still being written or copied.",
            remedy="open the dataset again when the file is complete",
            path=path,
        )
    return index


def index_members(
    members: Iterable[Member], path: str, stamp: FileStamp, tell: Callable[[int], None]
) -> TarIndex:
    """Return the index of an archive, from its files in order."""
    builder = _Builder(path)
    for number, (name, offset, size, check) in enumerate(members):
        builder.add(name, offset, size, check)
        if number % 4096 == 4095:
            tell(offset)
    tell(stamp.size)
    return builder.finish(stamp)


class _Builder:
    """Groups files into samples: adjacent files with the same key."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers: dict[bytes, int] = {}
        self._field_names: dict[str, int] = {}
        self._encoded: dict[int, bytes] = {}
        self._offsets, self._sizes, self._checks = array("q"), array("q"), array("I")
        self._names, self._first_fields, self._key_ends = array("I"), array("q"), array("q", [0])
        self._keys = bytearray()
        self._key: bytes | None = None
        self._present: set[int] = set()

    def add(self, name: bytes, offset: int, size: int, check: int) -> None:
        found = split_name(name)
        if found is None:
            return
        key, suffix = found
        number = self._numbers.get(suffix)
        if number is None:
            field = suffix.decode("utf-8", "surrogateescape").lower()
            if field in ("__key__", "__url__"):
                raise BadStore(
                    f"{name.decode('utf-8', 'replace')!r} in {self._path} has the field {field!r}, "
                    "the name of what a reader adds to each sample",
                    where=f"byte {offset - BLOCK}",
                    remedy="rename the file in the archive",
                    path=self._path,
                )
            number = self._field_names.setdefault(field, len(self._field_names))
            self._numbers[suffix] = number
            self._encoded[number] = encode_name(field)
        if key != self._key:
            self._key, self._present = key, set()
            self._first_fields.append(len(self._offsets))
            self._keys += key
            self._key_ends.append(len(self._keys))
        if number in self._present:
            raise BadStore(
                f"sample {key.decode('utf-8', 'replace')!r} in {self._path} has the field "
                f"{list(self._field_names)[number]!r} twice",
                where=f"byte {offset - BLOCK}",
                likely="two samples with the same key lie next to each other.",
                path=self._path,
            )
        self._present.add(number)
        self._offsets.append(offset)
        self._sizes.append(size)
        self._checks.append(zlib.crc32(key + self._encoded[number], check))
        self._names.append(number)

    def finish(self, stamp: FileStamp) -> TarIndex:
        self._first_fields.append(len(self._offsets))
        given = {
            "first_fields": self._first_fields,
            "key_ends": self._key_ends,
            "offsets": self._offsets,
            "sizes": self._sizes,
            "checks": self._checks,
            "names": self._names,
        }
        arrays = {name: np.asarray(values, np.int64) for name, values in given.items()}
        first = arrays["first_fields"]
        counts = np.repeat(np.diff(first), np.diff(first))
        places = np.arange(len(counts)) - np.repeat(first[:-1], np.diff(first))
        arrays["checks"] ^= field_mark(places, counts, arrays["sizes"])
        arrays = {name: _shrink(values) for name, values in arrays.items()}
        arrays["keys"] = np.frombuffer(bytes(self._keys), np.uint8)
        arrays["block_starts"] = find_blocks(
            arrays["first_fields"], arrays["offsets"], arrays["sizes"]
        )
        return TarIndex(stamp, list(self._field_names), arrays)


def encode_name(text: str) -> bytes:
    """Return a key or the name of a field as in the archive."""
    return text.encode("utf-8", "surrogateescape")


def field_mark(place: Any, count: Any, size: Any) -> Any:
    """Return what the checksum of field ``place`` of ``count`` is combined with by xor."""
    return (place * 0x9E3779B1 + count * 0x85EBCA6B + size * 0xC2B2AE35) & 0xFFFFFFFF


def _shrink(values: np.ndarray) -> np.ndarray:
    """Return non-negative integers in the smallest type that holds them."""
    most = int(values.max()) if values.size else 0
    fits = next(kind for kind in ("<u1", "<u2", "<u4", "<i8") if most <= np.iinfo(kind).max)
    return values.astype(fits)


def find_blocks(first_fields: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the first sample of each block. A block has up to BLOCK_BYTES, or one sample."""
    num_samples = len(first_fields) - 1
    begins = offsets[first_fields[:-1]].astype(np.int64) - BLOCK
    last = first_fields[1:].astype(np.int64) - 1
    ends = offsets[last].astype(np.int64) + sizes[last].astype(np.int64)
    starts = [0]
    while starts[-1] < num_samples:
        limit = int(begins[starts[-1]]) + BLOCK_BYTES
        starts.append(max(starts[-1] + 1, int(ends.searchsorted(limit, side="right"))))
    return np.array(starts, "<i8")


# Files


def load_index(path: str, stamp: FileStamp) -> TarIndex | None:
    """Map the index at ``path``. None if it is missing, damaged, or of a different archive."""
    try:
        content = map_file(path)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return None
    start = len(_MAGIC) + 8
    if len(content) < start or content[: len(_MAGIC)].tobytes() != _MAGIC:
        return None
    length = int.from_bytes(content[len(_MAGIC) : start].tobytes(), "little")
    try:
        header = json.loads(content[start : start + length].tobytes())
        places = header["arrays"]
        if header["stamp"] != list(stamp) or header["num_bytes"] != len(content):
            return None
        arrays = {
            name: content[places[name][1] :][: places[name][2]].view(places[name][0])
            for name in _ARRAYS
        }
        starts = arrays["block_starts"]
        num_samples = len(arrays["first_fields"]) - 1
        if starts[0] or starts[-1] != num_samples or (np.diff(starts) <= 0).any():
            return None
        return TarIndex(stamp, header["field_names"], arrays)
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def write_index(index: TarIndex, path: str) -> bool:
    """Write an index under a temporary name, then rename it. False if that is not possible."""
    _remove_old_parts(path)
    part = f"{path}.{os.getpid()}-{os.urandom(4).hex()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(part, flags, 0o666), "wb") as file:
            for piece in _pieces(index):
                file.write(piece)
        os.replace(part, path)
    except OSError:  # no permission, a full disk, or another process has it open on Windows
        with contextlib.suppress(OSError):
            os.unlink(part)
        return False
    return True


def _remove_old_parts(path: str) -> None:
    """Remove what a process that was killed while it wrote has left."""
    for part in glob.glob(glob.escape(path) + ".*.part"):
        with contextlib.suppress(OSError):  # another process has removed or renamed it
            if time.time() - os.stat(part).st_mtime > _PART_AGE_S:
                os.unlink(part)


def _pieces(index: TarIndex) -> Iterator[bytes]:
    places, end = {}, 0
    for name in _ARRAYS:
        values = index.arrays[name]
        places[name] = [values.dtype.str, end, values.nbytes]
        end += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    header: dict[str, Any] = {
        "stamp": list(index.stamp),
        "field_names": index.field_names,
        "num_bytes": 0,
        "arrays": places,
    }
    room = len(json.dumps(header)) + 24 * (len(places) + 1)  # offsets grow when the header is added
    begin = -(-(len(_MAGIC) + 8 + room) // _ALIGNMENT) * _ALIGNMENT
    for place in places.values():
        place[1] += begin
    header["num_bytes"] = begin + end
    text = json.dumps(header).encode("ascii")
    length = begin - len(_MAGIC) - 8
    yield _MAGIC + length.to_bytes(8, "little") + text.ljust(length)
    for name in _ARRAYS:
        content = index.arrays[name].tobytes()
        yield content + bytes(-len(content) % _ALIGNMENT)


def path_beside(path: str) -> str:
    """Return the path of an archive's index, beside the archive."""
    return path + ENDING


def path_in_cache(path: str) -> str:
    """Return the path of an archive's index in the cache folder."""
    whole = os.path.realpath(path)
    name = hashlib.sha256(os.fsencode(whole)).hexdigest()[:16] + "-" + os.path.basename(whole)
    return str(cache_folder() / "tar-indexes" / (name + ENDING))


def find_index(path: str, stamp: FileStamp) -> tuple[TarIndex, str] | None:
    """Return the valid index of an archive and its path, or None."""
    for find_path in (path_beside, path_in_cache):
        place = find_path(path)
        index = load_index(place, stamp)
        if index is not None:
            return index, place
    return None


def make_index(
    path: str, tell: Callable[[int], None] = lambda place: None
) -> tuple[TarIndex, str | None]:
    """Build and store the index of an archive. The path is None if it cannot be stored."""
    index = build_index(path, tell)
    beside, cached = path_beside(path), path_in_cache(path)
    with contextlib.suppress(OSError):
        if not os.access(os.path.dirname(beside) or ".", os.W_OK):
            os.makedirs(os.path.dirname(cached), exist_ok=True)
    for place in (beside, cached):
        if write_index(index, place):
            return load_index(place, index.stamp) or index, place
    return index, None


def open_indexes(paths: Sequence[str]) -> list[tuple[TarIndex, str | None]]:
    """Return the index of each archive. Builds the missing ones, with a progress bar.

    Several processes can do so at the same time. They begin at different archives and use each
    other's indexes.
    """
    found: dict[str, tuple[TarIndex, str | None] | None] = {
        path: find_index(path, read_stamp(path)) for path in paths
    }
    missing = [path for path in found if found[path] is None]
    turn = os.getpid() % max(1, len(missing))
    with indexing_progress({path: read_stamp(path).size for path in missing}) as tell:
        for path in missing[turn:] + missing[:turn]:
            found[path] = find_index(path, read_stamp(path)) or make_index(path, tell(path))
    return [one for path in paths if (one := found[path]) is not None]


@contextlib.contextmanager
def indexing_progress(sizes: dict[str, int]) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """Show how much of the archives is indexed, if a person watches and there are some."""
    if not sizes or not sys.stderr.isatty():
        yield lambda path: lambda place: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("indexing {task.fields[name]}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("indexing", total=sum(sizes.values()), name="")
        done = dict.fromkeys(sizes, 0)

        def tell(path: str) -> Callable[[int], None]:
            def update(place: int) -> None:
                done[path] = place
                name = os.path.basename(path)
                bar.update(task, completed=sum(done.values()), name=name)

            return update

        yield tell
