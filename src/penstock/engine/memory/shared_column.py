"""Columns: millions of small objects, stored as bytes in shared memory.

    ColumnWriter.add(chunk) ... finish() -> SharedColumn   one file: elements, offsets, index
    SharedColumn.read(place) -> object                     in any process that maps the file

Every Python object contains a reference count. Reading a list of objects therefore writes to all of
its pages, and each forked worker ends up with a copy. Bytes in a file have no reference counts. A
column of one exact type (``str``, ``bytes``, 64-bit ``int`` or ``float``) is stored without pickle.
In a mixed column, elements of other types are pickled one by one, and a tag byte per element gives
its type.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from multiprocessing import context as mp_context
from types import FunctionType
from typing import Any, ClassVar, NoReturn

import cloudpickle

from penstock.engine.memory.shared_file import FileHandle, SharedFile

TEXT, BYTES, INT, FLOAT, PICKLE, MIXED = range(6)
_CODES: dict[type, int] = {str: TEXT, bytes: BYTES, int: INT, float: FLOAT}
_ARRAYS = {INT: "q", FLOAT: "d"}
_WIDTH = 8
_MAX_CHUNK = 4096
_NUM_SHOWN = 3
_CHUNK_BYTES = 1 << 20
"""Approximate size of a chunk of elements. It bounds the memory needed to build a column."""


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")  # file names can contain lone surrogates


_ENCODERS: tuple[Callable[[Any], bytes], ...] = (
    _encode_text,
    bytes,
    lambda number: number.to_bytes(_WIDTH, sys.byteorder, signed=True),
    struct.Struct("d").pack,
)
_DECODERS: tuple[Callable[[bytes], Any], ...] = (
    _decode_text,
    bytes,
    lambda raw: int.from_bytes(raw, sys.byteorder, signed=True),
    lambda raw: struct.unpack("d", raw)[0],
    pickle.loads,
)


@dataclass(frozen=True)
class ColumnLayout:
    """Offsets of the parts of a column in its file."""

    kind: int
    count: int
    offsets_at: int
    tags_at: int
    definitions_at: int
    index_at: int
    num_bytes: int
    token: int


class SharedColumn:
    """Immutable objects in shared memory, read by position.

    Pickled as a descriptor for worker processes, and as a copy of its bytes everywhere else.
    """

    def __init__(
        self, file: SharedFile, layout: ColumnLayout, definitions: Definitions | None = None
    ) -> None:
        self.file = file
        self.map = layout
        self._mapping = file.map_readonly(layout.num_bytes)
        self._bytes = memoryview(self._mapping)
        if definitions is None:
            blob = self._bytes[layout.definitions_at : layout.index_at]
            definitions = Definitions(layout.token, blob)
        self._definitions = _living.setdefault(layout.token, definitions)  # copies share them
        self.read = self._make_reader()

    @property
    def index(self) -> memoryview:
        """The ``index`` passed to :meth:`ColumnWriter.finish`, as 64-bit integers."""
        return self._bytes[self.map.index_at : self.map.num_bytes].cast("q")

    def _make_reader(self) -> Callable[[int], Any]:
        """Return ``read(place)``, which returns one element as a new object."""
        kind, count = self.map.kind, self.map.count
        if kind in _ARRAYS:
            return self._bytes[: _WIDTH * count].cast(_ARRAYS[kind]).__getitem__  # type: ignore[call-overload, no-any-return]
        data = self._mapping  # slicing an mmap to bytes is faster than slicing a memoryview
        start = self.map.offsets_at
        offsets = self._bytes[start : start + _WIDTH * (count + 1)].cast("q")
        tags = self._bytes[self.map.tags_at : self.map.tags_at + count]

        def read_text(place: int) -> str:
            raw = data[offsets[place] : offsets[place + 1]]
            try:
                return raw.decode()
            except UnicodeDecodeError:
                return _decode_text(raw)

        if kind == TEXT:
            return read_text
        if kind == MIXED:
            return lambda place: _DECODERS[tags[place]](data[offsets[place] : offsets[place + 1]])
        decode = _DECODERS[kind]
        return lambda place: decode(data[offsets[place] : offsets[place + 1]])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spawning = mp_context.get_spawning_popen()
        if spawning is not None and not getattr(spawning, "is_full", False):
            return _attach, (_passport(self, spawning), self.map)
        content = self._bytes[: self.map.num_bytes]
        if protocol < 5:
            return _copied, (bytes(content), self.map)
        return _copied, (pickle.PickleBuffer(content), self.map)


def _passport(column: SharedColumn, spawning: Any) -> Any:
    """Return what a new worker needs to open the column's file: a path or a descriptor."""
    kept = getattr(spawning, "kept", None)
    if kept is not None:
        kept.append(column)  # its descriptor must stay open while workers can be started
    if column.file.path:  # pragma: no cover
        return column.file.handle()
    return spawning.DupFd(spawning.duplicate_for_child(column.file.fd))


