"""The manifest of a packed set: its files and fields, checked before anything is opened.

    manifest.json              version, schema, counts, checks, what made it
    image-00000.npy            a fixed field: one row per sample
    text-00000.data.npy        a ragged field: the items of all samples, one after the other,
    text-00000.offsets.npy       where each begins (and the end of the last),
    text-00000.shapes.npy        and, for arrays of more than one dimension, each one's shape
    image-00000.crc.npy        checks of each block, for files of more than one

There is no pickle and nothing is run, so a set from a stranger is safe to open. Checks are against
accidents, not against attackers, who can write them, too.
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
"""There while a set is being packed; see :mod:`penstock.sources.packed_writer`."""
MARK = "penstock packed set"
FieldKind = Literal["tensor", "array", "scalar", "int", "float", "bool", "text", "bytes", "image"]
"""Kinds of values; :mod:`penstock.sources.fields` says what a new one needs."""
KINDS: tuple[str, ...] = get_args(FieldKind)
FORMS = ("single", "tuple", "dict")
_MAX_NAME = 100
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{_MAX_NAME - 1}}}")
_RESERVED = {"con", "prn", "aux", "nul", "manifest", "packing", "shard"}
_DTYPE_KINDS = "biufc"
MAX_NDIM = 32


def check_name(name: Any) -> str:
    """A field's name is part of file names on every system: refuse what could lead elsewhere.

    Raises:
        CannotPack: It has a slash, say.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() in _RESERVED:
        why = "letters, digits, '_', '-' and '.' make file names"
        if isinstance(name, str) and name.lower() in _RESERVED:
            why = "files of that name are something else"
        elif isinstance(name, str) and len(name) > _MAX_NAME:
            why = f"it has {len(name)} letters, and files may have {_MAX_NAME}"
        shown = name[:40] if isinstance(name, str) else name
        raise CannotPack(
            f"{shown!r} cannot name a field: {why}",
            remedy="another key in the dataset's samples; pack(..., fields=[...]) names a tuple's",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class FieldSchema:
    """One field of a set.

    Args:
        kind: What a sample has there; one of ``KINDS``.
        dtype: Of the stored items, as NumPy writes it ("<f4"), or "bfloat16", stored as "<u2".
        shape: Of each sample; None: they differ (ragged), and ``ndim`` counts their dimensions.
        encoding: Of images: "file" (the bytes of an image file) or "raw" (its pixels).
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
            raise ValueError(f"field {self.name!r} is of kind {self.kind!r}, which is not known")
        dtype = self.stored
        if dtype.kind not in _DTYPE_KINDS or dtype.byteorder == ">":
            raise ValueError(f"field {self.name!r} has dtype {self.dtype!r}, which is not stored")
        sizes = self.shape or ()
        if len(sizes) > MAX_NDIM or not 0 <= self.ndim <= MAX_NDIM or any(n < 0 for n in sizes):
            raise ValueError(f"field {self.name!r} has shape {self.shape}, ndim {self.ndim}")
        is_bytes = self.is_ragged and dtype == np.dtype("u1")
        if self.kind in ("text", "bytes", "image") and not is_bytes:
            raise ValueError(f"field {self.name!r} of kind {self.kind} must be of bytes")
        if self.kind in ("int", "float", "bool") and self.shape != ():
            raise ValueError(f"field {self.name!r} of kind {self.kind} must be a number")
        if self.kind == "image" and (self.encoding, self.ndim) not in (("file", 1), ("raw", 3)):
            raise ValueError(f"field {self.name!r} is an image as {self.encoding!r}, {self.ndim}-d")
        if self.encoding and self.kind != "image":
            raise ValueError(f"field {self.name!r} of kind {self.kind} has an encoding")

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.dtype == "bfloat16" else self.dtype)

    @property
    def is_ragged(self) -> bool:
        return self.shape is None

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample of a fixed field."""
        assert self.shape is not None
        return int(np.prod(self.shape, dtype=np.int64)) * self.stored.itemsize

    @property
    def has_shapes(self) -> bool:
        return self.is_ragged and self.ndim != 1

    def file_names(self, shard: int) -> list[str]:
        """The array files of a shard, in the order that the reader wants them."""
        stem = f"{self.name}-{shard:05d}"
        if not self.is_ragged:
            return [f"{stem}.npy"]
        parts = ["data", "offsets", *(["shapes"] if self.has_shapes else [])]
        return [f"{stem}.{part}.npy" for part in parts]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a shard: how long it is, and the check of its bytes."""

    name: str
    bytes: int
    check: int

    @property
    def blocks_name(self) -> str:
        """The file with the checks of its blocks, if it has more than one."""
        return self.name[: -len(".npy")] + ".crc.npy"


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One shard: its samples, and its files by field."""

    rows: int
    files: dict[str, tuple[FileEntry, ...]]

    @property
    def entries(self) -> list[FileEntry]:
        """The files of all fields."""
        return [entry for some in self.files.values() for entry in some]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that is known about a packed set without opening an array of it.

    Args:
        form: Of a sample: "single" value, "tuple" or "dict".
        fingerprint: Of the source and the options that made it.
        attributes: What the source says of itself: classes, say. Plain JSON.
        bad: Index in the source and error of each sample that was left out or replaced.
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
            raise ValueError(f"samples have the form {self.form!r}, which is not known")
        if len({name.lower() for name in names}) != len(names) or not names:
            raise ValueError(f"the fields are {names}: there must be some, each once")
        if sum(shard.rows for shard in self.shards) != self.num_samples:
            raise ValueError(f"the shards do not sum to the {self.num_samples} samples")
        for number, shard in enumerate(self.shards):
            for one in self.fields:
                found = [entry.name for entry in shard.files.get(one.name, ())]
                if found != one.file_names(number):
                    raise ValueError(f"shard {number} has the files {found} for {one.name!r}")

    @classmethod
    def from_json(cls, text: str, path: str) -> Manifest:
        """Raises: BadStore: it is no manifest, or one that we cannot read."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadStore(f"{path} is no JSON: {error}", path=path) from None
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
        except Exception as error:  # an edited manifest may be anything
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise BadStore(f"{path} is not a manifest: {what}", path=path) from None


def to_json(record: Any) -> str:
    """A manifest, or the journal of an unfinished packing, as it is written."""
    content = {"format": MARK, "version": VERSION, **asdict(record)}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def check_version(content: Any, path: str) -> None:
    """Raises: BadStore: it is not a manifest of ours, or of a newer version."""
    if not isinstance(content, dict) or content.get("format") != MARK:
        raise BadStore(f"{path} is not the manifest of a packed set", path=path)
    version = content.get("version")
    if type(version) is not int or version < 1 or version > VERSION:
        raise BadStore(
            f"{path} has version {version!r}; this Penstock reads up to {VERSION}",
            likely="a newer Penstock packed it.",
            remedy="pip install --upgrade penstock",
            path=path,
        )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
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
    """A file name that leads nowhere but into the folder. Raises: BadStore."""
    is_plain = isinstance(name, str) and name == os.path.basename(name) and name[:1] != "."
    if not is_plain or any(sign in name for sign in "/\\:\0") or not name:
        raise BadStore(f"the manifest names {name!r}, which is not a file of the folder: refused")
    return str(name)
