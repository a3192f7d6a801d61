"""Parquet files as a dataset. A row group is a block, decoded once and kept while it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtra
from penstock.sources.blocks import ReadOptions
from penstock.sources.source_files import SourceFiles, open_error
from penstock.sources.table_reader import (
    CACHE_BYTES,
    TableBlock,
    TableReader,
    TableSchema,
)

if TYPE_CHECKING:
    from penstock.sources.remote.object_files import ObjectFiles

with suppress(ImportError):  # import_pyarrow() says what to install
    import pyarrow.parquet  # so that the fork server imports it once for all workers


class ParquetDataset(TableReader):
    """Rows of Parquet files. See :func:`penstock.open_dataset`."""

    unit = "row group"

    def _read_arrays(self, place: TableBlock) -> tuple[dict[str, Any], int]:
        names = list(self._fields)
        if not isinstance(self._files, SourceFiles):
            self._files.request(place.file, place.parts)
        file = self._files.handle(place.file)
        chosen = None if has_dots(names) else names
        table = file.read_row_group(place.number, columns=chosen, use_threads=False)
        table.validate(full=True)
        arrays = {name: join_chunks(table.column(name)) for name in names}
        return arrays, table.nbytes


def open_parquet(
    paths: Sequence[str] | ObjectFiles,
    options: ReadOptions,
    *,
    cache_bytes: int = CACHE_BYTES,
) -> ParquetDataset:
    """Open Parquet files. Called by :func:`penstock.open_dataset`.

    Raises:
        BadStore: A file is not a Parquet file, or its schema differs from that of the first file.
        MissingExtra: pyarrow is not installed.
    """
    import_pyarrow()
    files: SourceFiles | ObjectFiles
    is_remote = not isinstance(paths, Sequence)
    if isinstance(paths, Sequence):
        files = SourceFiles(paths, open_parquet_file)
    else:
        from penstock.sources.remote.object_indexes import open_parquet_object

        files, paths.open_file = paths, open_parquet_object
    schema = TableSchema(options)
    blocks: list[TableBlock] = []
    for number, path in enumerate(files.paths):
        opened = files.handle(number) if is_remote else open_parquet_file(path)
        try:
            found = opened.schema_arrow
        except Exception as error:
            raise open_error(path, error) from None
        names = set(options.choose(found.names, path))
        mine = _find_blocks(number, opened.metadata, names, is_remote)
        schema.add(path, found, has_rows=bool(mine))
        blocks += mine
        files.check(number)
    return ParquetDataset(files, blocks, schema.fields, options, cache_bytes)


def _find_blocks(file: int, metadata: Any, names: set[str], has_parts: bool) -> list[TableBlock]:
    """Return the row groups of a file. Their size is that of the chosen columns, uncompressed."""
    blocks = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:
            continue
        columns = [group.column(one) for one in range(group.num_columns)]
        chosen = [
            one
            for one in columns
            if one.path_in_schema in names or one.path_in_schema.partition(".")[0] in names
        ]
        num_bytes = sum(one.total_uncompressed_size for one in chosen)
        parts = _find_parts(columns if has_dots(names) else chosen) if has_parts else ()
        blocks.append(TableBlock(file, number, group.num_rows, num_bytes, parts))
    return blocks


def has_dots(names: Iterable[str]) -> bool:
    """Return True if a name could also mean a field of a struct. Then all columns are read."""
    return any("." in name for name in names)


def _find_parts(columns: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return the first and last bytes of column chunks, joined where they are adjacent."""
    found: list[list[int]] = []
    for one in columns:
        starts = (one.dictionary_page_offset, one.data_page_offset)
        start = min(place for place in starts if place)
        if found and found[-1][1] == start:
            found[-1][1] = start + one.total_compressed_size
        else:
            found.append([start, start + one.total_compressed_size])
    return tuple((start, end) for start, end in found)


def open_parquet_file(path: str) -> Any:
    """Return pyarrow's reader of a file. Page checksums are verified if the file has them."""
    import_pyarrow()
    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except Exception as error:
        raise open_error(path, error) from None


def import_pyarrow() -> Any:
    """Return pyarrow.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra.named(
            "arrow", "Parquet and Arrow files need pyarrow, which is not installed"
        ) from None
    return pyarrow


def join_chunks(column: Any) -> Any:
    """Return a chunked column as one array."""
    if column.num_chunks == 1:
        return column.chunk(0)  # combine_chunks() would copy it
    joined = column.combine_chunks()
    if hasattr(joined, "chunks"):  # more text than 32-bit offsets can hold, or no chunk
        pyarrow = import_pyarrow()
        joined = pyarrow.concat_arrays(joined.chunks) if joined.num_chunks else joined
    return joined
