"""Arrow IPC files and streams, and folders of Hugging Face datasets. A record batch is a block.

Files are memory-mapped. Columns of uncompressed files are views of the map, so they cost no memory
of the process. A stream has no directory of its batches: each process reads the headers of all its
batches when it first needs one. The batches of a compressed stream stay decoded in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import BadStore
from penstock.sources.blocks import ReadOptions
from penstock.sources.parquet_dataset import import_pyarrow
from penstock.sources.source_files import SourceFiles, open_error, open_regular, read_json
from penstock.sources.table_reader import (
    CACHE_BYTES,
    TableBlock,
    TableReader,
    TableSchema,
)

_FILE_MAGIC = b"ARROW1"
_END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


class IpcFile:
    """A memory-mapped Arrow file or stream.

    Args:
        path: The file.

    Raises:
        BadStore: It is neither an Arrow file nor a stream, or it is truncated.
    """

    def __init__(self, path: str) -> None:
        ipc = import_pyarrow().ipc
        try:
            with open(path, "rb", opener=open_regular) as file:
                is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            source = import_pyarrow().memory_map(path)
            self._map = source.read_buffer()
            source.seek(0)
            if is_file:
                self._reader = ipc.open_file(source)
                self.num_batches = self._reader.num_record_batches
                self.schema = self._reader.schema
            else:
                self._reader = None
                stream = ipc.open_stream(source)
                self.schema = stream.schema
                self._batches = list(stream)
                self.num_batches = len(self._batches)
                self._check_end(source)
        except Exception as error:
            raise open_error(path, error) from None

    def _check_end(self, source: Any) -> None:
        """Raise unless a stream was read to its end mark. Without it, batches may be missing."""
        if self._map.slice(max(0, self._map.size - 8)).to_pybytes() != _END_MARK:
            raise ValueError("the stream has no end mark, so batches may be missing")
        if source.tell() != self._map.size:
            raise ValueError("the file continues after the end of the stream")

    def batch(self, number: int) -> Any:
        """Return a record batch."""
        return self._batches[number] if self._reader is None else self._reader.get_batch(number)

    def count_allocated(self, batch: Any) -> int:
        """Return the bytes of a batch that are not views of the file."""
        first, end = self._map.address, self._map.address + self._map.size
        buffers = (one for array in batch.columns for one in array.buffers() if one is not None)
        return sum(one.size for one in buffers if not first <= one.address < end)


class ArrowDataset(TableReader):
    """Rows of Arrow files. See :func:`penstock.open_dataset`."""

    unit = "record batch"
    has_views = True

    def _read_arrays(self, place: TableBlock) -> tuple[dict[str, Any], int]:
        file: IpcFile = self._files.handle(place.file)
        batch = file.batch(place.number).select(list(self._fields))
        # Offsets that point outside the file would crash the process.
        batch.validate(full=True)
        arrays = dict(zip(self._fields, batch.columns, strict=True))
        return arrays, file.count_allocated(batch)


def open_arrow(
    paths: Sequence[str],
    options: ReadOptions,
    *,
    cache_bytes: int = CACHE_BYTES,
    features: Mapping[str, Any] | None = None,
) -> ArrowDataset:
    """Open Arrow files and streams. Called by :func:`penstock.open_dataset`.

    Args:
        features: Features of Hugging Face datasets. None: those in the schema's metadata.

    Raises:
        BadStore: A file is not an Arrow file, or its schema differs from that of the first file.
        MissingExtra: pyarrow is not installed.
    """
    import_pyarrow()
    files = SourceFiles(paths, IpcFile)
    schema = TableSchema(options, features)
    blocks: list[TableBlock] = []
    for number, path in enumerate(files.paths):
        opened = IpcFile(path)
        mine = _find_blocks(number, opened, path)
        schema.add(path, opened.schema, has_rows=bool(mine))
        blocks += mine
        files.check(number)
    return ArrowDataset(files, blocks, schema.fields, options, cache_bytes)


def _find_blocks(file: int, opened: IpcFile, path: str) -> list[TableBlock]:
    blocks = []
    for number in range(opened.num_batches):
        try:
            batch = opened.batch(number)
        except Exception as error:
            raise open_error(path, error) from None
        if batch.num_rows:
            num_bytes = opened.count_allocated(batch)
            blocks.append(TableBlock(file, number, batch.num_rows, num_bytes))
    return blocks


# -- Hugging Face datasets -------------------------------------------------------------------------


def open_hugging_face(
    paths: Sequence[str], options: ReadOptions, *, cache_bytes: int = CACHE_BYTES
) -> ArrowDataset:
    """Open a folder that ``Dataset.save_to_disk`` wrote. Called by :func:`penstock.open_dataset`.

    Raises:
        BadStore: The folder has several splits, was written with an index mapping, or is
            incomplete.
    """
    folder = paths[0]
    if os.path.exists(os.path.join(folder, "dataset_dict.json")):
        folder = _choose_split(folder)
    state = _read_json(folder, "state.json")
    info = _read_json(folder, "dataset_info.json")
    if state.get("_indices_data_files"):
        raise BadStore(
            f"{folder} has an index mapping, as old versions of datasets saved it",
            likely="it was saved by datasets 1.x after a shuffle, select or filter.",
            remedy="with that version: load_from_disk(path).flatten_indices().save_to_disk(...)",
            path=folder,
        )
    try:
        files = [os.path.join(folder, one["filename"]) for one in state["_data_files"]]
    except (KeyError, TypeError):
        raise _not_saved(folder, "state.json names no files") from None
    if not files:
        raise BadStore(
            f"{folder} has no samples",
            likely="an empty Dataset was saved, for example after a filter.",
            remedy="leave it out",
            path=folder,
        )
    if options.columns is None and not state.get("_output_all_columns"):  # a format was set
        options = options._replace(columns=state.get("_format_columns"))
    return open_arrow(files, options, cache_bytes=cache_bytes, features=info.get("features"))


def _read_json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError) as error:
        raise _not_saved(folder, f"{name} cannot be read: {error}") from None
    except OSError as error:
        raise open_error(path, error) from None
    if not isinstance(found, dict):
        raise _not_saved(folder, f"{name} is not a JSON object")
    return found


def _not_saved(folder: str, why: str) -> BadStore:
    return BadStore(
        f"{folder} is not a complete Hugging Face dataset: {why}",
        likely="an interrupted copy.",
        remedy="copy the folder again, or dataset.save_to_disk(...) again",
        path=folder,
    )


def _choose_split(folder: str) -> str:
    """Return the folder of the only split.

    Raises:
        BadStore: There are several.
    """
    splits = _read_json(folder, "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits:
        raise _not_saved(folder, "dataset_dict.json names no splits")
    split = os.path.join(folder, str(splits[0]))
    if len(splits) == 1:
        return split
    raise BadStore(
        f"{folder} has several splits: {', '.join(map(str, splits))}",
        remedy=f"penstock.open_dataset({split!r})",
        path=folder,
    )
