"""A shuffle that is computed, not stored: from a position to its index, and back.

A permutation of 0 .. length-1 is a function of its key: any place is computed alone, in either
direction, with no memory per element. Up to ``TABLE_LENGTH`` it is a table (numbers sorted by a
hash of theirs, which is exactly uniform); above, a Feistel network:

    p = left * 2**h + right        left in 0 .. m-1, right in 0 .. 2**h - 1, m * 2**h >= length
    left  = (left + F1(right)) mod m      each round changes one half by a hash of the other, which
    right = right xor F2(left)            is undone by running the rounds backwards
    ...                                   ROUNDS times, each with a key of its own

Why this and not the usual network over the next power of four: there the domain can be almost four
times the length, and each place outside is walked on (applied again) until it falls inside. With a
left half of any size m the domain is at most 2**h, about the square root of the length, larger, so
fewer than 1 place in 40 walks. An LCG or a multiplication modulo a prime is cheaper but leaves
neighbours in visible lines; here pairs of neighbours pass a chi-square test (tests/unit/order).

Only whole numbers of 64 bits are used, so every machine has the same order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.options import check_count
from penstock.order.keys import GOLDEN, MASK, Words, mix64, splitmix64

ROUNDS = 8
"""Four for each half. With 2 neighbours fail the chi-square test by far, with 4 they pass: this is
twice that."""
TABLE_LENGTH = 2048
"""Up to this length the order is a table of 16 KB: tiny halves would mix badly."""
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
        return Permutation, (self.length, self.key)  # tables are cheaper made than sent

    @property
    def is_table(self) -> bool:
        return self.length <= TABLE_LENGTH

    def index_at(self, position: int) -> int:
        """The index that stands at ``position``. About 6 microseconds."""
        check_index(position, self.length)
        if self.is_table:
            return int(self._table[position])
        index = self._forwards(position)
        while index >= self.length:
            index = self._forwards(index)
        return index

    def position_of(self, index: int) -> int:
        """Where ``index`` stands: the inverse of :meth:`index_at`."""
        check_index(index, self.length)
        if self.is_table:
            return int(self._inverse_table[index])
        position = self._backwards(index)
        while position >= self.length:
            position = self._backwards(position)
        return position

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The indices at many positions at once: about 30 nanoseconds each for thousands."""
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
            # Modulo by one subtraction: below num_left it wraps around to something huge.
            np.subtract(left, num_left, out=word)
            np.minimum(left, word, out=left)
            _scramble_many(left, next_key, word, spare)
            np.right_shift(word, top, out=word)
            np.bitwise_xor(right, word, out=right)
        np.left_shift(left, low_bits, out=left)
        np.bitwise_or(left, right, out=left)
        return left


class IdentityPermutation:
    """No shuffle, with the interface of one: position p has index p."""

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
        raise IndexError(f"{index} is outside of 0 .. {length - 1}")


def check_indices(indices: npt.ArrayLike, length: int) -> npt.NDArray[Any]:
    """The indices as an array, all of which are from 0 to ``length - 1``."""
    found = np.asarray(indices)
    if found.size:
        check_index(int(found.min()), length)
        check_index(int(found.max()), length)
    return found


def _scramble(half: int, key: int) -> int:
    word = (half + key) * _SPREAD & MASK
    return (word ^ (word >> 32)) * _SPREAD_AGAIN & MASK


def _scramble_many(half: Words, key: int, word: Words, spare: Words) -> None:
    """:func:`_scramble` for arrays, into ``word``: allocating would cost half the time."""
    np.add(half, np.uint64(key), out=word)
    np.multiply(word, np.uint64(_SPREAD), out=word)
    np.right_shift(word, _HALF, out=spare)
    np.bitwise_xor(word, spare, out=word)
    np.multiply(word, np.uint64(_SPREAD_AGAIN), out=word)
