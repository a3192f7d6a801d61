"""SharedDict: a read-only dict in memory shared by all workers, with any start method.

    keys     SharedColumn of the keys in order. Its index holds the sorted hashes and the position
             of each key.
    values   SharedColumn of the values in the same order

Python's ``hash()`` of a string differs between processes, so SharedDict hashes an encoding of the
key. Equal keys, such as ``1``, ``1.0`` and ``True``, have the same encoding.

Tested by ``tests/integration/engine/memory/test_shared_list.py``.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from penstock.engine.memory.shared_column import (
    ColumnWriter,
    ReadOnlyCollection,
    SharedColumn,
    abbreviated,
    chunks_of,
)

K = TypeVar("K")
V = TypeVar("V")


class SharedDict(ReadOnlyCollection, Mapping[K, V]):
    """An immutable dict in flat memory shared by all worker processes.

    See :class:`penstock.SharedList` for the motivation. It supports all read operations of a dict
    and keeps the insertion order. Each read returns a new object.

    Args:
        items: A mapping or an iterable of (key, value) pairs, such as a generator. If a key occurs
            more than once, the last value is used. Keys are ``str``, ``bytes``, ``int``, ``float``
            (not NaN), ``bool``, ``None``, NumPy numbers, and tuples of these. For values, see
            :class:`penstock.SharedList`.

    Raises:
        TypeError: A key has an unsupported type.

    Example:
        >>> from penstock import SharedDict
        >>> labels = SharedDict((f"image-{i}.jpg", i % 10) for i in range(1000))
        >>> labels["image-123.jpg"], "image-1000.jpg" in labels, len(labels)
        (3, False, 1000)
    """

    __slots__ = ("__weakref__", "_hashes", "_keys", "_order", "_values")
    _plain_name = "dict"
    _mutators = frozenset(("clear", "pop", "popitem", "setdefault", "update"))

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        pairs: Iterable[Any] = items.items() if isinstance(items, Mapping) else items
        keys, values, hashes = ColumnWriter(), ColumnWriter(), array("Q")
        for chunk in chunks_of(pairs, lambda: min(keys.chunk_size(), values.chunk_size())):
            hashes.extend([_hash(encode_key(key)) for key, _ in chunk])
            keys.add([key for key, _ in chunk])
            values.add([value for _, value in chunk])
        numbers = np.frombuffer(hashes, dtype=np.uint64).view(np.int64)
        order = np.argsort(numbers, kind="stable")
        self._settle(keys.finish([numbers[order], order.astype(np.int64)]), values.finish())
        repeats = self._repeats(numbers[order])
        if repeats:
            self._rebuild_without(repeats)

    def _settle(self, keys: SharedColumn, values: SharedColumn) -> None:
        count = keys.map.count
        self._keys = keys
        self._values = values
        self._hashes = keys.index[:count]
        self._order = keys.index[count : 2 * count]

    def _repeats(self, hashes: Any) -> dict[int, int]:
        """Map the position of each repeated key to the first position of that key."""
        suspects = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1 if len(hashes) else ()
        repeats: dict[int, int] = {}
        for rank in map(int, suspects):
            place = self._order[rank]
            first = self._find(self._keys.read(place))
            if first != place:
                repeats[place] = first
        return repeats

    def _rebuild_without(self, repeats: dict[int, int]) -> None:
        """Keep the first position and the last value of each repeated key, like a dict."""
        last = {first: place for place, first in sorted(repeats.items())}
        kept = [place for place in range(self._keys.map.count) if place not in repeats]
        read, value = self._keys.read, self._values.read
        once = SharedDict((read(place), value(last.get(place, place))) for place in kept)
        self._settle(once._keys, once._values)

    def _find(self, key: Any) -> int:
        """Return the first position of a key, or -1 if it is missing."""
        try:
            number = _hash(encode_key(key))
        except _NaNKey:
            return -1
        number -= (number >> 63) << 64  # stored and sorted as signed
        hashes = self._hashes
        rank, count = bisect_left(hashes, number), len(hashes)
        while rank < count and hashes[rank] == number:
            place = self._order[rank]
            if self._keys.read(place) == key:
                return place
            rank += 1
        return -1

    @property
    def nbytes(self) -> int:
        """Size in shared memory, in bytes, including the index."""
        return self._keys.map.num_bytes + self._values.map.num_bytes

    def __getitem__(self, key: K) -> V:
        place = self._find(key)
        if place < 0:
            raise KeyError(key)
        value: V = self._values.read(place)
        return value

    def get(self, key: Any, /, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default``."""
        place = self._find(key)
        return default if place < 0 else self._values.read(place)

    def __contains__(self, key: object) -> bool:
        return self._find(key) >= 0

    def __len__(self) -> int:
        return self._keys.map.count

    def __iter__(self) -> Iterator[K]:
        return map(self._keys.read, range(len(self)))

    def __reversed__(self) -> Iterator[K]:
        return map(self._keys.read, reversed(range(len(self))))

    def copy(self) -> dict[K, V]:
        """Return a plain dict with the same content."""
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (dict, SharedDict)):
            return NotImplemented
        missing = object()
        return len(self) == len(other) and all(
            value == other.get(key, missing) for key, value in self.items()
        )

    def __repr__(self) -> str:
        pairs = (f"{key!r}: {value!r}" for key, value in self.items())
        return f"SharedDict({{{abbreviated(pairs, len(self))}}})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _over, (self._keys, self._values)


def _over(keys: SharedColumn, values: SharedColumn) -> SharedDict[Any, Any]:
    made: SharedDict[Any, Any] = SharedDict.__new__(SharedDict)
    made._settle(keys, values)
    return made


class _NaNKey(TypeError):
    def __init__(self) -> None:
        super().__init__("NaN cannot be a SharedDict key, because it is not equal to itself")


def _hash(code: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(code, digest_size=8).digest(), "little")


def encode_key(key: Any) -> bytes:
    """Encode a key as bytes. Encodings are equal if and only if the keys are. Rejects NaN.

    Example:
        >>> encode_key(1) == encode_key(1.0) == encode_key(True) != encode_key("1")
        True
    """
    kind = type(key)
    if kind is str:
        return b"s" + key.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]
    if kind is float:
        if key != key:
            raise _NaNKey
        return b"f" + struct.pack("<d", key) if key % 1 else _encode_int(int(key))
    if kind is int or kind is bool:
        return _encode_int(key)
    if kind is bytes:
        return b"b" + key  # type: ignore[no-any-return]
    if key is None:
        return b"n"
    if kind is tuple:
        parts = map(encode_key, key)
        return b"t" + b"".join(struct.pack("<q", len(part)) + part for part in parts)
    return encode_key(_plain(key))


def _encode_int(number: int) -> bytes:
    return b"i" + number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _plain(key: Any) -> Any:
    """Return the equal built-in object for a NumPy number or an instance of a subclass."""
    if isinstance(key, np.generic) and not isinstance(key.item(), np.generic):
        return key.item()
    bases: tuple[Any, ...] = (str, bytes, int, float, tuple)
    for base in bases:
        if isinstance(key, base) and _compares_as(type(key), base):
            return base.__getnewargs__(key)[0]
    hash(key)  # raises Python's usual error for unhashable keys
    raise TypeError(
        f"{key!r} ({type(key).__name__}) cannot be a SharedDict key. Supported are str, bytes, "
        "int, float, bool, None, NumPy numbers, and tuples of these. Use str(key), or a tuple of "
        "its parts."
    )


def _compares_as(kind: type, base: type) -> bool:
    return kind.__eq__ is base.__eq__ and kind.__hash__ is base.__hash__
