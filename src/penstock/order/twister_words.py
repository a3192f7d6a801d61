"""The 624 words of Python's Mersenne Twister for each position of an epoch.

    Philox(key = seed, epoch), counter 78 * position -> the words, as 312 64-bit words

NumPy's Philox computes them. NumPy imports ``numpy.random`` on first use, which takes 10 ms. Until
a program does that, the same numbers are computed here with array operations, for 16 positions in
0.5 ms.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.order.keys import MASK

if TYPE_CHECKING:
    from penstock.order.keys import Words

NUM_WORDS = 312
_BLOCKS = NUM_WORDS // 4
"""Philox blocks (of four words) per position."""
_RUN = 16
"""Positions computed in one call. 16 states take 40 KB, which fits in the cache."""
_ROUNDS = 10
_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


class TwisterWords:
    """The words of all positions of one epoch. Positions are usually asked for in order.

    Example:
        >>> words = TwisterWords(seed=1, epoch=0)
        >>> words.at(5).shape, bool((words.at(5) == TwisterWords(1, 0).at(5)).all())
        ((312,), True)
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._key = seed & MASK, epoch & MASK
        self._philox: Any = None
        self._states: Any = ()
        self._first = self._end = 0

    def at(self, position: int) -> Words:
        """Return the 312 words of a position."""
        place = position - self._first
        if not 0 <= place < len(self._states):
            self._states = self._compute(position).reshape(_RUN, NUM_WORDS)
            self._first, place = position, 0
        words: Words = self._states[place]
        return words

    def _compute(self, position: int) -> Words:
        if "numpy.random" not in sys.modules:
            return philox_words(self._key, position * _BLOCKS, _RUN * _BLOCKS)
        if self._philox is None or position < self._end:
            key = np.array(self._key, dtype=np.uint64)
            self._philox, self._end = np.random.Philox(key=key, counter=0), 0
        if position > self._end:
            self._philox.advance((position - self._end) * _BLOCKS)
        self._end = position + _RUN
        words: Words = self._philox.random_raw(_RUN * NUM_WORDS)
        return words


def philox_words(key: tuple[int, int], first: int, num_blocks: int) -> Words:
    """Return the words of NumPy's ``Philox(key=key)`` after ``first`` blocks of four."""
    factors = np.array(_FACTORS, dtype=np.uint64).reshape(2, 1)
    low_factors, high_factors = factors & _LOW, factors >> _HALF
    keys = np.array(key, dtype=np.uint64).reshape(2, 1)
    steps = np.array(_KEY_STEPS, dtype=np.uint64).reshape(2, 1)
    counters = np.arange(first + 1, first + 1 + num_blocks, dtype=np.uint64)
    even, odd = np.zeros((2, 2, num_blocks), dtype=np.uint64)  # words 0 and 2, and words 1 and 3
    even[0] = counters
    for _ in range(_ROUNDS):
        low, high = even & _LOW, even >> _HALF
        middle = high_factors * low + (low_factors * low >> _HALF)
        carry = (low_factors * high + (middle & _LOW)) >> _HALF
        upper = high_factors * high + (middle >> _HALF) + carry  # of the 128-bit product
        even, odd = upper[::-1] ^ odd ^ keys, (factors * even)[::-1]
        keys = keys + steps
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=1).reshape(-1)
