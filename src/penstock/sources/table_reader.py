"""Datasets over the record batches of tables: Arrow files, Parquet files and Lance.

    block of the reader  =  row group or record batch
    TableReader._read_block    one call of the library, then a Column for each field
    TableReader.read_rows      a batch of numbers: rows are copied from the blocks into the slot

A subclass says how a block is read.

Tested by ``tests/unit/sources/test_parquet_dataset.py``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.engine.memory.batch_layout import LayoutError
from penstock.errors import BadStore, Damaged, PenstockError
from penstock.options import check_count
from penstock.order.samplers import BlockOrder
from penstock.sources.arrow_columns import (
    Column,
    holds_images,
    is_image,
    is_number,
    is_number_list,
    make_column,
)
from penstock.sources.blocks import NUM_MIXED, BlockReader, ReadOptions, refuse_unknown_fields
from penstock.sources.source_files import SourceFiles, describe

if TYPE_CHECKING:
    from penstock.sources.remote.object_files import ObjectFiles

CACHE_BYTES = 256 << 20
"""Limit of the blocks that each process keeps decoded."""
_NUM_LOCKS = 64
_SMALL_ROW = 1024
"""Rows of at least this many bytes are copied one by one, without a temporary array."""


class TableBlock(NamedTuple):
    """Where a block lies: the number of its file, its number there, its rows and decoded bytes."""

    file: int
    number: int
    num_rows: int
    num_bytes: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    """First and last bytes of what is read of the file. For object storage only."""


class TableField(NamedTuple):
    """A field. Workers get it without Arrow types, which may be classes of another library.

    Args:
        kind: Its Arrow type as text.
        is_numeric: Batches can be gathered without Python values.
        feature: Its feature in Hugging Face datasets, or None.
    """

    kind: str
    is_numeric: bool
    feature: Any = None


def make_field(kind: Any, feature: Any = None) -> TableField:
    """Return the field of an Arrow type."""
    if is_image(feature):
        return TableField(str(kind), False, feature)
    storage = getattr(kind, "storage_type", kind)
    return TableField(str(kind), is_number(storage) or is_number_list(storage), feature)


class BlockColumns:
    """The decoded columns of a block, by field name.

    Args:
        nbytes: What they keep in memory.
    """

    def __init__(self, columns: dict[str, Column], nbytes: int) -> None:
        self.columns = columns
        self.nbytes = nbytes


class TableReader(BlockReader):
    """Base class of datasets over tables. A sample is a dict of fields.

    Args:
        files: The files.
        blocks: All blocks with at least one row, in order.
        fields: The fields to load, in order.
        cache_bytes: Limit of the decoded blocks that each process keeps.
    """

    unit = "block"
    """What a block is in this format, for error messages."""
    has_views = False
    """Columns may be views of a memory map, and change with the file."""

    def __init__(
        self,
        files: SourceFiles | ObjectFiles,
        blocks: Sequence[TableBlock],
        fields: Mapping[str, TableField],
        options: ReadOptions,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        starts = np.cumsum([0, *(one.num_rows for one in blocks)])
        super().__init__(starts, transforms=options.transforms, fields=list(fields))
        refuse_unknown_fields(self._transforms, list(fields))
        self._files = files
        self._blocks = list(blocks)
        self._fields = dict(fields)
        self._decode = options.decode
        self._row_shapes: dict[str, tuple[int, ...]] | None = None
        self._locks = _make_locks()
        self.cache_bytes = check_count("cache_bytes", cache_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_locks": (0, [])}

    # -- for subclasses --------------------------------------------------------------------------

    def _read_arrays(self, place: TableBlock) -> tuple[dict[str, Any], int]:
        """Return the Arrow array of each field of a block, and the bytes that they allocate."""
        raise NotImplementedError

    # -- samples ---------------------------------------------------------------------------------

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a sample."""
        return tuple(self._fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples of {', '.join(self.fields)})"

    def _read_block(self, block: int) -> BlockColumns:
        place = self._blocks[block]
        try:
            arrays, num_bytes = self._read_arrays(place)
            found = {len(array) for array in arrays.values()}
            if found - {place.num_rows}:
                raise ValueError(f"{found} rows instead of {place.num_rows}")
            columns = make_columns(arrays, self._fields, decode=self._decode)
            self._files.check(place.file)
        except PenstockError:
            raise
        except Exception as error:  # pyarrow's errors have many types
            raise self._damaged(block, describe(error)) from None
        return BlockColumns(columns, num_bytes)

    def _block(self, block: int) -> BlockColumns:
        """Return a block from the cache, or decode it. Threads that need the same one wait."""
        found: BlockColumns | None = self._cached_blocks().get(block)
        if found is not None:
            return found
        if self._locks[0] != os.getpid():  # a lock of the parent may be held for ever
            self._locks = _make_locks()
        with self._locks[1][block % _NUM_LOCKS]:
            content: BlockColumns = super()._block(block)
            return content

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        file = self._blocks[block].file
        self._check_before([file])
        content = self._block(block)
        samples = [self._sample(content, row) for row in rows]
        if self.has_views:
            self._files.check(file)
        return samples

    def _check_before(self, files: Iterable[int]) -> None:
        """Raise if a file has changed. Reading a map of one that is shorter ends the process."""
        for file in files:
            (self._files.check if self.has_views else self._files.check_soon)(file)

    def _sample(self, content: BlockColumns, row: int) -> dict[str, Any]:
        if not self._transforms:
            return {name: column.value(row) for name, column in content.columns.items()}
        return {
            name: column.value(row, self._transforms.get(name))
            for name, column in content.columns.items()
        }

    def _damaged(self, block: int, why: str) -> Damaged:
        place = self._blocks[block]
        path = self._files.paths[place.file]
        first, end = (int(start) for start in self._block_starts[block : block + 2])
        return Damaged(
            f"{self.unit} {place.number} of {path} cannot be read: {why}",
            where=f"samples {first} to {end - 1}",
            likely="bytes of the file have changed since it was written.",
            remedy='copy the file again from its source, or DataLoader(..., on_error="skip")',
            path=path,
        )

    # -- batches ---------------------------------------------------------------------------------

    @property
    def read_rows(self) -> Callable[[np.ndarray, list[np.ndarray]], None]:
        """Copies whole batches. Exists only if all fields are numbers without transforms."""
        is_numeric = all(field.is_numeric for field in self._fields.values())
        if self._transforms or not is_numeric or sys.byteorder != "little":
            raise AttributeError("only fields of numbers can be gathered")
        return self._read_rows

    def _read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        """Copy samples (checked to be in range) into rows of bytes, one field at a time.

        Raises:
            LayoutError: A block has nulls, or rows of another shape than the first sample. The
                engine then loads the samples as usual.
        """
        blocks = self._block_starts.searchsorted(index, side="right") - 1
        rows = index - self._block_starts[blocks]
        wanted = np.unique(blocks).tolist()
        files = {self._blocks[block].file for block in wanted}
        self._check_before(files)
        for block in wanted:
            places = np.flatnonzero(blocks == block)
            columns = self._block(block).columns
            for target, (name, column) in zip(out, columns.items(), strict=True):
                copy_rows(self._rows_of(name, column), rows[places], target, places)
        for file in files if self.has_views else ():
            self._files.check(file)

    def _rows_of(self, name: str, column: Column) -> np.ndarray:
        found = column.rows()
        if found is None or found.shape[1:] != self._first_shapes()[name]:
            raise LayoutError
        return found

    def _first_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the fields of the first sample, from which a layout is made."""
        if self._row_shapes is None:
            self._row_shapes = {
                name: tuple(getattr(value, "shape", ())) for name, value in self[0].items()
            }
        return self._row_shapes

    # -- order -----------------------------------------------------------------------------------

    @property
    def plan_notes(self) -> tuple[str, ...]:
        """Note for ``loader.plan``, if the decoded blocks do not fit into the cache together."""
        num_bytes = sum(one.num_bytes for one in self._blocks)
        notes = tuple(super().plan_notes)
        if num_bytes <= self.cache_bytes:
            return notes
        return (
            *notes,
            f"decoded, the set has {num_bytes >> 20} MiB, and each process keeps "
            f"{self.cache_bytes >> 20} MiB of it. With shuffle=True, a {self.unit} is decoded "
            "again for nearly every sample. sampler=dataset.block_order(seed=0) decodes each once",
        )

    def find_extents(
        self, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return file, start and end of the parts that rows need, and whose they are."""
        blocks = self._block_starts.searchsorted(rows, side="right") - 1
        found = [
            (self._blocks[block].file, start, end, owner)
            for owner, block in enumerate(blocks.tolist())
            for start, end in self._blocks[block].parts
        ]
        files, starts, ends, owners = np.array(found, np.int64).reshape(-1, 4).T
        return files, starts, ends, owners

    def block_order(
        self, *, seed: int = 0, num_mixed: int | None = None, **keywords: Any
    ) -> BlockOrder:
        """Return a shuffled order that needs few blocks at a time. Pass it as ``sampler=``.

        Args:
            seed: A 64-bit integer.
            num_mixed: Number of blocks whose samples are shuffled together. None: as many as fit
                into the cache, up to 16.
            keywords: Other options of :class:`penstock.BlockOrder`.
        """
        if num_mixed is None:
            largest = max((one.num_bytes for one in self._blocks), default=0)
            num_mixed = max(1, min(NUM_MIXED, self.cache_bytes // max(1, largest)))
        return super().block_order(seed=seed, num_mixed=num_mixed, **keywords)


def _make_locks() -> tuple[int, list[threading.Lock]]:
    """Return this process, and locks of blocks by their number."""
    return os.getpid(), [threading.Lock() for _ in range(_NUM_LOCKS)]


def make_columns(
    arrays: Mapping[str, Any], fields: Mapping[str, TableField], *, decode: bool
) -> dict[str, Column]:
    """Return the columns of Arrow arrays, by field name."""
    return {
        name: make_column(arrays[name], field.feature, decode=decode)
        for name, field in fields.items()
    }


def copy_rows(values: np.ndarray, rows: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
    """Copy ``rows`` of ``values`` to the rows ``places`` of ``target``, an array of bytes."""
    num_bytes = math.prod(values.shape[1:]) * values.itemsize
    if num_bytes != target.shape[1]:
        raise LayoutError
    if not num_bytes:
        return
    table = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
    if num_bytes < _SMALL_ROW:
        target[places] = table[rows]
        return
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        target[place] = table[row]


class TableSchema:
    """The fields of a set of files: those of its first file with rows. All others must agree.

    Files without rows are not compared. Some programs write them without types.

    Args:
        options: Which fields to load.
        features: Features of Hugging Face datasets. None: those in the schema's metadata.
    """

    def __init__(self, options: ReadOptions, features: Mapping[str, Any] | None = None) -> None:
        self._options = options
        self._features = features
        self._path = ""
        self._fields: dict[str, TableField] | None = None
        self._empty: tuple[str, Any] | None = None

    def add(self, path: str, schema: Any, *, has_rows: bool) -> None:
        """Note or compare the ``pyarrow.Schema`` of a file.

        Raises:
            BadStore: A field is missing, is new, or has another type than in the first file.
        """
        if not has_rows:
            self._empty = self._empty or (path, schema)
        elif self._fields is None:
            self._path, self._fields = path, self._choose(path, schema)
        else:
            self._compare(path, dict(zip(schema.names, schema.types, strict=True)), self._fields)
        _refuse_duplicates(self._fields or (), schema.names, path)

    @property
    def fields(self) -> dict[str, TableField]:
        """The fields to load, in order."""
        if self._fields is None and self._empty is not None:
            self._fields = self._choose(*self._empty)
        return self._fields or {}

    def _choose(self, path: str, schema: Any) -> dict[str, TableField]:
        known = read_features(schema.metadata) if self._features is None else self._features
        kinds = dict(zip(schema.names, schema.types, strict=True))
        names = self._options.choose(schema.names, path)
        for name in names:
            if not holds_images(kinds[name], known.get(name)):
                raise BadStore(
                    f"field {name!r} of {path} is {kinds[name]}, but the metadata of Hugging Face "
                    "datasets calls it an Image",
                    likely="the column was replaced after the metadata was written.",
                    remedy="write the table again with table.replace_schema_metadata(None), or "
                    "columns=[...] without this field",
                    path=path,
                )
        return {name: make_field(kinds[name], known.get(name)) for name in names}

    def _compare(self, path: str, kinds: dict[str, Any], fields: dict[str, TableField]) -> None:
        what = None
        for name, field in fields.items():
            if name not in kinds:
                what = f"{path} has no field {name!r}, {self._path} has"
            elif str(kinds[name]) != field.kind:
                what = f"field {name!r} is {field.kind} in {self._path}, {kinds[name]} in {path}"
        extra = [name for name in kinds if name not in fields]
        if extra and self._options.columns is None:
            what = what or f"{path} has the field {extra[0]!r}, {self._path} has not"
        if what is not None:
            raise BadStore(
                f"the schema changes between files: {what}",
                remedy="open_dataset(path, columns=[...]) with the fields that all files have, or "
                "open the files as separate datasets",
                path=path,
            )


def _refuse_duplicates(names: Iterable[str], known: list[str], path: str) -> None:
    for name in names:
        if known.count(name) > 1:
            others = [one for one in names if known.count(one) == 1]
            raise BadStore(
                f"{path} has {known.count(name)} columns named {name!r}",
                likely="tables were joined without renaming their columns.",
                remedy=f"open_dataset(path, columns={others!r}), or write the table again with "
                "table.rename_columns([...])",
                path=path,
            )


def read_features(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Return the features that Hugging Face datasets noted in a schema, by field name.

    Example:
        >>> read_features({b"huggingface": b'{"info": {"features": {"x": {"_type": "Image"}}}}'})
        {'x': {'_type': 'Image'}}
        >>> read_features(None)
        {}
    """
    try:
        found = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
