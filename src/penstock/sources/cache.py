"""``penstock.cached``: samples are computed once, then memory-mapped.

    cache.json         the fields of the samples, and the fingerprint of the dataset
    image.npy          one row per sample, sparse until written
    text.heap, text.spans.npy    for samples of different lengths
    ready.npy          one byte per sample, set when the sample is completely written
    checks.npy         one CRC-32 per sample, verified after a reboot

Workers and ranks fill it at the same time, during the first epoch. A process that has computed a
sample locks it, writes it, and sets its ready byte last. It does not wait for the lock: if another
process holds it, that process writes the sample. A killed worker leaves a sample that is not ready.
If the disk is full, or if samples differ in form, they are computed each time. The run continues.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import secrets
import shutil
import tempfile
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.errors import AlreadyThere, BadStore, CannotPack, CannotWrite
from penstock.machine.host import has_proc, memory_bytes
from penstock.sources.array_files import HEADER_BYTES, MappedArray
from penstock.sources.cache_files import CacheFolder, CacheMemory, TemporaryFiles
from penstock.sources.cache_randomness import CacheRandomness, make_cache_key
from penstock.sources.columns import FixedColumn, ShardRows
from penstock.sources.fields import (
    Field,
    SampleEncoder,
    decode_value,
    find_schema,
    join_sample,
    kinds_of,
    mean_bytes,
    split_sample,
)
from penstock.sources.file_locks import close_and_remove, lock_file
from penstock.sources.manifest import MARK, VERSION, FieldSchema
from penstock.sources.packed_writer import PART_PREFIX, make_fingerprint, read_text, write_whole

_CACHE, _LOCK, _UNFINISHED, _BOOT = "cache.json", ".cache.lock", ".making", "boot"
_READY, _CHECKS = "ready.npy", "checks.npy"


class Cached:
    """A dataset whose samples are cached. See :func:`cached`."""

    def __init__(
        self,
        dataset: Any,
        files: CacheFolder,
        form: str,
        schemas: tuple[FieldSchema, ...],
        randomness: CacheRandomness,
    ) -> None:
        self.dataset = dataset
        self._randomness = randomness
        self._files = files
        self._form = form
        self._schemas = schemas
        self._mutex = threading.Lock()
        self._is_broken = False
        self._ready = files.map(_READY)
        self._encoder = SampleEncoder(form, schemas, [Field()] * len(schemas))
        self._columns: list[FixedColumn | None] = []
        self._spans: dict[str, np.ndarray] = {}
        for schema in schemas:
            if schema.is_ragged:
                self._spans[schema.name] = files.map(f"{schema.name}.spans.npy")
                self._columns.append(None)
            else:
                rows = ShardRows(MappedArray(files.map(f"{schema.name}.npy")))
                self._columns.append(FixedColumn([rows]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, (
            self.dataset,
            self._files,
            self._form,
            self._schemas,
            self._randomness,
        )

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def num_ready(self) -> int:
        """Number of samples in the cache."""
        return int(self._ready.sum())

    @property
    def read_rows(self) -> Callable[[np.ndarray, list[np.ndarray]], None]:
        """Copies whole batches. Exists only when every sample is in the cache."""
        if None in self._columns or not self._ready.all():
            raise AttributeError("some samples are not cached, or they differ in length")
        return self._read_rows

    def _read_rows(self, index: np.ndarray, out: list[np.ndarray]) -> None:
        for column, target in zip(self._columns, out, strict=True):
            assert column is not None
            column.take(index, target)

    def __getitem__(self, index: int) -> Any:
        try:
            place = operator.index(index)
        except TypeError:
            raise TypeError(f"a sample index must be an integer, not {index!r}") from None
        row = place + len(self) if place < 0 else place
        if not 0 <= row < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        if self._ready[row]:
            names = [schema.name for schema in self._schemas]
            try:
                values = list(map(decode_value, self._schemas, self._read(row)))
                return join_sample(self._form, names, values)
            except (ValueError, OSError, OverflowError, MemoryError):
                pass  # a file was changed, so the sample is computed each time
        sample = self._randomness.compute(index, row)
        self.keep(row, sample)
        return sample

    def _read(self, row: int) -> list[np.ndarray]:
        pairs = zip(self._schemas, self._columns, strict=True)
        return [
            self._read_ragged(schema, row) if column is None else column.row(row)
            for schema, column in pairs
        ]

    def _read_ragged(self, schema: FieldSchema, row: int) -> np.ndarray:
        start, *shape = self._spans[schema.name][row].tolist()
        num_bytes = int(np.prod(shape, dtype=np.int64)) * schema.stored.itemsize
        content = bytearray(self._files.read(f"{schema.name}.heap", start, num_bytes))
        found: np.ndarray = np.frombuffer(content, schema.stored).reshape(shape)
        return found

    def keep(self, row: int, sample: Any) -> None:
        """Write a sample unless it is cached, being written, or differs in form from the first."""
        if self._is_broken or self._ready[row]:
            return
        try:
            arrays = self._encoder.encode(sample, row)
        except CannotPack:
            return
        try:
            # The mutex protects against other threads, because file locks belong to the process.
            with self._mutex, self._files.lock(row) as is_mine:
                if is_mine and not self._ready[row]:
                    self._write(row, arrays)
        except OSError as error:
            self._is_broken = True
            warnings.warn(
                f"the cache at {self._files} cannot store more samples: {error}. Samples that are "
                "not cached are computed each time.",
                stacklevel=3,
            )

    def _write(self, row: int, arrays: list[np.ndarray]) -> None:
        files, check = self._files, 0
        for schema, array in zip(self._schemas, arrays, strict=True):
            content = np.ascontiguousarray(array).tobytes()
            check = zlib.crc32(content, check)
            name = schema.name
            if schema.is_ragged:
                start = files.append(f"{name}.heap", content)
                content, name = np.array([start, *array.shape], "<i8").tobytes(), f"{name}.spans"
            files.write(f"{name}.npy", HEADER_BYTES + row * len(content), content)
        files.write(_CHECKS, HEADER_BYTES + 4 * row, check.to_bytes(4, "little"))
        files.write(_READY, HEADER_BYTES + row, b"\x01")

    def forget_damaged(self) -> None:
        """Mark samples with a wrong checksum as not ready, after a crash of the machine."""
        checks = self._files.map(_CHECKS)
        for row in np.flatnonzero(self._ready).tolist():
            check = 0
            try:
                for array in self._read(row):
                    check = zlib.crc32(array.tobytes(), check)
            except (OSError, ValueError):
                check = -1
            if check != int(checks[row]):
                self._files.write(_READY, HEADER_BYTES + row, b"\x00")


def cached(dataset: Any, path: str | os.PathLike[str], *, seed: int = 0) -> Cached:
    """Return a dataset that computes each sample once. The first epoch fills the cache.

    Random values in a sample are frozen with it, so cache the data before its augmentation. They
    depend only on ``seed`` and the index, not on the loader, worker or epoch that computes the
    sample. Reading a cache leaves all generators unchanged, whether the sample is cached or not.

    Args:
        dataset: A dataset with ``len()`` and ``dataset[i]``, and samples that :func:`penstock.pack`
            accepts.
        path: A folder, which all workers and ranks of this machine can fill at the same time, and
            which later runs continue to use. Or ``"ram"``: memory of this process, shared with its
            workers.
        seed: Seeds the random numbers that samples draw while they are computed. Caches of datasets
            with the same class and length draw the same numbers unless their seeds differ.

    Example:
        >>> import tempfile, penstock
        >>> class Slow:
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, i):
        ...         print("computing", i)
        ...         return i * 1.5
        >>> data = penstock.cached(Slow(), "ram")  # loads a few samples
        computing 0
        computing 1
        computing 2
        >>> data[2], data[2]
        (3.0, 3.0)
    """
    if not len(dataset):
        raise CannotPack("the dataset has no samples")
    randomness = CacheRandomness(
        dataset, make_cache_key(seed, type(dataset).__qualname__, len(dataset))
    )
    probes = _probe(len(dataset), randomness)
    form, names, _ = split_sample(probes[0][1])
    split = [split_sample(sample)[1:] for _, sample in probes]
    columns = [[values[found.index(name)] for found, values in split] for name in names]
    schemas = tuple(find_schema(*pair, Field()) for pair in zip(names, columns, strict=True))
    if any(schema.kind == "image" for schema in schemas):
        raise CannotPack(
            "images must be cached as arrays", remedy="np.asarray(image) in the dataset"
        )
    _check_names(schemas)
    content = SampleEncoder(form, schemas, [Field()] * len(schemas)).encode(probes[0][1], 0)
    kind, length = f"{type(dataset).__module__}.{type(dataset).__qualname__}", len(dataset)
    fingerprint = make_fingerprint(
        kind, length, form, schemas, *(array.tobytes() for array in content)
    )
    if os.fspath(path) == "ram":
        files = _make_memory(length * sum(map(mean_bytes, schemas, columns)))
        _make_files(files, length, schemas)
        cache = Cached(dataset, files, form, schemas, randomness)
    else:
        files = CacheFolder(os.path.abspath(path))
        with _opening(files):
            is_new = _begin(files, length, form, schemas, fingerprint)
            cache = Cached(dataset, files, form, schemas, randomness)
            _check_after_boot(cache, files, is_new)
    for index, sample in probes:
        cache.keep(index, sample)
    return cache


def _probe(length: int, randomness: CacheRandomness) -> list[tuple[int, Any]]:
    """Return the first, middle and last sample, except those that differ in form from the first."""
    probes = [(i, randomness.compute(i, i)) for i in sorted({0, length // 2, length - 1})]
    wanted = kinds_of(probes[0][1])
    found = probes[:1]
    for index, sample in probes[1:]:
        with contextlib.suppress(CannotPack):
            found += [(index, sample)] if kinds_of(sample) == wanted else []
    return found


def _make_memory(num_bytes: int) -> CacheFolder:
    """Return memory that workers can open, or temporary files where the system has none."""
    _, free = memory_bytes()
    if free and num_bytes > free:
        raise CannotWrite(
            f"the cache needs about {num_bytes / 1e9:.1f} GB of memory, but only "
            f"{free / 1e9:.1f} GB are free",
            remedy="cached(dataset, 'a folder on a fast disk')",
        )
    if hasattr(os, "memfd_create") and has_proc():  # workers open them by their names in /proc
        return CacheMemory()
    if hasattr(os, "O_TEMPORARY"):  # Windows, which does not delete mapped files
        name = f"penstock-{os.getpid()}-{secrets.token_hex(4)}"
        return TemporaryFiles(os.path.join(tempfile.gettempdir(), name), is_owner=True)
    files = CacheFolder(tempfile.mkdtemp(prefix="penstock-"))
    weakref.finalize(files, shutil.rmtree, files.folder, ignore_errors=True)
    return files


def _make_files(files: CacheFolder, length: int, schemas: tuple[FieldSchema, ...]) -> None:
    for schema in schemas:
        if schema.is_ragged:
            files.make_array(f"{schema.name}.spans.npy", np.dtype("<i8"), (length, 1 + schema.ndim))
            files.make_heap(f"{schema.name}.heap")
        else:
            shape = (length, *(schema.shape or ()))
            files.make_array(f"{schema.name}.npy", schema.stored, shape)
    files.make_array(_CHECKS, np.dtype("<u4"), (length,))
    files.make_array(_READY, np.dtype("|u1"), (length,))


# -- folders -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opening(files: CacheFolder) -> Iterator[None]:
    """Allow one process at a time to create or open a folder. Other processes wait."""
    try:
        os.makedirs(files.folder, exist_ok=True)
        descriptor = os.open(files.path(_LOCK), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CannotWrite(f"{files} cannot be written: {error.strerror}") from error
    try:
        lock_file(descriptor, waits=True)
        yield
    except AlreadyThere:  # the folder is not ours
        close_and_remove(descriptor, files.path(_LOCK))
        raise
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)


def _begin(
    files: CacheFolder, length: int, form: str, schemas: tuple[FieldSchema, ...], fingerprint: str
) -> bool:
    """Create the files of a folder unless they exist. Returns True if it created them.

    Raises:
        BadStore: They belong to a different dataset.
        AlreadyThere: The folder contains other files, which are left alone.
    """
    if os.path.exists(files.path(_CACHE)):
        if _kept_fingerprint(files.path(_CACHE)) != fingerprint:
            raise BadStore(
                f"the cache at {files} belongs to a different dataset, or the dataset has changed",
                remedy=f"remove {files}, or choose a different folder",
            )
        return False
    found = set(os.listdir(files.folder)) - {_LOCK}
    others = sorted(name for name in found if not name.startswith(PART_PREFIX))
    # The mark distinguishes files of a killed process from other files.
    if others and _UNFINISHED not in found:
        raise AlreadyThere(
            f"{files} is not a cache, and it is not empty: it contains {others[0]!r}",
            remedy="cached(dataset, 'an empty folder')",
            path=files.folder,
        )
    write_whole(files.folder, _UNFINISHED, "")
    _make_files(files, length, schemas)
    described = {
        "format": MARK + " (cache)",
        "version": VERSION,
        "fingerprint": fingerprint,
        "form": form,
        "length": length,
        "fields": [vars(schema) for schema in schemas],
    }
    write_whole(files.folder, _CACHE, json.dumps(described, sort_keys=True))
    os.unlink(files.path(_UNFINISHED))
    return True


def _kept_fingerprint(path: str) -> Any:
    """Return the fingerprint in a cache's description, or None if the description is damaged."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("fingerprint") if isinstance(content, dict) else None


