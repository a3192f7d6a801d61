"""Many permutations at once: element k is place p_k of a permutation of its own length and key.

A mixture of 10,000 sources shuffles each of them separately, and a batch has samples of many. One
:class:`penstock.order.permutation.Permutation` for each would take 0.1 ms per sample.
Here all elements are computed together:

    long     more than TABLE_LENGTH elements: the network of ``Permutation``, with the same result
    short    the "swap or not" shuffle (Hoang, Morris and Rogaway, 2012), which works at any length:
             in each round, place x and its partner (k - x) mod length change places if a hash of
             (round, larger of the two) is odd. k is drawn for each round. A round undoes itself.

A stored table, as ``Permutation`` has for short lengths, would take 16 KB for each source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from penstock.order.keys import GOLDEN, MASK, mix64_many
from penstock.order.permutation import ROUNDS, TABLE_LENGTH, Permutation, scramble_each

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.order.keys import Words

SWAP_ROUNDS = 24
"""With 8 rounds, neighbors fail a chi-square test. With 12 they pass. 24 leave a margin."""
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_SPREAD, _SPREAD_AGAIN = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)


def shuffle_many(
    places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], keys: Words
) -> npt.NDArray[np.int64]:
    """Return, for each element, the index at its place in the permutation of its length and key.

    Example:
        >>> keys = np.full(5, 7, np.uint64)
        >>> shuffle_many(np.arange(5), np.full(5, 5), keys).tolist()
        [1, 0, 4, 3, 2]
    """
    is_short = lengths <= TABLE_LENGTH
    if is_short.all():
        return _swap_or_not(places, lengths, keys, range(SWAP_ROUNDS))
    found = _through_network(places, lengths, keys)
    if is_short.any():
        found[is_short] = _swap_or_not(
            places[is_short], lengths[is_short], keys[is_short], range(SWAP_ROUNDS)
        )
    return found


def place_in_shuffle(index: int, length: int, key: int) -> int:
    """Return the place of ``index``. The inverse of :func:`shuffle_many`, for one element."""
    if length > TABLE_LENGTH:
        return Permutation(length, key).position_of(index)
    one = np.array([index]), np.array([length]), np.array([key & MASK], np.uint64)
    return int(_swap_or_not(*one, reversed(range(SWAP_ROUNDS)))[0])


def _swap_or_not(
    places: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    keys: Words,
    rounds: Iterable[int],
) -> npt.NDArray[np.int64]:
    x, sizes = places.astype(np.uint32), lengths.astype(np.uint32)
    low, high = keys.astype(np.uint32), (keys >> _HALF).astype(np.uint32)
    for turn in rounds:
        step = np.uint32(GOLDEN * (turn + 1) & 0xFFFFFFFF)
        drawn = _scramble32(high + step) >> np.uint32(12)  # 20 bits, and lengths have at most 12
        other = (drawn * sizes >> np.uint32(20)) + sizes - x
        np.minimum(other, other - sizes, out=other)  # modulo, by wrapping around below zero
        swaps = _scramble32(np.maximum(x, other) + (low + step)) >> np.uint32(31)
        x += (other - x) * swaps  # faster than with a mask
    return x.astype(np.int64)


def _scramble32(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    words *= _SPREAD
    words ^= words >> np.uint32(15)
    words *= _SPREAD_AGAIN
    return words


def _through_network(
    places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], keys: Words
) -> npt.NDArray[np.int64]:
    """Compute ``Permutation(length, key).at(place)`` for lengths above TABLE_LENGTH."""
    sizes = lengths.astype(np.uint64)
    low_bits = np.maximum(num_bits(lengths - 1) // 2, 1).astype(np.uint64)
    num_left = (sizes + (_ONE << low_bits) - _ONE) >> low_bits
    steps = [np.uint64(GOLDEN * turn & MASK) for turn in range(1, ROUNDS + 1)]
    round_keys = [mix64_many(keys + step) for step in steps]
    found = places.astype(np.uint64)
    is_open = np.flatnonzero(lengths > TABLE_LENGTH)
    while len(is_open):
        bits, lefts = low_bits[is_open], num_left[is_open]
        left, right = found[is_open] >> bits, found[is_open] & ((_ONE << bits) - _ONE)
        for turn in range(0, ROUNDS, 2):
            word = scramble_each(right, round_keys[turn][is_open])
            left = (left + ((word >> _HALF) * lefts >> _HALF)) % lefts
            right ^= scramble_each(left, round_keys[turn + 1][is_open]) >> (np.uint64(64) - bits)
        found[is_open] = left << bits | right
        is_open = is_open[found[is_open] >= sizes[is_open]]
    return found.astype(np.int64)


def num_bits(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ``int.bit_length`` of each number, from 0 to 2**62.

    Example:
        >>> num_bits(np.array([0, 1, 255, 256, 2**53 - 1, 2**53])).tolist()
        [0, 1, 8, 9, 53, 54]
    """
    high = numbers >> 31  # both halves are exact as float64
    upper, lower = np.frexp(high.astype(np.float64))[1], np.frexp((numbers & (2**31 - 1)) + 0.0)[1]
    return np.where(high > 0, upper + 31, lower).astype(np.int64)
