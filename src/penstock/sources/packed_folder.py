"""The open files of a packed set: its manifest, its mapped arrays, and their checksums.

Opening checks everything that does not need the data: missing and truncated files, names that lead
out of the folder, and headers that differ from the manifest. The data is verified block by block on
first read, or on opening with ``verify="full"``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import BadArgument, BadStore
from penstock.sources.array_files import map_array, map_arrays
from penstock.sources.checksums import (
    BLOCK_BYTES,
    BlockChecker,
    CheckedBlocks,
    block_checksums,
    file_checksum,
    make_damage,
)
from penstock.sources.columns import Column, FixedColumn, RaggedColumn, ShardRows
from penstock.sources.manifest import JOURNAL, MANIFEST, FieldSchema, FileEntry, Manifest
from penstock.sources.source_files import FileStamp, SourceFiles, open_error, open_regular

VERIFY = ("lazy", "full", "off")
_COPY_FILE = "copy the file again from its source"
_COPY_FOLDER = "copy the whole folder again from its source"


class PackedFolder:
    """The files of a packed set. Pickled as its path, so the receiver opens them again."""

    draws_nothing = True

    def __init__(
        self,
        path: str,
        verify: str = "lazy",
        shared: tuple[str, bytes] | None = None,
        stamps: Sequence[FileStamp] | None = None,
    ) -> None:
        BadArgument.unless_one_of("verify", verify, VERIFY, "Packed")
        self.path = os.path.realpath(path)
        self.verify = verify
        self.manifest = read_manifest(self.path)
        self.schemas = self.manifest.fields
        self.form = self.manifest.form
        entries = self.manifest.entries
        for entry in entries:  # before allocating memory by the sizes in an untrusted manifest
            self._check_size(entry)
        self.files = SourceFiles(
            [os.path.join(self.path, entry.name) for entry in entries], stamps=stamps
        )
        self.files.check_all()
        self.num_bytes = sum(entry.bytes for entry in entries)
        self._first_block: dict[str, int] = {}
        num_blocks = 0
        for entry in entries:
            self._first_block[entry.name] = num_blocks
            num_blocks += -(-entry.bytes // BLOCK_BYTES)
        self.checked = CheckedBlocks(num_blocks, shared) if verify == "lazy" else None
        self.columns: dict[str, Column] = {
            schema.name: self._open(schema) for schema in self.schemas
        }
        for entry in entries if verify == "full" else ():
            mapped = map_array(os.path.join(self.path, entry.name))
            assert mapped.file is not None
            if file_checksum(block_checksums(mapped.file.content)) != entry.check:
                raise make_damage(self.path, entry, "its checksum does not match the manifest")

    def __reduce__(self) -> tuple[Any, ...]:
        # After "full", the receiver does not need to verify again.
        verify = "off" if self.verify == "full" else self.verify
        shared = None if self.checked is None else self.checked.shared
        return PackedFolder, (self.path, verify, shared, self.files.stamps)

    def _open(self, schema: FieldSchema) -> Column:
        shards = self.manifest.shards
        rows = [shard.rows for shard in shards]
        files = list(zip(*(shard.files[schema.name] for shard in shards), strict=True))
        if not files:
            return FixedColumn([])
        if not schema.is_ragged:
            shapes = [(count, *(schema.shape or ())) for count in rows]
            return FixedColumn(self._map(files[0], schema.stored, shapes))
        whole = np.dtype("<i8")
        data = self._map(files[0], schema.stored, [None] * len(rows))
        offsets = self._map(files[1], whole, [(count + 1,) for count in rows])
        sizes: Sequence[ShardRows | None] = [None] * len(rows)
        if schema.has_shapes:
            sizes = self._map(files[2], whole, [(count, schema.ndim) for count in rows])
        return RaggedColumn(list(zip(data, offsets, sizes, strict=True)))

    def _map(
        self,
        entries: Sequence[FileEntry],
        dtype: np.dtype[Any],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> list[ShardRows]:
        """Map one kind of file of one field, for all shards."""
        found = []
        arrays = map_arrays([os.path.join(self.path, entry.name) for entry in entries])
        for entry, mapped, shape in zip(entries, arrays, shapes, strict=True):
            array = mapped.array
            is_right = array.ndim == 1 if shape is None else array.shape == shape
            if array.dtype != dtype or not is_right:
                raise self._broken(
                    f"{entry.name} contains {array.dtype} of shape {array.shape}; the "
                    f"manifest says {dtype}{'' if shape is None else f' of shape {shape}'}",
                    "files of different packed sets were mixed.",
                    _COPY_FOLDER,
                )
            checker = None
            if self.checked is not None and mapped.file is not None:
                first = self._first_block[entry.name]
                blocks = self.checked.blocks[first : first - (-entry.bytes // BLOCK_BYTES)]
                checker = BlockChecker(self.path, entry, mapped.file.content, blocks)
            found.append(ShardRows(mapped, checker))
        return found

    def _check_size(self, entry: FileEntry) -> None:
        path = os.path.join(self.path, entry.name)
        if os.path.realpath(path) != path:
            raise BadStore(f"{entry.name} is a link to a file outside {self.path}", path=self.path)
        try:
            num_bytes = os.path.getsize(path)
        except OSError as error:
            what = f"{entry.name} cannot be opened: {error.strerror or error}"
            raise self._broken(what, "the file was not copied.", _COPY_FOLDER) from None
        if num_bytes != entry.bytes:
            raise self._broken(
                f"{entry.name} has {num_bytes} bytes; the manifest says {entry.bytes}",
                "the file is truncated, because of a full disk or an interrupted copy.",
                _COPY_FILE,
            )
        has_list = entry.bytes <= BLOCK_BYTES or os.path.isfile(
            os.path.join(self.path, entry.blocks_name)
        )
        if self.verify == "lazy" and not has_list:
            raise self._broken(
                f"{entry.blocks_name}, the checksums of {entry.name}, is missing",
                "the file was not copied.",
                "copy it again from its source, or use Packed(..., verify='full')",
            )

    def _broken(self, what: str, likely: str, remedy: str) -> BadStore:
        return BadStore(what, where=self.path, likely=likely, remedy=remedy, path=self.path)


def read_manifest(path: str, url: str | None = None) -> Manifest:
    """Read the manifest of the packed set at ``path``.

    Args:
        url: Where it was fetched from, for messages.

    Raises:
        BadStore: It is missing, unfinished, invalid, or of a newer version.
    """
    file = os.path.join(path, MANIFEST)
    try:
        with open(file, encoding="utf-8", opener=open_regular) as content:
            return Manifest.from_json(content.read(), f"{url}/{MANIFEST}" if url else file)
    except UnicodeDecodeError as error:
        raise BadStore(f"{url or path}/{MANIFEST} is not valid JSON: {error}", path=path) from None
    except PermissionError as error:
        raise open_error(file, error) from None
    except OSError as error:
        if os.path.exists(os.path.join(path, JOURNAL)):
            raise BadStore(
                f"the packed set {path} is unfinished",
                likely="packing was interrupted, or is still running.",
                remedy="run the same `penstock pack` again (finished shards are kept)",
                path=path,
            ) from None
        if isinstance(error, FileNotFoundError):
            is_folder = os.path.isdir(path)
            raise BadStore(
                f"{path} is not a packed set: "
                + (f"it has no file {MANIFEST}" if is_folder else "there is no such folder"),
                remedy=f"penstock pack {path} {path}-packed"
                if is_folder
                else f"penstock pack SOURCE {path}",
                path=path,
            ) from None
        raise BadStore(f"{file} cannot be read: {error.strerror or error}", path=path) from None
