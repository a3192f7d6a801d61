"""Computed once, mapped from then on: a cache that fills while the first epoch runs.

    cache.json         what the samples are, and of which dataset
    image.npy          a row for each sample, sparse until it is written
    text.heap, text.spans.npy    for samples that differ in length
    ready.npy          a byte for each sample: set when all of it is written
    checks.npy         a CRC-32 for each, looked at after the machine was started anew

Workers and ranks fill it at once. Who computes a sample locks it (not waiting: who comes second
computes for himself), writes, and sets its byte last. A killed worker leaves a sample that is not
ready; a disk that is full, or samples of an odd form, cost the cache, never the run.
"""

from __future__ import annotations

import json
import operator
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import BadStore, CannotPack
from penstock.order.global_generators import preserved_generators
from penstock.order.sample_randomness import SampleRandomness
from penstock.sources.cache_storage import DiskPlace, MemoryPlace, Place
from penstock.sources.columns import FixedColumn, Part, value_of
from penstock.sources.fields import Encoder, Field, find_schema, kind_of, mean_bytes, split_sample
from penstock.sources.manifest import MARK, VERSION, FieldSchema
from penstock.sources.npy_files import HEADER_BYTES
from penstock.sources.packed_writer import make_fingerprint

_CACHE = "cache.json"
_READY, _CHECKS = "ready.npy", "checks.npy"


