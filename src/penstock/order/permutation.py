"""A shuffle that is computed, not stored: from a position to its index, and back.

A permutation of 0 .. length-1 is a function of its key. Any element is computed directly, in either
direction, with no memory per element. Up to ``TABLE_LENGTH`` elements it is a table: the numbers
sorted by their hashes, which is exactly uniform. Above that it is a Feistel network:

    p = left * 2**h + right        left in 0 .. m-1, right in 0 .. 2**h - 1, m * 2**h >= length
    left  = (left + F1(right)) mod m      each round changes one half by a hash of the other half,
    right = right xor F2(left)            and is undone by running the rounds backwards
    ...                                   ROUNDS rounds, each with its own key

The usual network works on the next power of four. Its domain can be almost four times the length,
and the network must be applied again to each result outside the length until it falls inside. Here
the left half can have any size m, so the domain exceeds the length by at most 2**h, which is about
the square root of the length. Fewer than 1 position in 40 needs a second pass. An LCG or a
multiplication modulo a prime is cheaper but leaves visible patterns between neighbors. Here, pairs
of neighbors pass a chi-square test (tests/unit/order).

Only 64-bit integers are used, so every machine computes the same order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.options import check_count
from penstock.order.keys import GOLDEN, MASK, mix64, splitmix64

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.order.keys import Words

ROUNDS = 8
"""Four rounds for each half. With 2 rounds, neighbors fail the chi-square test by a wide margin.
With 4 they pass. 8 leave a margin."""
TABLE_LENGTH = 2048
"""Up to this length the order is a table of 16 KB, because very small halves would mix badly."""
_SPREAD = 0xD6E8FEB86659FD93
_SPREAD_AGAIN = 0xA0761D6478BD642F
_HALF = np.uint64(32)


class Permutation:
    """A shuffle of ``length`` indices that is computed, not stored.

    Args:
        length: From 0 to 2**62.
        key: 64 bits; see :func:`penstock.order.keys.make_key`.

    Example:
        >>> shuffle = Permutation(10**9, key=7)
        >>> index = shuffle.index_at(5)
        >>> shuffle.position_of(index)
        5
        >>> sorted(Permutation(6, key=7).at(np.arange(6)).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, length: int, key: int) -> None:
        self.length = check_count("length", length)
        self.key = key & MASK
        self._low_bits = max(1, (self.length - 1).bit_length() // 2)
        self._num_left = -(-self.length // (1 << self._low_bits))
        self._round_keys = [mix64(self.key + GOLDEN * turn) for turn in range(1, ROUNDS + 1)]

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Permutation({self.length}, key={self.key:#x})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Permutation, (self.length, self.key)  # computing a table is cheaper than sending it

    @property
    def is_table(self) -> bool:
        return self.length <= TABLE_LENGTH

    def index_at(self, position: int) -> int:
        """Return the index at ``position``. Takes about 6 microseconds."""
        check_index(position, self.length)
        if self.is_table:
            return int(self._table[position])
        index = self._forwards(position)
        while index >= self.length:
            index = self._forwards(index)
        return index

    def position_of(self, index: int) -> int:
        """Return the position of ``index``. The inverse of :meth:`index_at`."""
        check_index(index, self.length)
        if self.is_table:
            return int(self._inverse_table[index])
        position = self._backwards(index)
        while position >= self.length:
            position = self._backwards(position)
        return position

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the indices at several positions, at about 30 ns each for thousands of them."""
        places = check_indices(positions, self.length)
        if self.is_table:
            return self._table[places.astype(np.int64, copy=False)]
        found = self._many_forwards(places.astype(np.uint64).reshape(-1))
        limit = np.uint64(self.length)
        while True:
            outside = np.flatnonzero(found >= limit)
            if not outside.size:
                return found.view(np.int64).reshape(places.shape)
            found[outside] = self._many_forwards(found[outside])

    # -- short: a table --------------------------------------------------------------------------

    @functools.cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        words = splitmix64(self.key, np.arange(self.length, dtype=np.uint64))
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)

    @functools.cached_property
    def _inverse_table(self) -> npt.NDArray[np.int64]:
        return np.argsort(self._table, kind="stable").astype(np.int64, copy=False)

    # -- long: a Feistel network -----------------------------------------------------------------

    def _forwards(self, place: int) -> int:
        low_bits, num_left = self._low_bits, self._num_left
        left, right = place >> low_bits, place & ((1 << low_bits) - 1)
        keys = iter(self._round_keys)
        for key, next_key in zip(keys, keys, strict=True):
            left = (left + ((_scramble(right, key) >> 32) * num_left >> 32)) % num_left
            right ^= _scramble(left, next_key) >> (64 - low_bits)
        return left << low_bits | right

    def _backwards(self, place: int) -> int:
        low_bits, num_left = self._low_bits, self._num_left
        left, right = place >> low_bits, place & ((1 << low_bits) - 1)
        keys = reversed(self._round_keys)
        for key, key_before in zip(keys, keys, strict=True):
            right ^= _scramble(left, key) >> (64 - low_bits)
            left = (left - ((_scramble(right, key_before) >> 32) * num_left >> 32)) % num_left
        return left << low_bits | right

    def _many_forwards(self, places: Words) -> Words:
        low_bits, num_left = np.uint64(self._low_bits), np.uint64(self._num_left)
        left: Words = places >> low_bits
        right: Words = places & np.uint64((1 << self._low_bits) - 1)
        top = np.uint64(64 - self._low_bits)
        word, spare = np.empty_like(places), np.empty_like(places)
        keys = iter(self._round_keys)
        for key, next_key in zip(keys, keys, strict=True):
            _scramble_many(right, key, word, spare)
            np.right_shift(word, _HALF, out=word)
            np.multiply(word, num_left, out=word)
            np.right_shift(word, _HALF, out=word)
            np.add(left, word, out=left)
            # Modulo by one subtraction. Values below num_left wrap around to a huge number.
            np.subtract(left, num_left, out=word)
            np.minimum(left, word, out=left)
            _scramble_many(left, next_key, word, spare)
            np.right_shift(word, top, out=word)
            np.bitwise_xor(right, word, out=right)
        np.left_shift(left, low_bits, out=left)
        np.bitwise_or(left, right, out=left)
        return left


class IdentityPermutation:
    """The identity, with the interface of :class:`Permutation`: position p has index p."""

    def __init__(self, length: int) -> None:
        self.length = length

    def index_at(self, position: int) -> int:
        check_index(position, self.length)
        return position

    position_of = index_at

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        return check_indices(positions, self.length).astype(np.int64, copy=False)


def check_index(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise IndexError(f"{index} is out of range for length {length}")


def check_indices(indices: npt.ArrayLike, length: int) -> npt.NDArray[Any]:
    """Return the indices as an array. Raises IndexError if one is not in 0 .. ``length - 1``."""
    found = np.asarray(indices)
    if found.size:
        check_index(int(found.min()), length)
        check_index(int(found.max()), length)
    return found


def _scramble(half: int, key: int) -> int:
    word = (half + key) * _SPREAD & MASK
    return (word ^ (word >> 32)) * _SPREAD_AGAIN & MASK


def scramble_each(half: Words, keys: Words) -> Words:
    """:func:`_scramble` for arrays, with a key for each element."""
    word: Words = (half + keys) * np.uint64(_SPREAD)
    word ^= word >> _HALF
    word *= np.uint64(_SPREAD_AGAIN)
    return word


def _scramble_many(half: Words, key: int, word: Words, spare: Words) -> None:
    """:func:`_scramble` for arrays, into ``word``. Allocating arrays would take half the time."""
    np.add(half, np.uint64(key), out=word)
    np.multiply(word, np.uint64(_SPREAD), out=word)
    np.right_shift(word, _HALF, out=spare)
    np.bitwise_xor(word, spare, out=word)
    np.multiply(word, np.uint64(_SPREAD_AGAIN), out=word)