def _check_after_boot(cache: Cached, files: CacheFolder, is_new: bool) -> None:
    """Check all samples of a cache that was written before the last reboot."""
    try:
        now = read_text("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        now = _boot_minute()
    before = None
    with contextlib.suppress(OSError, ValueError):  # missing, or not text
        before = read_text(files.path(_BOOT))
    if before == now and now:
        return
    if not is_new:
        cache.forget_damaged()
    write_whole(files.folder, _BOOT, now)


def _boot_minute() -> str:
    """Return the boot time of the machine as text, or ``""`` if the system does not report it."""
    import psutil

    try:
        return str(int(psutil.boot_time()) // 60)
    except (psutil.Error, OSError, RuntimeError):
        return ""


def _check_names(schemas: tuple[FieldSchema, ...]) -> None:
    """Refuse fields whose files would collide with each other or with the cache's own files."""
    owners = {_READY: "the cache itself", _CHECKS: "the cache itself"}
    for schema in schemas:
        stem = schema.name.lower()
        for file in (f"{stem}.spans.npy", f"{stem}.heap") if schema.is_ragged else (f"{stem}.npy",):
            if file in owners:
                raise CannotPack(
                    f"field {schema.name!r} would be stored in {file}, which belongs to "
                    f"{owners[file]}",
                    remedy="give the field a different name in dataset[i]",
                    field=schema.name,
                )
            owners[file] = f"field {schema.name!r}"