def _attach(passport: Any, layout: ColumnLayout) -> SharedColumn:
    if not isinstance(passport, FileHandle):
        passport = FileHandle(fd=passport.detach())
    return SharedColumn(SharedFile.attach(passport), layout)


def _copied(content: Any, layout: ColumnLayout) -> SharedColumn:
    file = SharedFile.create()
    file.append(content)
    file.settle()
    return SharedColumn(file, layout)


class ReadOnlyCollection:
    """Base class of SharedList and SharedDict. Rejects every modification."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    _plain_name: ClassVar[str]
    _mutators: ClassVar[frozenset[str]]

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # immutable, and each read returns new objects

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(self._refusal("item assignment"))

    def __delitem__(self, key: Any) -> NoReturn:
        raise TypeError(self._refusal("item deletion"))

    def __getattr__(self, name: str) -> NoReturn:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in self._mutators:
            message = self._refusal(f"{name}()")
        raise AttributeError(message, name=name, obj=self)

    def _refusal(self, what: str) -> str:
        kind, plain = type(self).__name__, self._plain_name
        return (
            f"{kind} does not support {what}: it is immutable, because workers read the same "
            f"memory. Modify a plain {plain} (shared.copy()) before you create the loader, and "
            f"pass it to {kind}()."
        )


def abbreviated(items: Iterable[str], num_items: int) -> str:
    """Return the first items of a ``repr`` and the number of remaining items."""
    shown = list(islice(items, _NUM_SHOWN))
    if num_items > len(shown):
        shown.append(f"... {num_items - len(shown):,} more")
    return ", ".join(shown)


# -- classes and functions that elements share -----------------------------------------------------


class Definitions:
    """Classes and functions pickled by value: stored once, referenced by each element.

    A class from ``__main__`` takes about a kilobyte and 0.7 ms by value.
    """

    def __init__(self, token: int, blob: memoryview | None = None) -> None:
        self.token = token
        self._blob = blob if blob is not None and blob.nbytes else None
        self._objects: list[Any] = []
        self._places: dict[int, int] = {}

    def find(self, definition: Any) -> int | None:
        return self._places.get(id(definition))

    def add(self, definition: Any) -> int:
        self._objects.append(definition)
        return self._places.setdefault(id(definition), len(self._objects) - 1)

    def __getitem__(self, place: int) -> Any:
        if self._blob is not None:
            names, by_value = pickle.loads(self._blob)
            found = [name and _find(*name) for name in names]
            if None in found:
                made = pickle.loads(by_value)
                found = [made[at] if one is None else one for at, one in enumerate(found)]
            self._objects, self._blob = found, None
        return self._objects[place]

    def dump(self) -> bytes:
        """Pickle the definitions by value, with names so that the script finds its own classes."""
        if not self._objects:
            return b""
        names = [(one.__module__, one.__qualname__) for one in self._objects]
        pairs = zip(names, self._objects, strict=True)
        own = [name if _find(*name) is one else None for name, one in pairs]
        return pickle.dumps((own, cloudpickle.dumps(self._objects, protocol=5)), protocol=5)


def _find(module: str, qualname: str) -> Any:
    """Return the object with this name in this process, or None."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


_living: weakref.WeakValueDictionary[int, Definitions] = weakref.WeakValueDictionary()


def _definition(token: int, place: int) -> Any:
    return _living[token][place]


