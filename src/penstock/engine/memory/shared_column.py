"""Millions of small objects in shared memory, as one column of bytes.

    ColumnWriter.add(chunk) ... finish() -> SharedColumn   one file: elements, offsets, index
    SharedColumn.read(place) -> object                     in any process that maps the file

A Python object has a reference count inside it, so that reading a list of objects writes to every
page of it, and each forked worker ends up with a copy. Bytes in a file have none. A column of one
exact type (``str``, ``bytes``, ``int`` of 64 bits, ``float``) is stored without pickle; otherwise
each element that is none of these is a pickle of its own, and a byte per element says which is
which.
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
from typing import Any

import cloudpickle

from penstock.engine.memory.payload import reduce_tensor
from penstock.engine.memory.shared_file import FileHandle, SharedFile, round_up

TEXT, BYTES, INT, FLOAT, PICKLE, MIXED = range(6)
_CODES: dict[type, int] = {str: TEXT, bytes: BYTES, int: INT, float: FLOAT}
_ARRAYS = {INT: "q", FLOAT: "d"}
_WIDTH = 8
_MAX_CHUNK = 4096
_CHUNK_BYTES = 1 << 20
"""A chunk of elements is encoded at once: about this many bytes, so that building holds no more."""


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Where the pieces of a column lie in its file."""

    kind: int
    count: int
    offsets_at: int
    tags_at: int
    parts_at: int
    index_at: int
    num_bytes: int
    token: int


class SharedColumn:
    """Objects in shared memory, read by place; it never changes.

    Travels by its descriptor to worker processes, as a copy of its bytes everywhere else.
    """

    def __init__(
        self, file: SharedFile, layout: ColumnLayout, parts: Definitions | None = None
    ) -> None:
        self.file = file
        self.map = layout
        self._mapping = file.map_readonly(layout.num_bytes)
        self._bytes = memoryview(self._mapping)
        blob = self._bytes[layout.parts_at : layout.index_at]
        self._parts = _remembered(layout.token, parts or Definitions(layout.token, blob))
        self.read: Callable[[int], Any] = _READERS[layout.kind](self)

    @property
    def data(self) -> Any:
        """The mapping itself: slicing it gives bytes faster than slicing a memoryview."""
        return self._mapping

    @property
    def offsets(self) -> memoryview:
        end = self.map.offsets_at + _WIDTH * (self.map.count + 1)
        return self._bytes[self.map.offsets_at : end].cast("q")

    @property
    def tags(self) -> memoryview:
        return self._bytes[self.map.tags_at : self.map.tags_at + self.map.count]

    @property
    def index(self) -> memoryview:
        """What :meth:`ColumnWriter.finish` was given beside the elements, as 64-bit numbers."""
        return self._bytes[self.map.index_at : self.map.num_bytes].cast("q")

    @property
    def numbers(self) -> memoryview:
        """The bytes of all elements, of a column whose elements are eight bytes each."""
        return self._bytes[: _WIDTH * self.map.count]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spawning = mp_context.get_spawning_popen()
        if spawning is not None and not getattr(spawning, "is_full", False):
            return _attach, (_passport(self, spawning), self.map)
        content = self._bytes[: self.map.num_bytes]
        if protocol < 5:
            return _copied, (bytes(content), self.map)
        return _copied, (pickle.PickleBuffer(content), self.map)


def _passport(column: SharedColumn, spawning: Any) -> Any:
    """What finds a column's file in the worker that is being started: a path or a descriptor."""
    kept = getattr(spawning, "kept", None)
    if kept is not None:
        kept.append(column)  # its descriptor must stay open as long as workers may be started
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


# -- reading ---------------------------------------------------------------------------------------


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:  # half of a surrogate pair, as file names may have
        return raw.decode("utf-8", "surrogatepass")


def _text_reader(column: SharedColumn) -> Callable[[int], Any]:
    data, offsets = column.data, column.offsets

    def read(place: int) -> str:
        raw: bytes = data[offsets[place] : offsets[place + 1]]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return _decode(raw)

    return read


