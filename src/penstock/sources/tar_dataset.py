"""WebDataset archives as an indexed dataset: ``open_dataset("shards/*.tar")``.

A sample is a dict: ``__key__``, and one entry for each file with this key, as in WebDataset.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from penstock.errors import BadImage, BadStore, Damaged, MissingExtra
from penstock.sources.blocks import (
    BlockReader,
    BlockTouches,
    ReadOptions,
    refuse_unknown_fields,
)
from penstock.sources.member_decoders import (
    MemberDecoder,
    is_cropped_inside,
    make_decoder,
    refuse_pickles,
)
from penstock.sources.source_files import SourceFiles
from penstock.sources.tar_headers import BLOCK
from penstock.sources.tar_index import (
    TarIndex,
    encode_name,
    load_index,
    open_indexes,
)

if TYPE_CHECKING:
    from penstock.sources.remote.object_files import ObjectFiles

KEY, URL = "__key__", "__url__"


class TarSpan(NamedTuple):
    """Adjacent samples of an archive: their bytes, and the places of their fields."""

    archive: int
    first: int
    start: int
    data: memoryview
    keys: list[bytes]
    first_fields: list[int]
    offsets: list[int]
    sizes: list[int]
    checks: list[int]
    names: list[int]

    @property
    def nbytes(self) -> int:
        return len(self.data) + 128 * len(self.offsets)

    def key(self, row: int) -> str:
        return self.keys[row].decode("utf-8", "surrogateescape")


class FieldStep(NamedTuple):
    """How a field is decoded."""

    name: str
    encoded: bytes
    decode: MemberDecoder
    transform: Callable[[Any], Any] | None


class TarDataset(BlockReader):
    """Samples of tar archives in WebDataset's layout. See :func:`penstock.open_dataset`.

    Args:
        paths: The archives. Or those in object storage, open.
        options: ``__key__`` and ``__url__`` (the archive's path) are columns too. By default, a
            sample has all fields and ``__key__``.
    """

    def __init__(self, paths: Sequence[str] | ObjectFiles, options: ReadOptions) -> None:
        self._files: SourceFiles | ObjectFiles
        indexes: list[tuple[TarIndex, str | None]]
        if isinstance(paths, Sequence):
            indexes = open_indexes(paths)
            self._files = SourceFiles(paths, stamps=[index.stamp for index, _ in indexes])
        else:
            from penstock.sources.remote.object_indexes import open_tar_indexes

            self._files, indexes = paths, open_tar_indexes(paths)
        paths = self._files.paths
        self._index_paths = [place for _, place in indexes]
        self._indexes: dict[int, TarIndex] = {n: index for n, (index, _) in enumerate(indexes)}
        self._first_blocks = [0]
        self._first_samples = [0]
        starts = [np.zeros(1, np.int64)]
        for index, _ in indexes:
            starts.append(index.block_starts[1:] + self._first_samples[-1])
            self._first_blocks.append(self._first_blocks[-1] + len(index.block_starts) - 1)
            self._first_samples.append(self._first_samples[-1] + len(index))
        super().__init__(np.concatenate(starts), transforms=options.transforms)
        if not self._length:
            raise BadStore(
                f"{self._shown()} has no samples",
                likely="its files have no names such as 0001.jpg and 0001.cls.",
                path=paths[0],
            )
        self._refuse_split_samples()
        self.fields: tuple[str, ...] = self._choose_fields(options)
        """The fields that occur in the archives, or the chosen ones."""
        self._columns = None if options.columns is None else self.fields
        self._is_decoded = options.decode
        self._allow_pickle = options.allow_pickle
        self._prepare()

    def _prepare(self) -> None:
        """Make what does not travel to other processes."""
        self._decoders: dict[str, MemberDecoder] = {}
        self._steps: dict[int, list[FieldStep | None]] = {}
        self._touches = BlockTouches()

    def _choose_fields(self, options: ReadOptions) -> tuple[str, ...]:
        present = dict.fromkeys(name for one in self._indexes.values() for name in one.field_names)
        known = (KEY, *present)
        names = known if options.columns is None else (*known, URL)
        chosen = options.choose(names, self._shown())
        refuse_unknown_fields(self._transforms, (*known, URL))
        if options.decode and not options.allow_pickle:
            refuse_pickles(chosen, self._shown())
        return tuple(chosen)

    def _refuse_split_samples(self) -> None:
        """Raise if the files of a sample are at the end of one archive and the start of another."""
        filled = [n for n in range(len(self._files)) if len(self._indexes[n])]
        for one, other in pairwise(filled):
            left, right = self._indexes[one], self._indexes[other]
            if left.key(len(left) - 1) != right.key(0):
                continue
            fields = [
                {index.field_names[name] for name in index.names[first:last].tolist()}
                for index, (first, last) in (
                    (left, left.first_fields[-2:].tolist()),
                    (right, right.first_fields[:2].tolist()),
                )
            ]
            if fields[0].isdisjoint(fields[1]):
                raise BadStore(
                    f"sample {right.key(0)!r} is split over two archives: "
                    f"{', '.join(sorted(fields[0]))} is in {self._files.paths[one]}, and "
                    f"{', '.join(sorted(fields[1]))} in {self._files.paths[other]}",
                    likely="the archives were split by size, as by `split` or `tar -M`.",
                    remedy="write archives that hold whole samples",
                    path=self._files.paths[other],
                )

    def __repr__(self) -> str:
        return f"TarDataset({len(self)} samples of {', '.join(self.fields)} in {self._shown()})"

    def _shown(self) -> str:
        paths = self._files.paths
        return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} other archives"

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Indexes on disk are opened again. Those that could not be stored travel.
        kept = {n: one for n, one in self._indexes.items() if self._index_paths[n] is None}
        fresh: dict[str, Any] = {"_decoders": {}, "_steps": {}, "_touches": BlockTouches()}
        return {**state, **fresh, "_indexes": kept}

    # -- samples ---------------------------------------------------------------------------------

    def _index(self, archive: int) -> TarIndex:
        index = self._indexes.get(archive)
        if index is None:
            place, stamp = self._index_paths[archive], self._files.stamps[archive]
            assert place is not None
            index = load_index(place, stamp)
            if index is None:
                raise Damaged(
                    f"the index {place} has changed since the dataset was opened",
                    likely=f"{self._files.paths[archive]} was replaced and indexed again, or the "
                    "index was deleted.",
                    remedy="open the dataset again",
                    path=place,
                )
            self._indexes[archive] = index
        return index

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        """Return samples of a block. The first ones are read alone, then the whole block."""
        cache = self._cached_blocks()
        span: TarSpan | None = cache.get(block)
        if span is None and self._is_wanted(block, len(rows)):
            span = self._read_block(block)
            cache.put(block, span)
        if span is not None:
            return [self._sample(span, row) for row in rows]
        archive, first = self._locate(block)
        return [
            self._sample(self._read_span(archive, first + row, first + row + 1), 0) for row in rows
        ]

    def _is_wanted(self, block: int, num_rows: int) -> bool:
        """Return True if the block should be read whole."""
        num_samples = int(self._block_starts[block + 1] - self._block_starts[block])
        return self._touches.add(block, num_rows, num_samples)

    def _locate(self, block: int) -> tuple[int, int]:
        """Return the archive of a block, and the number of its first sample in the archive."""
        archive = bisect_right(self._first_blocks, block) - 1
        return archive, int(self._block_starts[block]) - self._first_samples[archive]

    def _read_block(self, block: int) -> TarSpan:
        archive, first = self._locate(block)
        num_samples = int(self._block_starts[block + 1] - self._block_starts[block])
        return self._read_span(archive, first, first + num_samples)

    def _read_span(self, archive: int, first: int, last: int) -> TarSpan:
        index = self._index(archive)
        try:
            start, end = index.extent(first, last)
            first_fields = index.first_fields[first : last + 1].tolist()
            keys = index.keys(first, last)
        except IndexError:
            raise self._wrong_index(archive) from None
        fields = slice(first_fields[0], first_fields[-1])
        offsets, sizes = index.offsets[fields].tolist(), index.sizes[fields].tolist()
        names = index.names[fields].tolist()
        is_valid = (
            0 <= start < end <= self._files.stamps[archive].size
            and all(map(lt, first_fields, first_fields[1:]))
            and len(names) == first_fields[-1] - first_fields[0]
            and max(names) < len(index.field_names)
            and min(offsets) >= start + BLOCK
        )
        if not is_valid:
            raise self._wrong_index(archive)
        checks = index.find_checks(first_fields, sizes)
        data = memoryview(self._files.read(archive, start, end - start))
        rows = [one - first_fields[0] for one in first_fields]
        return TarSpan(archive, first, start, data, keys, rows, offsets, sizes, checks, names)

    def _sample(self, span: TarSpan, row: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self._columns is None:
            values[KEY] = span.key(row)
        steps = self._steps.get(span.archive) or self._make_steps(span.archive)
        data, start, key = span.data, span.start, span.keys[row]
        for field in range(span.first_fields[row], span.first_fields[row + 1]):
            step = steps[span.names[field]]
            if step is None:
                continue
            place = span.offsets[field] - start
            check = crc32(data[place - BLOCK : place])
            if crc32(key + step.encoded, check) != span.checks[field]:
                raise self._wrong_header(span, row, field)
            try:
                value = step.decode(data[place : place + span.sizes[field]])
            except (MissingExtra, MemoryError):
                raise
            except Exception as error:
                raise self._undecoded(span, row, field, error) from error
            values[step.name] = value if step.transform is None else step.transform(value)
        return values if self._columns is None else self._select(values, span, row)

    def _select(self, values: dict[str, Any], span: TarSpan, row: int) -> dict[str, Any]:
        """Return the chosen fields in their order."""
        assert self._columns is not None
        for name in self._columns:
            if name in values:
                continue
            if name == KEY:
                values[name] = span.key(row)
            elif name == URL:
                values[name] = self._files.paths[span.archive]
            else:
                raise Damaged(
                    f"sample {self._number(span, row)} has no field {name!r}",
                    where=self._where(span, row),
                    likely="the samples do not all have the same fields.",
                    remedy="choose fields that all samples have, or load with on_error='skip'",
                )
        return {name: values[name] for name in self._columns}

    def _make_steps(self, archive: int) -> list[FieldStep | None]:
        """Return how each field of an archive is decoded. None: it is not loaded."""
        names = self._index(archive).field_names
        steps = [
            self._make_step(name) if self._columns is None or name in self._columns else None
            for name in names
        ]
        self._steps[archive] = steps
        return steps

    def _make_step(self, name: str) -> FieldStep:
        transform = self._transforms.get(name)
        encoded = encode_name(name)
        if not self._is_decoded:
            return FieldStep(name, encoded, bytes, transform)
        decoder = self._decoders.get(name)
        if decoder is None:
            decoder = make_decoder(name, transform, allow_pickle=self._allow_pickle)
            self._decoders[name] = decoder
        rest = None if is_cropped_inside(name, transform) else transform
        return FieldStep(name, encoded, decoder, rest)

    def find_extents(
        self, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the archive, start and end of samples, and which one each is. For the cache."""
        starts, ends = np.empty_like(rows), np.empty_like(rows)
        first_samples = np.asarray(self._first_samples)
        archives = first_samples.searchsorted(rows, side="right") - 1
        for archive in np.unique(archives).tolist():
            mine = archives == archive
            samples = rows[mine] - first_samples[archive]
            starts[mine], ends[mine] = self._index(archive).extents(samples)
        return archives, starts, ends, np.arange(len(rows))

    # -- errors ----------------------------------------------------------------------------------

    def _wrong_index(self, archive: int) -> Damaged:
        return Damaged(
            f"the index of {self._files.paths[archive]} is damaged",
            remedy=f"delete {self._index_paths[archive]} and open the dataset again",
            path=self._files.paths[archive],
        )

    def _wrong_header(self, span: TarSpan, row: int, field: int) -> Damaged:
        name = self._index(span.archive).field_names[span.names[field]]
        return Damaged(
            f"the header of {name!r} of sample {self._number(span, row)} is not the one that was "
            "indexed",
            where=self._where(span, row, span.offsets[field]),
            likely="the archive or its index was changed or damaged.",
            remedy=f"delete {self._index_paths[span.archive]} and open the dataset again",
            path=self._files.paths[span.archive],
        )

    def _undecoded(self, span: TarSpan, row: int, field: int, error: Exception) -> Exception:
        name = self._index(span.archive).field_names[span.names[field]]
        where = self._where(span, row, span.offsets[field])
        path = self._files.paths[span.archive]
        if isinstance(error, BadImage):
            return BadImage(
                error.what, where=where, likely=error.likely, remedy=error.remedy, path=path
            )
        return Damaged(
            f"field {name!r} of sample {self._number(span, row)} cannot be decoded: "
            f"{type(error).__name__}: {error}",
            where=where,
            path=path,
        )

    def _number(self, span: TarSpan, row: int) -> int:
        return self._first_samples[span.archive] + span.first + row

    def _where(self, span: TarSpan, row: int, offset: int | None = None) -> str:
        key = span.key(row)
        place = "" if offset is None else f", byte {offset}"
        return f"{self._files.paths[span.archive]}, key {key!r}{place}"


def open_tars(paths: Sequence[str] | ObjectFiles, options: ReadOptions) -> TarDataset:
    """Return a dataset over archives for :func:`penstock.open_dataset`."""
    for path in paths if isinstance(paths, Sequence) else ():
        if os.path.isdir(path):
            raise BadStore(f"{path} has no .tar files", remedy="a folder of .tar files", path=path)
    return TarDataset(paths, options)
