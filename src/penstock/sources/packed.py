"""Datasets over mapped files: samples and whole batches of a packed set.

    Packed[i]                       one sample, as it was packed
    Packed.read_rows(index, out)    a batch: one gather per field, directly into the slot

Opening takes a few milliseconds and reads no data. Workers open a packed set again by its path.
Pages that are read belong to the page cache, not to the process.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from penstock.errors import BadArgument, Damaged
from penstock.images.crops import Crop, open_image
from penstock.images.pixels import check_memory_format
from penstock.machine.host import memory_bytes
from penstock.order.ranks import RankShard
from penstock.order.samplers import BlockOrder
from penstock.sources.blocks import ReadOptions, check_transforms, refuse_unknown_fields
from penstock.sources.columns import Column, FixedColumn
from penstock.sources.fields import decode_value, join_sample
from penstock.sources.manifest import FieldSchema
from penstock.sources.packed_folder import VERIFY, PackedFolder
from penstock.sources.source_files import SourceFiles

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_BLOCK_BYTES = 4 << 20
"""Size of the blocks that :meth:`ColumnDataset.block_order` reads, in the largest field."""
_MAX_BLOCK_BYTES = 16 << 20
"""Size of the same samples in all fields."""
Self = TypeVar("Self", bound="ColumnDataset")
_Place = tuple["np.ndarray | None", Any]
"""Memory for a value, and a tensor over it or None."""


class ColumnFiles(Protocol):
    """Mapped files with columns. Pickled to workers, which map them again."""

    schemas: tuple[FieldSchema, ...]
    columns: dict[str, Column]
    files: SourceFiles
    form: str
    num_bytes: int


class ColumnDataset:
    """Fields of equal length, read by sample or by batch.

    The engine calls ``read_rows`` to fill slots.
    """

    _files: tuple[Any, ...]
    _rows: Any = None

    def _open(self, files: ColumnFiles, read_ahead: bool | None = None) -> None:
        """Use the columns of ``files``."""
        self._files = (files,)
        self._schemas = tuple(files.schemas)
        self._columns = [files.columns[schema.name] for schema in self._schemas]
        self._form = files.form
        self._transforms: dict[str, Callable[[Any], Any]] = {}
        self._is_channels_last = False
        self._read_ahead = read_ahead
        if read_ahead is None:
            read_ahead = files.num_bytes > (memory_bytes()[0] or sys.maxsize)
        for column in self._columns if read_ahead else ():
            if isinstance(column, FixedColumn):
                column.read_ahead()

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self._files, self._read_ahead, self.fields, self._rows, self._transforms)
        return _restore, (type(self), *state, self._form, self._is_channels_last)

    # -- description ----------------------------------------------------------------------------

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a sample."""
        return tuple(schema.name for schema in self._schemas)

    @property
    def schema(self) -> dict[str, FieldSchema]:
        """The schema of each field."""
        return {schema.name: schema for schema in self._schemas}

    def __len__(self) -> int:
        return self._columns[0].length if self._rows is None else len(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples of {', '.join(self.fields)})"

    # -- samples ---------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> Any:
        return self._sample(self._resolve_one(index))

    def _check_files(self) -> None:
        for one in self._files:
            one.files.check_next_soon()

    def read_into(self, index: int, rows: Sequence[np.ndarray | None]) -> Any:
        """Return ``self[index]``, with images in their ``rows``. Called by the engine."""
        # Each field is one leaf of the sample, unless a transform of the user changes that.
        is_known = all(isinstance(one, Crop) for one in self._transforms.values())
        has_leaves = is_known and len(rows) == len(self._schemas)
        tensors = getattr(rows, "tensors", ())
        places = list(zip_longest(rows, tensors)) if has_leaves else ()
        return self._sample(self._resolve_one(index), places, self._is_channels_last)

    def keeps_channels_last(self) -> bool:
        """Return True if batches of images are channels_last. Called by the engine."""
        return self._is_channels_last and bool(self._transforms)

    def _sample(
        self,
        row: int,
        places: Sequence[_Place] = (),
        is_channels_last: bool = False,
    ) -> Any:
        self._check_files()
        values = [
            self._value(schema, column, row, place, is_channels_last)
            for schema, column, place in zip_longest(self._schemas, self._columns, places)
        ]
        return join_sample(self._form, self.fields if self._form == "dict" else (), values)

    def _value(
        self,
        schema: FieldSchema,
        column: Column,
        row: int,
        place: _Place | None,
        is_channels_last: bool,
    ) -> Any:
        transform = self._transforms.get(schema.name)
        is_cropped = schema.kind == "array" and _is_plain_crop(transform)
        if schema.kind == "image" or is_cropped:
            out, out_tensor = place or (None, None)
            return open_image(
                column.view(row),
                transform,
                is_encoded=schema.encoding == "file",
                out=out,
                out_tensor=out_tensor,
                is_channels_last=is_channels_last,
            )
        value = self._decode(schema, column.row(row), row)
        return value if transform is None else transform(value)

    def _decode(self, schema: FieldSchema, stored: np.ndarray, row: int) -> Any:
        try:
            return decode_value(schema, stored)
        except UnicodeDecodeError as error:
            path = getattr(self._files[0], "path", None)
            raise Damaged(
                f"field {schema.name!r} of sample {row} is not UTF-8 text: {error}",
                where=path,
                likely="the files were changed, or written by another program.",
                remedy="copy the folder again from its source, or pack again",
                path=path,
                field=schema.name,
            ) from None

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]]:
        """Load several samples. Not available with transforms, whose randomness is per sample."""
        if self._transforms:
            raise AttributeError("samples of a packed set with transforms are loaded one by one")
        if type(self).__getitem__ is not ColumnDataset.__getitem__:
            raise AttributeError("this class overrides __getitem__")
        return self._many

    def _many(self, indices: Sequence[int]) -> list[Any]:
        rows = self._resolve(indices)
        if not self._is_fixed:
            return [self._sample(row) for row in rows.tolist()]
        self._check_files()
        columns = []
        for schema, column in zip(self._schemas, self._columns, strict=True):
            assert isinstance(column, FixedColumn)
            assert schema.shape is not None
            out = np.empty((len(rows), *schema.shape), schema.stored)
            flat = out.reshape(-1).view(np.uint8).reshape(len(rows), schema.row_bytes)
            column.take(rows, flat)
            columns.append(
                [
                    self._decode(schema, np.asarray(one), row)
                    for one, row in zip(out, rows.tolist(), strict=True)
                ]
            )
        names = self.fields
        return [join_sample(self._form, names, values) for values in zip(*columns, strict=True)]

    # -- batches ---------------------------------------------------------------------------------

    @property
    def _is_fixed(self) -> bool:
        return all(isinstance(column, FixedColumn) for column in self._columns)

    @property
    def read_rows(self) -> Callable[[np.ndarray, list[np.ndarray]], None]:
        """Copies whole batches. Exists only if all fields have fixed shapes and no transforms."""
        if not self._is_fixed or self._transforms or sys.byteorder != "little":
            raise AttributeError("only fixed-size fields can be gathered")
        return self._read_rows

    def _read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        """Copy samples (checked to be in range) into rows of bytes, one field at a time."""
        self._check_files()
        rows = index if self._rows is None else self._rows_at(index)
        for column, target in zip(self._columns, out, strict=True):
            assert isinstance(column, FixedColumn)
            column.take(rows, target)

    def _resolve_one(self, index: Any) -> int:
        """Return the row of one sample. Integers take a fifth of the time of :meth:`_resolve`."""
        length = len(self)
        if type(index) is not int or not -length <= index < length:
            return int(self._resolve([index])[0])
        place = index + length if index < 0 else index
        return place if self._rows is None else int(self._rows[place])

    def _resolve(self, indices: Sequence[int]) -> np.ndarray:
        found = np.asarray(indices, dtype=np.int64 if not len(indices) else None)
        length = len(self)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            if all(type(index) is int for index in indices):  # more than 64 bits
                raise IndexError(f"index {max(indices, key=abs)} is out of range for {length}")
            raise TypeError(
                f"a sample index must be an integer, not {indices[0]!r}; for several samples, use "
                "subset() with a slice, range or list of integers"
            )
        wrong = (found < -length) | (found >= length)
        if wrong.any():
            raise IndexError(f"index {found[wrong][0]} is out of range for {length} samples")
        found = found.astype(np.int64, copy=False)
        found = np.where(found < 0, found + length, found)
        return found if self._rows is None else self._rows_at(found)

    def _rows_at(self, index: np.ndarray) -> np.ndarray:
        if isinstance(self._rows, range):
            return self._rows.start + index * self._rows.step
        return np.asarray(self._rows[index])

    # -- subsets --------------------------------------------------------------------------------

    def _like(self: Self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def select(self: Self, *names: str) -> Self:
        """Return the same samples with only these fields, in this order."""
        refuse_unknown_fields(names, self.fields)
        if not names:
            raise BadArgument(
                "select() needs at least one field", remedy=f"select({self.fields[0]!r})"
            )
        places = [self.fields.index(name) for name in names]
        other = self._like()
        other._schemas = tuple(self._schemas[place] for place in places)
        other._columns = [self._columns[place] for place in places]
        other._form = "tuple" if self._form == "single" and len(names) > 1 else self._form
        return other

    def subset(self: Self, indices: Any) -> Self:
        """Return some of the samples, by a slice, a range, or a list of indices."""
        other = self._like()
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        # Negative indices, as in range(-3, 0), become a list of rows.
        is_plain = isinstance(indices, range) and min([*indices[:1], *indices[-1:]], default=0) >= 0
        base = range(len(self)) if self._rows is None else self._rows
        if is_plain and isinstance(base, range):
            self._resolve([*indices[:1], *indices[-1:]])
            start, stop = (base.start + end * base.step for end in (indices.start, indices.stop))
            other._rows = range(start, stop, base.step * indices.step)
            return other
        try:
            listed = list(indices)
        except TypeError:
            raise TypeError(
                f"a subset must be a slice, a range or a list, not {indices!r}"
            ) from None
        other._rows = self._resolve(listed)
        return other

    def shard(self: Self, rank: int, world_size: int) -> Self:
        """Return this rank's part: every ``world_size``-th sample, starting at ``rank``."""
        RankShard(length=len(self), rank=rank, world_size=world_size)  # checks them
        return self.subset(range(rank, len(self), world_size))

    def with_transforms(self: Self, **transforms: Callable[[Any], Any]) -> Self:
        """Apply functions to the values of fields, by field name. They can be random."""
        refuse_unknown_fields(transforms, self.fields)
        other = self._like()
        other._transforms = {**self._transforms, **check_transforms(transforms)}
        return other

    def __add__(self: Self, other: Any) -> Self:
        if not isinstance(other, ColumnDataset):
            return NotImplemented
        if (other._schemas, other._form) != (self._schemas, self._form):
            raise BadArgument(
                f"{self} and {other} have different fields, so they cannot be concatenated",
                remedy="select() the fields that both have",
            )
        if _settings(other._transforms) != _settings(self._transforms):
            raise BadArgument(
                f"{self} and {other} have different transforms, so they cannot be concatenated",
                remedy="(a + b).with_transforms(...), or torch.utils.data.ConcatDataset([a, b])",
            )
        if other._is_channels_last != self._is_channels_last:
            raise BadArgument(
                f"{self} and {other} have different memory formats, so they cannot be concatenated",
                remedy="open both with the same memory_format=",
            )
        if len({hasattr(one, "follow") for one in (*self._files, *other._files)}) > 1:
            raise BadArgument(
                f"{self} and {other} cannot be concatenated, because only one is in object storage",
                remedy="torch.utils.data.ConcatDataset([a, b])",
            )
        joined = self._like()
        joined._files = self._files + other._files
        joined._columns = [
            type(mine)([*mine.shards, *theirs.shards])
            for mine, theirs in zip(self._columns, other._columns, strict=True)
        ]
        if self._rows is not None or other._rows is not None:
            rows = [one._resolve(range(len(one))) for one in (self, other)]
            joined._rows = np.concatenate([rows[0], rows[1] + self._columns[0].length])
        return joined

    @property
    def block_starts(self) -> npt.NDArray[np.int64]:
        """Index of the first sample of each block, followed by the number of samples.

        The blocks of a whole set are those of the files of its largest field. Object storage is
        read in the same blocks.
        """
        sample_bytes = max(1.0, sum(column.mean_bytes for column in self._columns))
        if self._rows is None:
            largest = max(self._columns, key=lambda column: column.mean_bytes)
            block_bytes = _BLOCK_BYTES
            while block_bytes * sample_bytes > _MAX_BLOCK_BYTES * max(1.0, largest.mean_bytes):
                block_bytes //= 2
            return largest.block_starts(block_bytes)
        length, step = len(self), max(1, int(_BLOCK_BYTES // sample_bytes))
        return np.append(np.arange(0, length, step, dtype=np.int64), length)

    def block_order(self, *, seed: int = 0, **keywords: Any) -> BlockOrder:
        """Return a shuffled order that reads the disk in blocks. Pass it as ``sampler=``."""
        if "block_size" not in keywords:
            keywords.setdefault("block_starts", self.block_starts)
        return BlockOrder(len(self), seed=seed, **keywords)


def _is_plain_crop(transform: Any) -> bool:
    """Return True for a transform that does what :func:`open_image` does with it."""
    return isinstance(transform, Crop) and type(transform).__call__ is Crop.__call__


def _settings(transforms: dict[str, Any]) -> dict[str, Any]:
    """Return transforms as comparable values. Our transforms are equal if their settings are."""
    return {
        name: (type(one), vars(one)) if type(one).__module__ == Crop.__module__ else one
        for name, one in transforms.items()
    }


class Packed(ColumnDataset):
    """A packed set as a dataset.

    Args:
        path: The folder that :func:`penstock.pack` wrote, or the address of its copy in object
            storage: ``s3://``, ``gs://``, ``az://``, ``http://``, ``https://`` or ``file://``.
        columns: Load only these fields.
        verify: When to verify checksums: ``"lazy"`` verifies each block when it is first read,
            ``"full"`` verifies all blocks now, ``"off"`` verifies nothing.
        transforms: Functions of a field's value, by field name. See :meth:`with_transforms`.
        read_ahead: Request all rows of a batch from the disk together. None: if the set is larger
            than this machine's memory.
        memory_format: Memory format of images and arrays with a Penstock crop, in batches. None:
            ``torch.channels_last``. See :class:`penstock.ImageFolder`.
        cache_folder: For object storage: where blocks are kept on this machine. None: the user's
            cache folder, or ``PENSTOCK_CACHE_DIR``.
        cache_bytes: Size limit of the cache. None: half of the free disk.
        read_ahead_bytes: How far ahead blocks are downloaded. None: 1 GiB, or half of the cache.
        network_timeout_s: How long to wait for a block before an error. None: 120 s.

    Example:
        >>> import tempfile, penstock
        >>> folder = tempfile.mkdtemp() + "/squares"
        >>> _ = penstock.pack([(i, i * i) for i in range(10)], folder, fields=["n", "square"])
        >>> squares = penstock.Packed(folder)
        >>> squares[3], len(squares), squares.fields
        ((3, 9), 10, ('n', 'square'))
        >>> for n, square in penstock.DataLoader(squares.subset(range(4)), batch_size=4):
        ...     print(square.tolist())
        [0, 1, 4, 9]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | str | None = None,
        verify: str = "lazy",
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
        read_ahead: bool | None = None,
        memory_format: torch.memory_format | None = None,
        cache_folder: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        read_ahead_bytes: int | None = None,
        network_timeout_s: float | None = None,
    ) -> None:
        if "://" in (found := os.fspath(path)):
            from penstock.sources.remote.remote_folder import open_remote

            BadArgument.unless_one_of("verify", verify, VERIFY, "Packed")
            remote = open_remote(
                found,
                verify,
                cache_folder=cache_folder,
                cache_bytes=cache_bytes,
                read_ahead_bytes=read_ahead_bytes,
                network_timeout_s=network_timeout_s,
            )
            self._open(remote, read_ahead)
        else:
            if ":" in found:
                from penstock.sources.remote.address import refuse_single_slash

                refuse_single_slash(found)
            self._open(PackedFolder(found, verify), read_ahead)
        self._is_channels_last = check_memory_format(memory_format, "Packed")
        if columns is not None:
            names = (columns,) if isinstance(columns, str) else columns
            self.__dict__.update(self.select(*names).__dict__)
        if transforms:
            named = check_transforms(transforms, self.fields)
            self.__dict__.update(self.with_transforms(**named).__dict__)

    def _open(self, files: Any, read_ahead: bool | None = None) -> None:
        super()._open(files, read_ahead)
        self.attributes: dict[str, Any] = files.manifest.attributes
        """Attributes of the source, such as ``classes``."""
        self.bad_samples = list(files.manifest.bad)
        """Index in the source and error of each sample that was skipped or replaced."""

    @property
    def path(self) -> str:
        """Path or address of the (first) packed set."""
        return str(self._files[0].path)

    @property
    def follow_epoch(self) -> Callable[..., None]:
        """Publishes a loader's order to the cache. Exists for sets in object storage only."""
        follow: Callable[..., None] = self._files[0].follow  # a local folder has none
        return functools.partial(follow, self)

    @property
    def count_network(self) -> Callable[[], dict[str, Any]]:
        """Counts downloads. Exists for sets in object storage only."""
        count: Callable[[], dict[str, Any]] = self._files[0].count_network
        return count

    @property
    def plan_notes(self) -> list[str]:
        """Notes for the plan of a loader. Exists for sets in object storage only."""
        return [note for files in self._files for note in files.plan_notes]


def open_packed(
    paths: Sequence[str],
    options: ReadOptions,
    *,
    verify: str = "lazy",
    read_ahead: bool | None = None,
    memory_format: torch.memory_format | None = None,
    cache_folder: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    read_ahead_bytes: int | None = None,
    network_timeout_s: float | None = None,
) -> Packed:
    """Return a packed set for :func:`penstock.open_dataset`. It contains no pickles."""
    if not options.decode:
        raise BadArgument(
            "decode=False does not apply to packed sets", remedy="penstock.Packed(path)"
        )
    sets = [
        Packed(
            path,
            columns=options.columns,
            verify=verify,
            transforms=options.transforms,
            read_ahead=read_ahead,
            memory_format=memory_format,
            cache_folder=cache_folder,
            cache_bytes=cache_bytes,
            read_ahead_bytes=read_ahead_bytes,
            network_timeout_s=network_timeout_s,
        )
        for path in paths
    ]
    return functools.reduce(operator.add, sets)


def _restore(
    kind: type[ColumnDataset],
    files: tuple[ColumnFiles, ...],
    read_ahead: bool | None,
    names: tuple[str, ...],
    rows: Any,
    transforms: dict[str, Any],
    form: str,
    is_channels_last: bool,
) -> ColumnDataset:
    """Rebuild a dataset over files that were opened again. Called in a worker."""
    sets = []
    for one in files:
        sets.append(object.__new__(kind))
        sets[-1]._open(one, read_ahead)
    whole = functools.reduce(operator.add, sets).select(*names)
    whole._rows, whole._transforms, whole._form = rows, transforms, form
    whole._is_channels_last = is_channels_last
    return whole