class _ElementPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, definitions: Definitions) -> None:
        super().__init__(file, protocol=5)
        self._definitions = definitions

    def reducer_override(self, obj: Any) -> Any:
        place = self._definitions.find(obj)
        if place is not None:
            return _definition, (self._definitions.token, place)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            from penstock.engine.memory.tensor_reducers import reduce_tensor

            reduced = reduce_tensor(obj)
            if reduced is not None:
                return reduced
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, (type, FunctionType)):
            return _definition, (self._definitions.token, self._definitions.add(obj))
        return reduced


# -- writing ---------------------------------------------------------------------------------------


def chunks_of(items: Iterable[Any], size: Callable[[], int]) -> Iterator[list[Any]]:
    """Yield the items in lists of ``size()``, which is called for each list."""
    stream = iter(items)
    while chunk := list(islice(stream, size())):
        yield chunk


class ColumnWriter:
    """Writes a column chunk by chunk. Holds one chunk and eight bytes per element."""

    def __init__(self) -> None:
        self.count = 0
        self._file = SharedFile.create()
        self._kind: int | None = None
        self._offsets = array("q", [0])
        self._tags = bytearray()
        self._end = 0
        # Not from `random`, which would advance the user's generator.
        self._definitions = Definitions(int.from_bytes(os.urandom(7), "little"))
        self._stream = io.BytesIO()
        self._pickler = _ElementPickler(self._stream, self._definitions)

    def chunk_size(self) -> int:
        """Return the size of the next chunk in elements. Smaller for large elements."""
        mean = self._end // (self.count or 1) + 1
        return max(1, min(_MAX_CHUNK if self.count else 64, _CHUNK_BYTES // mean))

    def extend(self, items: Iterable[Any]) -> None:
        for chunk in chunks_of(items, self.chunk_size):
            self.add(chunk)

    def add(self, chunk: list[Any]) -> None:
        """Encode a chunk of elements and write it."""
        types = set(map(type, chunk))
        code = _CODES.get(types.pop(), PICKLE) if len(types) == 1 else MIXED
        encoded: list[bytes] = []
        if code in _ARRAYS:
            try:
                encoded = [array(_ARRAYS[code], chunk).tobytes()]
            except OverflowError:  # an integer of more than 64 bits
                code = MIXED
        if self._kind is None:
            self._kind = code
        encoders = (*_ENCODERS, self._pickle)
        if code != self._kind or code == MIXED:
            self._become_mixed()
            codes = bytes(map(_code_of, chunk))
            self._tags += codes
            encoded = [encoders[code](item) for code, item in zip(codes, chunk, strict=True)]
        elif code not in _ARRAYS:
            encoded = list(map(encoders[code], chunk))
        if self._kind not in _ARRAYS:
            ends = accumulate(map(len, encoded), initial=self._end)
            next(ends)
            self._offsets.extend(ends)
        body = b"".join(encoded)
        self._file.append(body)
        self._end += len(body)
        self.count += len(chunk)

    def _become_mixed(self) -> None:
        """Switch to a mixed column, with a type tag for each element."""
        assert self._kind is not None
        if self._kind == MIXED:
            return
        self._tags = bytearray([self._kind]) * self.count
        if self._kind in _ARRAYS:
            self._offsets = array("q", range(0, self._end + 1, _WIDTH))
        self._kind = MIXED

    def _pickle(self, item: Any) -> bytes:
        self._stream.seek(0)
        self._stream.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(item)
        return self._stream.getvalue()

    def finish(self, index: Iterable[Any] = ()) -> SharedColumn:
        """Write the offsets, tags, definitions and index, and return the column.

        Args:
            index: Arrays of 64-bit integers to store after the elements.
        """
        kind = TEXT if self._kind is None else self._kind
        append = self._file.append
        offsets_at = append(self._offsets if kind not in _ARRAYS else b"", _WIDTH)
        tags_at = append(self._tags, _WIDTH)
        definitions_at = append(self._definitions.dump(), _WIDTH)
        index_at = append(b"", _WIDTH)
        for numbers in index:
            append(numbers, _WIDTH)
        places = (offsets_at, tags_at, definitions_at, index_at, self._file.num_bytes)
        layout = ColumnLayout(kind, self.count, *places, self._definitions.token)
        self._file.settle()
        return SharedColumn(self._file, layout, self._definitions)


def _code_of(item: Any) -> int:
    code = _CODES.get(type(item), PICKLE)
    if code == INT and not -(1 << 63) <= item < 1 << 63:
        return PICKLE
    return code