class Cached:
    """A dataset whose samples are kept; see :func:`cached`."""

    def __init__(
        self, dataset: Any, place: Place, form: str, schemas: tuple[FieldSchema, ...]
    ) -> None:
        self.dataset = dataset
        self._place = place
        self._form = form
        self._schemas = schemas
        self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, (self.dataset, self._place, self._form, self._schemas)

    def _open(self) -> None:
        self._busy: set[int] = set()
        self._mutex = threading.Lock()
        self._is_broken = False
        ready = self._place.map(_READY)
        self._ready = ready.array
        self._encoders = [Encoder(schema, Field(), None) for schema in self._schemas]
        self._columns: list[FixedColumn | None] = []
        for schema in self._schemas:
            if schema.is_ragged:
                self._columns.append(None)
                continue
            mapped = self._place.map(f"{schema.name}.npy")
            self._columns.append(FixedColumn([Part(mapped.array)]))
        self._spans = {
            schema.name: self._place.map(f"{schema.name}.spans.npy").array
            for schema in self._schemas
            if schema.is_ragged
        }

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def num_ready(self) -> int:
        """Samples that need not be computed again."""
        return int(self._ready.sum())

    @property
    def read_rows(self) -> Callable[[np.ndarray, list[np.ndarray]], None]:
        """Whole batches, once every sample is there."""
        if None in self._columns or not self._ready.all():
            raise AttributeError("not all samples are there, or they differ in length")
        return self._read_rows

    def _read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        for column, target in zip(self._columns, out, strict=True):
            assert column is not None
            column.take(index, target)

    def __getitem__(self, index: int) -> Any:
        try:
            place = operator.index(index)
        except TypeError:
            raise TypeError(f"samples are found by whole numbers, not {index!r}") from None
        row = place + len(self) if place < 0 else place
        if not 0 <= row < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        if self._ready[row]:
            return self._read(row)
        sample = self.dataset[index]
        if not self._is_broken:
            self._keep(row, sample)
        return sample

    # -- reading ---------------------------------------------------------------------------------

    def _read(self, row: int) -> Any:
        values = []
        for schema, column in zip(self._schemas, self._columns, strict=True):
            found = self._ragged(schema, row) if column is None else column.row(row)
            values.append(value_of(schema, found))
        if self._form == "dict":
            return dict(zip((schema.name for schema in self._schemas), values, strict=True))
        return values[0] if self._form == "single" else tuple(values)

    def _ragged(self, schema: FieldSchema, row: int) -> np.ndarray:
        start, *shape = self._spans[schema.name][row].tolist()
        num_bytes = int(np.prod(shape, dtype=np.int64)) * schema.stored.itemsize
        content = bytearray(self._place.read(f"{schema.name}.heap", start, num_bytes))
        found: np.ndarray = np.frombuffer(content, schema.stored).reshape(shape)
        return found

    # -- keeping ---------------------------------------------------------------------------------

    def _keep(self, row: int, sample: Any) -> None:
        try:
            arrays = self._encoded(sample)
        except CannotPack:
            return  # of another form than the first: it is computed each time
        with self._mutex:
            if row in self._busy:
                return
            self._busy.add(row)
        try:
            with self._place.lock(row) as is_mine:
                if is_mine and not self._ready[row]:
                    self._write(row, arrays)
        except OSError as error:
            self._is_broken = True
            warnings.warn(
                f"the cache at {self._place} takes no more samples: {error}. They are computed "
                "each time from now on.",
                stacklevel=3,
            )
        finally:
            with self._mutex:
                self._busy.discard(row)

    def _encoded(self, sample: Any) -> list[np.ndarray]:
        form, names, values = split_sample(sample)
        if form == "dict":
            wanted = [schema.name for schema in self._schemas]
            found = dict(zip(names, values, strict=True))
            values = [found[name] for name in wanted] if set(wanted) == set(names) else []
        if form != self._form or len(values) != len(self._encoders):
            raise CannotPack("another form")
        pairs = zip(self._encoders, values, strict=True)
        return [encoder.encode(value) for encoder, value in pairs]

    def _write(self, row: int, arrays: list[np.ndarray]) -> None:
        check = 0
        for schema, array in zip(self._schemas, arrays, strict=True):
            content = np.ascontiguousarray(array).tobytes()
            check = zlib.crc32(content, check)
            if not schema.is_ragged:
                at = HEADER_BYTES + row * schema.row_bytes
                self._place.write(f"{schema.name}.npy", at, content)
                continue
            start = self._place.append(f"{schema.name}.heap", content)
            span = np.array([start, *array.shape], "<i8").tobytes()
            self._place.write(f"{schema.name}.spans.npy", HEADER_BYTES + row * len(span), span)
        self._place.write(_CHECKS, HEADER_BYTES + 4 * row, check.to_bytes(4, "little"))
        self._place.write(_READY, HEADER_BYTES + row, b"\x01")

    def _check_all(self) -> None:
        """Forget what does not have its checksum: the machine went down while it was written."""
        checks = self._place.map(_CHECKS).array
        for row in np.flatnonzero(self._ready).tolist():
            check = 0
            try:
                for schema, column in zip(self._schemas, self._columns, strict=True):
                    found = self._ragged(schema, row) if column is None else column.row(row)
                    check = zlib.crc32(found.tobytes(), check)
            except (OSError, ValueError):
                check = -1
            if check != int(checks[row]):
                self._place.write(_READY, HEADER_BYTES + row, b"\x00")


