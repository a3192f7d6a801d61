"""One folder of a packed set, opened: its manifest, its mapped arrays, and the checks of them.

What can be seen without reading the data is seen here, at opening: a missing, cut off or foreign
file, a name that leads out of the folder, a header that is not the manifest's. What cannot is
checked when its block is first read, or right away with ``verify="full"``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from penstock.errors import BadArgument, BadStore, Damaged
from penstock.sources.checked_blocks import Seen
from penstock.sources.columns import Column, FixedColumn, ItemPart, Part, RaggedColumn
from penstock.sources.manifest import JOURNAL, MANIFEST, FieldSchema, FileEntry, Manifest
from penstock.sources.mapped_span import map_together
from penstock.sources.npy_files import BLOCK_BYTES, Mapped, block_checks, check_of, map_array

VERIFY = ("lazy", "full", "off")
AnyPart = TypeVar("AnyPart", bound=Part)


class Folder:
    """A packed set on disk. Travels as its path: whoever receives it opens it again."""

    draws_nothing = True

    def __init__(
        self, path: str, *, verify: str = "lazy", seen_at: tuple[str, bytes] | None = None
    ) -> None:
        BadArgument.unless_one_of("verify", verify, VERIFY, "Packed")
        self.path = os.path.realpath(path)
        self.verify = verify
        self.manifest = read_manifest(self.path)
        entries = [
            entry
            for shard in self.manifest.shards
            for some in shard.files.values()
            for entry in some
        ]
        for entry in entries:  # before their sizes, which a stranger wrote, are made memory
            self._check_size(entry)
        counts = [-(-entry.bytes // BLOCK_BYTES) for entry in entries]
        firsts = np.cumsum([0, *counts]).tolist()
        self._first_block: dict[str, int] = {
            entry.name: first for entry, first in zip(entries, firsts[:-1], strict=True)
        }
        self.seen = Seen(firsts[-1], seen_at) if verify == "lazy" else None
        self.columns: dict[str, Column] = {
            schema.name: self._open(schema) for schema in self.manifest.fields
        }
        self.schemas = self.manifest.fields
        self.form = self.manifest.form
        self.num_bytes = sum(entry.bytes for entry in entries)
        if verify == "full":
            self._check_all(entries)

    def __reduce__(self) -> tuple[Any, ...]:
        # "full" was done here; whoever gets it need not do it again.
        verify = "off" if self.verify == "full" else self.verify
        return _reopen, (self.path, verify, self.seen.place if self.seen is not None else None)

    def _open(self, schema: FieldSchema) -> Column:
        shards = self.manifest.shards
        files = [shard.files[schema.name] for shard in shards]
        rows = [shard.rows for shard in shards]
        first = [entries[0] for entries in files]
        if not schema.is_ragged:
            forms = [(count, *(schema.shape or ())) for count in rows]
            return FixedColumn(self._parts(first, schema.stored, forms, Part))
        whole = np.dtype("<i8")
        data = self._parts(first, schema.stored, [None] * len(first), ItemPart)
        ends = [(count + 1,) for count in rows]
        offsets = self._parts([entries[1] for entries in files], whole, ends, Part)
        shapes: list[Part] | list[None] = [None] * len(files)
        if schema.has_shapes:
            forms = [(count, schema.ndim) for count in rows]
            shapes = self._parts([entries[2] for entries in files], whole, forms, Part)
        return RaggedColumn(list(zip(data, offsets, shapes, strict=True)))

    def _parts(
        self,
        entries: list[FileEntry],
        dtype: np.dtype[Any],
        shapes: Sequence[tuple[int, ...] | None],
        kind: type[AnyPart],
    ) -> list[AnyPart]:
        """One field's files of one sort, over all shards."""
        pairs = zip(entries, shapes, strict=True)
        mapped = [self._checked(entry, dtype, shape) for entry, shape in pairs]
        row_bytes = max((m.array.nbytes // len(m.array) for m in mapped if len(m.array)), default=1)
        paths = [os.path.join(self.path, entry.name) for entry in entries]
        spans = map_together(paths, row_bytes)
        if spans is not None:
            mapped = [one.moved(span) for one, span in zip(mapped, spans, strict=True)]
        return [
            kind(m.array, mapping=m.mapping, offset=m.offset, guard=self._guard(entry, m))
            for entry, m in zip(entries, mapped, strict=True)
        ]

    def _checked(
        self, entry: FileEntry, dtype: np.dtype[Any], shape: tuple[int, ...] | None
    ) -> Mapped:
        mapped = self._map(entry)
        is_right = mapped.array.ndim == 1 if shape is None else mapped.array.shape == shape
        if mapped.array.dtype != dtype or not is_right:
            raise BadStore(
                f"{entry.name} holds {mapped.array.dtype} of shape {mapped.array.shape}; the "
                f"manifest says {dtype}{'' if shape is None else f' of shape {shape}'}",
                where=self.path,
                likely="files of different sets were mixed.",
                remedy="copy the whole folder again from where it was made",
                path=self.path,
            )
        return mapped

    def _guard(self, entry: FileEntry, mapped: Mapped) -> _BlockGuard | None:
        if self.seen is None:
            return None
        first = self._first_block[entry.name]
        seen = self.seen.blocks[first : first - (-entry.bytes // BLOCK_BYTES)]
        return _BlockGuard(self.path, entry, mapped, seen)

    def _check_size(self, entry: FileEntry) -> None:
        path = os.path.join(self.path, entry.name)
        if os.path.realpath(path) != path:
            raise BadStore(
                f"{entry.name} is a link that leads out of {self.path}: refused", path=self.path
            )
        try:
            num_bytes = os.path.getsize(path)
        except OSError as error:
            raise BadStore(
                f"{entry.name} cannot be opened: {error.strerror or error}",
                where=self.path,
                likely="a shard was not copied along.",
                remedy="copy the whole folder again from where it was made",
                path=self.path,
            ) from None
        if num_bytes != entry.bytes:
            raise BadStore(
                f"{entry.name} has {num_bytes} bytes; the manifest says {entry.bytes}",
                where=self.path,
                likely="it was cut off: a full disk, or a copy that did not end.",
                remedy="copy the file again from where it was made",
                path=self.path,
            )
        if self.verify == "lazy" and entry.bytes > BLOCK_BYTES:
            checks = os.path.join(self.path, entry.blocks_name)
            if not os.path.isfile(checks):
                raise BadStore(
                    f"{entry.blocks_name} is not there: the checks of {entry.name}",
                    where=self.path,
                    likely="a file was not copied along.",
                    remedy="copy it again from where it was made, or Packed(..., verify='full')",
                    path=self.path,
                )

    def _map(self, entry: FileEntry) -> Mapped:
        try:
            return map_array(os.path.join(self.path, entry.name))
        except OSError as error:
            raise BadStore(f"{entry.name} cannot be opened: {error}", path=self.path) from None

    def _check_all(self, entries: list[FileEntry]) -> None:
        for entry in entries:
            mapped = self._map(entry)
            if check_of(block_checks(mapped.content)) != entry.check:
                raise make_damage(self.path, entry, "its checksum is not the manifest's")


def make_damage(path: str, entry: FileEntry, what: str) -> Damaged:
    """The error for bytes that are not those written."""
    return Damaged(
        f"{entry.name} is damaged: {what}",
        where=path,
        likely="bytes changed on the disk or on the way, or files were swapped.",
        remedy="copy the file again from where it was made, or pack again",
        path=path,
        file=entry.name,
    )


def read_blocks(path: str, entry: FileEntry) -> np.ndarray:
    """The checks of a file's blocks, themselves checked by the manifest."""
    if entry.bytes <= BLOCK_BYTES:
        return np.empty(0, np.uint32)  # its only block's check is the file's
    try:
        found = map_array(os.path.join(path, entry.blocks_name)).array
    except OSError as error:
        raise BadStore(f"{entry.blocks_name} cannot be opened: {error}", path=path) from None
    if check_of(found) != entry.check:
        raise make_damage(path, entry, "its list of checks is not the manifest's")
    return found


class _BlockGuard:
    """Checks blocks of one file before their bytes are used for the first time.

    Knows no folder: there is no way round from a mapping to itself, so that it is closed at once.
    """

    def __init__(self, path: str, entry: FileEntry, mapped: Mapped, seen: np.ndarray) -> None:
        self._path = path
        self._entry = entry
        self._content = mapped.content
        self._seen = seen
        self._checks: np.ndarray | None = None
        self.is_done = False

    def check(self, starts: np.ndarray, ends: np.ndarray) -> None:
        if self.is_done:
            return
        if self._seen.all():
            self.is_done = True
            return
        firsts, lasts = starts // BLOCK_BYTES, (ends - 1) // BLOCK_BYTES
        if (lasts - firsts).max() <= 1:
            blocks = np.unique(np.concatenate([firsts, lasts]))
        else:
            pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
            blocks = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in pairs]))
        for block in blocks[self._seen[blocks] == 0].tolist():
            self._check_block(block)

    def check_range(self, start: int, end: int) -> None:
        """The same for one range of bytes."""
        if self.is_done or start == end:
            return
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for block in range(first, last + 1):
            if not self._seen[block]:
                self._check_block(block)

    def _check_block(self, block: int) -> None:
        if self._checks is None:
            self._checks = read_blocks(self._path, self._entry)
        start = block * BLOCK_BYTES
        view = memoryview(self._content)[start : start + BLOCK_BYTES]
        found = zlib.crc32(view)
        if len(self._checks):
            is_right = found == int(self._checks[block])
        else:
            is_right = check_of(np.array([found], "<u4")) == self._entry.check
        if not is_right:
            raise make_damage(
                self._path,
                self._entry,
                f"bytes {start} to {start + len(view)} are not those written",
            )
        self._seen[block] = 1


def _reopen(path: str, verify: str, seen_at: tuple[str, bytes] | None) -> Folder:
    return Folder(path, verify=verify, seen_at=seen_at)


def read_manifest(path: str) -> Manifest:
    """The manifest of the set at ``path``.

    Raises:
        BadStore: There is none, or it is not finished, not ours, or newer than we are.
    """
    file = os.path.join(path, MANIFEST)
    try:
        with open(file, encoding="utf-8") as content:
            return Manifest.from_json(content.read(), file)
    except UnicodeDecodeError as error:
        raise BadStore(f"{file} is no JSON: {error}", path=path) from None
    except OSError as error:
        if os.path.exists(os.path.join(path, JOURNAL)):
            raise BadStore(
                f"{path} is not packed to its end",
                likely="the packing was stopped, or is still under way.",
                remedy="the same `penstock pack` again: finished shards are kept",
                path=path,
            ) from None
        raise BadStore(
            f"{path} is no packed set: {error.strerror or error}",
            remedy="penstock pack SOURCE " + path,
            path=path,
        ) from None
