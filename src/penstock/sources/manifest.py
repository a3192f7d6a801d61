"""The manifest of a packed set: its files and fields, checked before anything is opened.

    manifest.json              version, schema, counts, checksums, source
    image-00000.npy            a fixed-size field: one row per sample
    text-00000.data.npy        a ragged field: the items of all samples, concatenated,
    text-00000.offsets.npy       where each sample begins (and the end of the last),
    text-00000.shapes.npy        and, for arrays of more than one dimension, each shape
    image-00000.crc.npy        checksums of each block, for files of more than one block

A packed set contains no pickles, and reading it runs no code from it, so one from an untrusted
source is safe to open. The checksums detect accidents, not attacks, because an attacker can rewrite
them.

Tested by ``tests/unit/sources/test_packed.py``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from penstock.errors import BadStore, CannotPack

VERSION = 1
MANIFEST = "manifest.json"
JOURNAL = "packing.json"
"""Exists while a set is being packed. See :mod:`penstock.sources.packed_writer`."""
MARK = "penstock packed set"
FieldKind = Literal["tensor", "array", "scalar", "int", "float", "bool", "text", "bytes", "image"]
"""Kinds of values. :mod:`penstock.sources.fields` describes what a new kind needs."""
KINDS: tuple[str, ...] = get_args(FieldKind)
FORMS = ("single", "tuple", "dict")
_MAX_NAME = 100
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{_MAX_NAME - 1}}}")
_RESERVED = {"con", "prn", "aux", "nul", "manifest", "packing", "shard"}
_DTYPE_KINDS = "biufc"
MAX_NDIM = 32


def check_name(name: Any) -> str:
    """Check the name of a field, which becomes part of file names on every system.

    Raises:
        CannotPack: The name is unsafe. For example, it contains a slash.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _RESERVED:
        why = "it is used in file names, so only letters, digits, '_', '-' and '.' are allowed"
        if isinstance(name, str) and name.lower() in _RESERVED:
            why = "the name is reserved"
        elif isinstance(name, str) and len(name) > _MAX_NAME:
            why = f"it has {len(name)} characters, more than the limit of {_MAX_NAME}"
        shown = name[:40] if isinstance(name, str) else name
        raise CannotPack(
            f"{shown!r} cannot be the name of a field: {why}",
            remedy="a different key in the samples, or pack(..., fields=[...]) for tuples",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class FieldSchema:
    """One field of a set.

    Args:
        kind: The kind of its values, one of ``KINDS``.
        dtype: Dtype of the stored items, such as "<f4". "bfloat16" is stored as "<u2".
        shape: Shape of each sample. None if shapes differ (ragged). All have ``ndim`` dimensions.
        encoding: For images: "file" (the bytes of an image file) or "raw" (its pixels).
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None = None
    ndim: int = 1
    encoding: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.kind not in KINDS:
            raise ValueError(f"field {self.name!r} has the unknown kind {self.kind!r}")
        dtype = self.stored
        if dtype.kind not in _DTYPE_KINDS or dtype.byteorder == ">":
            raise ValueError(f"field {self.name!r} has the unsupported dtype {self.dtype!r}")
        sizes = self.shape or ()
        if len(sizes) > MAX_NDIM or not 0 <= self.ndim <= MAX_NDIM or any(n < 0 for n in sizes):
            raise ValueError(
                f"field {self.name!r} has invalid shape {self.shape}, ndim {self.ndim}"
            )
        is_bytes = self.is_ragged and dtype == np.dtype("u1")
        if self.kind in ("text", "bytes", "image") and not is_bytes:
            raise ValueError(f"field {self.name!r} of kind {self.kind} must be ragged bytes")
        if self.kind in ("int", "float", "bool") and self.shape != ():
            raise ValueError(f"field {self.name!r} of kind {self.kind} must be a number")
        if self.kind == "image" and (self.encoding, self.ndim) not in (("file", 1), ("raw", 3)):
            raise ValueError(
                f"image field {self.name!r} has invalid encoding {self.encoding!r}, "
                f"ndim {self.ndim}"
            )
        if self.encoding and self.kind != "image":
            raise ValueError(f"field {self.name!r} of kind {self.kind} cannot have an encoding")

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.dtype == "bfloat16" else self.dtype)

    @property
    def is_ragged(self) -> bool:
        return self.shape is None

    @property
    def row_bytes(self) -> int:
        """Bytes per sample of a fixed-size field."""
        assert self.shape is not None
        return int(np.prod(self.shape, dtype=np.int64)) * self.stored.itemsize

    @property
    def has_shapes(self) -> bool:
        return self.is_ragged and self.ndim != 1

    def file_names(self, shard: int) -> list[str]:
        """Return the names of a shard's array files, in the order the reader expects."""
        stem = f"{self.name}-{shard:05d}"
        if not self.is_ragged:
            return [f"{stem}.npy"]
        parts = ["data", "offsets", *(["shapes"] if self.has_shapes else [])]
        return [f"{stem}.{part}.npy" for part in parts]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a shard: its length and checksum."""

    name: str
    bytes: int
    check: int

    etag = None
    """A file of a packed set is known by its checksum."""

    @property
    def blocks_name(self) -> str:
        """Name of the file with the checksums of its blocks, if it has more than one block."""
        return self.name[: -len(".npy")] + ".crc.npy"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard: its number of samples, and its files by field."""

    rows: int
    files: dict[str, tuple[FileEntry, ...]]

    @property
    def entries(self) -> list[FileEntry]:
        """The files of all fields."""
        return [entry for some in self.files.values() for entry in some]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a packed set, available without opening its arrays.

    Args:
        form: Form of a sample: "single" value, "tuple" or "dict".
        fingerprint: A hash of the source and the packing options.
        attributes: Attributes of the source, such as its classes. Plain JSON.
        bad: Index in the source and error of each sample that was skipped or replaced.
    """

    num_samples: int
    form: str
    fields: tuple[FieldSchema, ...]
    shards: tuple[ShardEntry, ...]
    fingerprint: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    bad: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        names = [one.name for one in self.fields]
        if self.form not in FORMS:
            raise ValueError(f"samples have the unknown form {self.form!r}")
        if len({name.lower() for name in names}) != len(names) or not names:
            raise ValueError(f"the fields {names} must not be empty or contain duplicates")
        if sum(shard.rows for shard in self.shards) != self.num_samples:
            raise ValueError(f"the sizes of the shards do not add up to {self.num_samples} samples")
        for number, shard in enumerate(self.shards):
            for one in self.fields:
                found = [entry.name for entry in shard.files.get(one.name, ())]
                if found != one.file_names(number):
                    raise ValueError(
                        f"shard {number} has the wrong files for {one.name!r}: {found}"
                    )

    @property
    def entries(self) -> list[FileEntry]:
        """The files of all shards."""
        return [entry for shard in self.shards for entry in shard.entries]

    @classmethod
    def from_json(cls, text: str, path: str) -> Manifest:
        """Parse a manifest. Raises BadStore if it is not a manifest, or not readable."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadStore(f"{path} is not valid JSON: {error}", path=path) from None
        check_version(content, path)
        try:
            return cls(
                num_samples=_whole(content["num_samples"]),
                form=content["form"],
                fields=tuple(read_schema(one) for one in content["fields"]),
                shards=tuple(read_shard(one) for one in content["shards"]),
                fingerprint=str(content["fingerprint"]),
                attributes=dict(content["attributes"]),
                bad=tuple((_whole(index), str(text)) for index, text in content["bad"]),
            )
        except BadStore:
            raise
        except Exception as error:  # an edited manifest can contain anything
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise BadStore(f"{path} is not a valid manifest: {what}", path=path) from None


def to_json(record: Any) -> str:
    """Return a manifest, or the journal of an unfinished packing, as JSON text."""
    content = {"format": MARK, "version": VERSION, **asdict(record)}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def check_version(content: Any, path: str) -> None:
    """Raise BadStore unless the content is a manifest of a supported version."""
    if not isinstance(content, dict) or content.get("format") != MARK:
        raise BadStore(f"{path} is not the manifest of a packed set", path=path)
    version = content.get("version")
    if type(version) is not int or version < 1 or version > VERSION:
        raise BadStore(
            f"{path} has version {version!r}; this Penstock reads versions up to {VERSION}",
            likely="it was packed by a newer Penstock.",
            remedy="install a newer Penstock",
            path=path,
        )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be a non-negative integer")
    return value


def read_schema(content: dict[str, Any]) -> FieldSchema:
    known = {one.name for one in fields(FieldSchema)}
    values = {key: value for key, value in content.items() if key in known}
    shape = values.get("shape")
    values["shape"] = None if shape is None else tuple(_whole(size) for size in shape)
    values["ndim"] = _whole(values.get("ndim", 1))
    return FieldSchema(**values)


def read_shard(content: dict[str, Any]) -> ShardEntry:
    files = {name: tuple(map(_read_file, some)) for name, some in content["files"].items()}
    return ShardEntry(rows=_whole(content["rows"]), files=files)


def _read_file(content: dict[str, Any]) -> FileEntry:
    sizes = {key: _whole(content[key]) for key in ("bytes", "check")}
    return FileEntry(name=_check_inside(content["name"]), **sizes)


def _check_inside(name: Any) -> str:
    """Return a file name that stays inside the folder, or raise BadStore."""
    is_plain = isinstance(name, str) and name == os.path.basename(name) and name[:1] != "."
    if not is_plain or any(sign in name for sign in "/\\:\0") or not name:
        raise BadStore(f"the manifest contains {name!r}, which is not a file in the folder")
    return str(name)