def cached(dataset: Any, path: str | os.PathLike[str]) -> Cached:
    """A dataset that computes each sample once: the first epoch fills, later ones map.

    What is random in a sample is frozen with it: cache what comes before the augmentation.

    Args:
        dataset: With ``len()`` and ``dataset[i]``; samples as :func:`penstock.pack` takes them.
        path: A folder, which all workers and ranks of this machine may fill at once, and the next
            run goes on with; or ``"ram"``: memory of this process, seen by its workers.

    Example:
        >>> import tempfile, penstock
        >>> class Slow:
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, i):
        ...         print("computing", i)
        ...         return i * 1.5
        >>> data = penstock.cached(Slow(), "ram")  # looks at a few samples
        computing 0
        computing 1
        computing 2
        >>> data[2], data[2]
        (3.0, 3.0)
    """
    probes = _probe(dataset)
    form, names, _ = split_sample(probes[0][1])
    wanted = _form_of(probes[0][1])
    probes = [probe for probe in probes if _form_of(probe[1]) == wanted]
    taken = [split_sample(one)[1:] for _, one in probes]
    columns = [[values[found.index(name)] for found, values in taken] for name in names]
    schemas = tuple(
        find_schema(name, column, Field()) for name, column in zip(names, columns, strict=True)
    )
    if any(schema.kind == "image" for schema in schemas):
        raise CannotPack("images are cached as arrays", remedy="np.asarray(image) in the dataset")
    _check_names(schemas)
    digest = [
        Encoder(s, Field(), None).encode(c[0]).tobytes()
        for s, c in zip(schemas, columns, strict=True)
    ]
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    fingerprint = make_fingerprint(kind, len(dataset), form, schemas, *digest)
    sample_bytes = sum(map(mean_bytes, schemas, columns))
    place: Place
    if os.fspath(path) == "ram":
        place = MemoryPlace(sample_bytes * len(dataset))
    else:
        place = DiskPlace(os.path.abspath(path))
    with place.making():
        is_new = _begin(place, len(dataset), form, schemas, fingerprint)
        cache = Cached(dataset, place, form, schemas)
        if not is_new and place.was_down():
            cache._check_all()
        place.note_up()
    for index, sample in probes:
        if not cache._ready[index]:
            cache._keep(index, sample)
    return cache


def _probe(dataset: Any) -> list[tuple[int, Any]]:
    if not len(dataset):
        raise CannotPack("the dataset has no samples")
    places = sorted({0, len(dataset) // 2, len(dataset) - 1})
    with preserved_generators():
        randomness = SampleRandomness(0)
        return [(i, randomness.call(dataset.__getitem__, i, i)) for i in places]


def _form_of(sample: Any) -> Any:
    """What two samples must share to lie in one cache; None: this one cannot."""
    try:
        form, names, values = split_sample(sample)
        kinds = [kind_of(value, name) for name, value in zip(names, values, strict=True)]
    except CannotPack:
        return None
    sizes = [getattr(value, "ndim", 0) for value in values]
    return form, sorted(zip(names, kinds, sizes, strict=True))


def _begin(
    place: Place, length: int, form: str, schemas: tuple[FieldSchema, ...], fingerprint: str
) -> bool:
    """Make the files, unless they are there; were they made? Raises: BadStore: for another."""
    described = {
        "format": MARK + " (cache)",
        "version": VERSION,
        "fingerprint": fingerprint,
        "form": form,
        "length": length,
        "fields": [vars(schema) for schema in schemas],
    }
    text = json.dumps(described, sort_keys=True)
    before = place.described(_CACHE)
    if before is not None:
        if json.loads(before).get("fingerprint") != fingerprint:
            raise BadStore(
                f"the cache at {place} belongs to another dataset, or this one has changed",
                remedy=f"remove {place}, or choose another folder",
            )
        return False
    with place.beginning():
        for schema in schemas:
            if schema.is_ragged:
                width = 1 + schema.ndim
                place.make(f"{schema.name}.spans.npy", np.dtype("<i8"), (length, width))
                place.make_heap(f"{schema.name}.heap")
            else:
                place.make(f"{schema.name}.npy", schema.stored, (length, *(schema.shape or ())))
        place.make(_CHECKS, np.dtype("<u4"), (length,))
        place.make(_READY, np.dtype("|u1"), (length,))
        place.describe(_CACHE, text)
    return True


def _check_names(schemas: tuple[FieldSchema, ...]) -> None:
    """Each file has one owner: a field called "ready" would be written over by our own."""
    owners = {_READY: "the cache itself", _CHECKS: "the cache itself"}
    for schema in schemas:
        stem = schema.name.lower()
        for file in (f"{stem}.spans.npy", f"{stem}.heap") if schema.is_ragged else (f"{stem}.npy",):
            if file in owners:
                raise CannotPack(
                    f"field {schema.name!r} would be kept in {file}, which is of {owners[file]}",
                    remedy="give the field another name in dataset[i]",
                    field=schema.name,
                )
            owners[file] = f"field {schema.name!r}"