def _slice_reader(column: SharedColumn, decode: Callable[[bytes], Any]) -> Callable[[int], Any]:
    data, offsets = column.data, column.offsets
    return lambda place: decode(data[offsets[place] : offsets[place + 1]])


def _mixed_reader(column: SharedColumn) -> Callable[[int], Any]:
    data, offsets, tags = column.data, column.offsets, column.tags
    decoders: list[Callable[[bytes], Any]] = [
        _decode,
        bytes,
        lambda raw: int.from_bytes(raw, sys.byteorder, signed=True),
        lambda raw: struct.unpack("d", raw)[0],
        pickle.loads,
    ]
    return lambda place: decoders[tags[place]](data[offsets[place] : offsets[place + 1]])


_READERS: list[Callable[[SharedColumn], Callable[[int], Any]]] = [
    _text_reader,
    lambda column: _slice_reader(column, bytes),
    lambda column: column.numbers.cast("q").__getitem__,
    lambda column: column.numbers.cast("d").__getitem__,
    lambda column: _slice_reader(column, pickle.loads),
    _mixed_reader,
]


# -- classes and functions that elements share -----------------------------------------------------


class Definitions:
    """Classes and functions that would travel by value: stored once, named in each element.

    A class of ``__main__`` takes about a kilobyte and 0.7 ms by value.
    """

    def __init__(self, token: int, blob: memoryview | None = None) -> None:
        self.token = token
        self._blob = blob
        self._parts: list[Any] | None = None if blob is not None and blob.nbytes else []
        self._places: dict[int, int] = {}

    def find(self, part: Any) -> int | None:
        return self._places.get(id(part))

    def add(self, part: Any) -> int:
        assert self._parts is not None
        self._parts.append(part)
        return self._places.setdefault(id(part), len(self._parts) - 1)

    def __getitem__(self, place: int) -> Any:
        if self._parts is None:
            assert self._blob is not None
            names, by_value = pickle.loads(self._blob)
            known = [name and _find(*name) for name in names]
            if any(part is None for part in known):
                made = pickle.loads(by_value)
                known = [made[at] if part is None else part for at, part in enumerate(known)]
            self._parts = known
        return self._parts[place]

    def dump(self) -> bytes:
        """By value, and by name: where the script itself runs, its own class is meant."""
        if not self._parts:
            return b""
        names = [(part.__module__, part.__qualname__) for part in self._parts]
        own = [n if _find(*n) is part else None for n, part in zip(names, self._parts, strict=True)]
        return pickle.dumps((own, cloudpickle.dumps(self._parts, protocol=5)), protocol=5)


