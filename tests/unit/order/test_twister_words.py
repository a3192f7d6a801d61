"""Tests of the words of Python's generator: both ways to compute them give the same."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.order.twister_words import NUM_WORDS, TwisterWords, philox_words

pytestmark = pytest.mark.legacy

KEYS = [(0, 0), (7, 3), ((1 << 64) - 1, 1 << 63)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("first", [0, 78, 1 << 33])
def test_our_philox_equals_numpys(key: tuple[int, int], first: int) -> None:
    theirs = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=0)
    theirs.advance(first)
    np.testing.assert_array_equal(philox_words(key, first, 50), theirs.random_raw(200))
    assert not np.array_equal(philox_words((key[0] ^ 1, key[1]), first, 50), theirs.random_raw(200))


@pytest.mark.parametrize("key", KEYS)
def test_a_position_has_the_same_words_in_any_order(key: tuple[int, int]) -> None:
    words = TwisterWords(*key)
    for position in (5, 6, 40, 0, 39, 41):
        expected = philox_words(key, position * NUM_WORDS // 4, NUM_WORDS // 4)
        np.testing.assert_array_equal(words.at(position), expected)
