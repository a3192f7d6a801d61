"""One folder of a packed set, opened: its manifest, its mapped arrays, and the checks of them.

What can be seen without reading the data is seen here, at opening: a missing, cut off or foreign
file, a name that leads out of the folder, a header that is not the manifest's. What cannot is
checked when its block is first read, or right away with ``verify="full"``.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np

from penstock.errors import BadArgument, BadStore, Damaged
from penstock.store.arrays import BLOCK_BYTES, Mapped, block_checks, check_of, map_array
from penstock.store.columns import Column, FixedColumn, ItemPart, Part, RaggedColumn
from penstock.store.layout import JOURNAL, MANIFEST, FieldSchema, FileEntry, Manifest
from penstock.store.seen import Seen

VERIFY = ("lazy", "full", "off")


class Folder:
    """A packed set on disk. Travels as its path: whoever receives it opens it again."""

    draws_nothing = True

    def __init__(
        self, path: str, *, verify: str = "lazy", seen_at: tuple[str, bytes] | None = None
    ) -> None:
        BadArgument.unless_one_of("verify", verify, VERIFY)
        self.path = os.path.realpath(path)
        self.verify = verify
        self.manifest = read_manifest(self.path)
        entries = [
            entry
            for shard in self.manifest.shards
            for some in shard.files.values()
            for entry in some
        ]
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
        if not schema.is_ragged:
            return FixedColumn(
                [
                    self._part(entry, schema, (shard.rows, *(schema.shape or ())))
                    for shard in self.manifest.shards
                    for entry in shard.files[schema.name]
                ]
            )
        parts = []
        for shard in self.manifest.shards:
            data, offsets, *shapes = shard.files[schema.name]
            parts.append(
                (
                    self._items(data, schema),
                    self._part(offsets, None, (shard.rows + 1,)),
                    self._part(shapes[0], None, (shard.rows, schema.ndim)) if shapes else None,
                )
            )
        return RaggedColumn(parts)

    def _items(self, entry: FileEntry, schema: FieldSchema) -> ItemPart:
        mapped, guard = self._checked(entry, schema.stored, None)
        return ItemPart(mapped.array, mapping=mapped.mapping, offset=mapped.offset, guard=guard)

    def _part(self, entry: FileEntry, schema: FieldSchema | None, shape: tuple[int, ...]) -> Part:
        dtype = np.dtype("<i8") if schema is None else schema.stored
        mapped, guard = self._checked(entry, dtype, shape)
        return Part(mapped.array, mapping=mapped.mapping, offset=mapped.offset, guard=guard)

    def _checked(
        self, entry: FileEntry, dtype: np.dtype[Any], shape: tuple[int, ...] | None
    ) -> tuple[Mapped, _BlockGuard | None]:
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
        if self.seen is None:
            return mapped, None
        first = self._first_block[entry.name]
        seen = self.seen.blocks[first : first - (-entry.bytes // BLOCK_BYTES)]
        return mapped, _BlockGuard(self.path, entry, mapped, seen)

    def _map(self, entry: FileEntry) -> Mapped:
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
        return map_array(path)

    def _check_all(self, entries: list[FileEntry]) -> None:
        for entry in entries:
            mapped = self._map(entry)
            if check_of(block_checks(mapped.mapping)) != entry.check:
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
        self._content = mapped.mapping
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