def _find(module: str, qualname: str) -> Any:
    """What has this name in this process, or None."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


_living: weakref.WeakValueDictionary[int, Definitions] = weakref.WeakValueDictionary()


def _remembered(token: int, parts: Definitions) -> Definitions:
    """The parts of this token: copies of one column share them."""
    return _living.setdefault(token, parts)


def _part(token: int, place: int) -> Any:
    return _living[token][place]


class _ElementPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, parts: Definitions) -> None:
        super().__init__(file, protocol=5)
        self._parts = parts

    def reducer_override(self, obj: Any) -> Any:
        place = self._parts.find(obj)
        if place is not None:
            return _part, (self._parts.token, place)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            reduced = reduce_tensor(obj)
            if reduced is not None:
                return reduced
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, (type, FunctionType)):
            return _part, (self._parts.token, self._parts.add(obj))
        return reduced


# -- writing ---------------------------------------------------------------------------------------


def chunks_of(items: Iterable[Any], size: Callable[[], int]) -> Iterator[list[Any]]:
    """The items in lists of ``size()``, asked for each time."""
    stream = iter(items)
    while chunk := list(islice(stream, size())):
        yield chunk


class ColumnWriter:
    """Makes a column chunk by chunk; holds one chunk and eight bytes for each element."""

    def __init__(self) -> None:
        self.count = 0
        self._file = SharedFile.create()
        self._kind: int | None = None
        self._offsets = array("q", [0])
        self._tags = bytearray()
        self._end = 0
        # Not from `random`: the user's generators must not move.
        self._parts = Definitions(int.from_bytes(os.urandom(7), "little"))
        self._stream = io.BytesIO()
        self._pickler = _ElementPickler(self._stream, self._parts)

    def chunk_size(self) -> int:
        """How many elements the next chunk may have: fewer when they are large."""
        mean = self._end // (self.count or 1) + 1
        return max(1, min(_MAX_CHUNK if self.count else 64, _CHUNK_BYTES // mean))

    def extend(self, items: Iterable[Any]) -> None:
        for chunk in chunks_of(items, self.chunk_size):
            self.add(chunk)

    def add(self, chunk: list[Any]) -> None:
        """Encode some elements and write them."""
        types = set(map(type, chunk))
        code = _CODES.get(types.pop(), PICKLE) if len(types) == 1 else MIXED
        body: bytes | None = None
        if code in _ARRAYS:
            try:
                body = array(_ARRAYS[code], chunk).tobytes()
            except OverflowError:  # an integer of more than 64 bits
                code = MIXED
        if self._kind is None:
            self._kind = code
        if code != self._kind or code == MIXED:
            self._add_mixed(chunk)
        elif body is not None:
            self._write(body, len(chunk))
        else:
            encode = self._encoder(code)
            self._write_all([encode(item) for item in chunk])

    def _add_mixed(self, chunk: list[Any]) -> None:
        if self._kind != MIXED:
            assert self._kind is not None
            self._tags = bytearray([self._kind]) * self.count
            if self._kind in _ARRAYS:
                self._offsets = array("q", range(0, self._end + 1, _WIDTH))
            self._kind = MIXED
        codes = bytes(map(_code_of, chunk))
        encoders = [self._encoder(code) for code in range(MIXED)]
        self._tags += codes
        self._write_all([encoders[code](item) for code, item in zip(codes, chunk, strict=True)])

    def _encoder(self, code: int) -> Callable[[Any], bytes]:
        encoders: list[Callable[[Any], bytes]] = [
            lambda item: item.encode("utf-8", "surrogatepass"),
            lambda item: item,
            lambda item: item.to_bytes(_WIDTH, sys.byteorder, signed=True),
            lambda item: struct.pack("d", item),
            self._pickled,
        ]
        return encoders[code]

    def _pickled(self, item: Any) -> bytes:
        self._stream.seek(0)
        self._stream.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(item)
        return self._stream.getvalue()

    def _write_all(self, encoded: list[bytes]) -> None:
        ends = accumulate(map(len, encoded), initial=self._end)
        next(ends)
        self._offsets.extend(ends)
        self._write(b"".join(encoded), len(encoded))

    def _write(self, body: bytes, count: int) -> None:
        self._file.append(body)
        self._end += len(body)
        self.count += count

    def finish(self, index: Iterable[Any] = ()) -> SharedColumn:
        """Write what finds the elements and close the column.

        Args:
            index: Arrays of 64-bit numbers to keep beside the elements, one after the other.
        """
        kind = TEXT if self._kind is None else self._kind
        offsets_at = self._append(b"")
        if kind not in _ARRAYS:
            self._append(self._offsets)
        tags_at = self._append(bytes(self._tags))
        parts_at = self._append(self._parts.dump())
        self._append(b"")
        index_at = self._file.num_bytes
        for numbers in index:
            self._append(numbers)
        layout = ColumnLayout(
            kind=kind,
            count=self.count,
            offsets_at=offsets_at,
            tags_at=tags_at,
            parts_at=parts_at,
            index_at=index_at,
            num_bytes=self._file.num_bytes,
            token=self._parts.token,
        )
        self._file.settle()
        return SharedColumn(self._file, layout, self._parts)

    def _append(self, content: Any) -> int:
        """Write at the next multiple of eight bytes; returns where."""
        start = round_up(self._file.num_bytes, _WIDTH)
        self._file.append(bytes(start - self._file.num_bytes))
        self._file.append(memoryview(content))
        return start


def _code_of(item: Any) -> int:
    code = _CODES.get(type(item), PICKLE)
    if code == INT and not -(1 << 63) <= item < 1 << 63:
        return PICKLE
    return code
