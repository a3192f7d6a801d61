"""Permutations of many lengths at once: bijections without patterns, equal to ``Permutation``."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from penstock.order import shuffle_many as module
from penstock.order.keys import mix64_many
from penstock.order.permutation import TABLE_LENGTH, Permutation
from penstock.order.shuffle_many import num_bits, place_in_shuffle, shuffle_many

pytestmark = pytest.mark.legacy


def shuffled(length: int, num_keys: int) -> np.ndarray:
    """Return one permutation for each key."""
    keys = np.repeat(mix64_many(np.arange(num_keys, dtype=np.uint64)), length)
    places = np.tile(np.arange(length), num_keys)
    return shuffle_many(places, np.full(len(places), length), keys).reshape(num_keys, length)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 1000, TABLE_LENGTH])
def test_every_index_comes_once_and_the_inverse_leads_back(length: int) -> None:
    found = shuffle_many(np.arange(length), np.full(length, length), np.full(length, 7, np.uint64))
    assert sorted(found.tolist()) == list(range(length))
    for place in range(0, length, max(1, length // 9)):
        assert place_in_shuffle(int(found[place]), length, 7) == place


@pytest.mark.parametrize("length", [TABLE_LENGTH + 1, 5000, 10**6, 10**9, 2**40 + 3])
def test_long_ones_are_permutations_of_the_same_length_and_key(length: int) -> None:
    places = np.linspace(0, length - 1, 300).astype(np.int64)
    keys = np.full(300, 2**63 + 11, np.uint64)
    found = shuffle_many(places, np.full(300, length), keys)
    assert (found == Permutation(length, 2**63 + 11).at(places)).all()
    assert place_in_shuffle(int(found[17]), length, 2**63 + 11) == places[17]


def test_lengths_and_keys_may_differ_from_element_to_element() -> None:
    lengths = np.array([1, 3, 2000, 5000, 10**9, 7] * 20)
    places, keys = np.arange(120) % lengths, mix64_many(np.arange(120, dtype=np.uint64))
    found = shuffle_many(places, lengths, keys)
    for one in range(120):
        alone = shuffle_many(places[one : one + 1], lengths[one : one + 1], keys[one : one + 1])
        assert alone[0] == found[one]


def sigmas(observed: np.ndarray) -> float:
    """Return the deviation of a chi-square test against equal counts, in standard deviations."""
    expected = observed.sum() / observed.size
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return (chi_square - observed.size + 1) / math.sqrt(2 * (observed.size - 1))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(length: int) -> None:
    num_orders = math.factorial(length)
    seen = Counter(map(tuple, shuffled(length, 100 * num_orders).tolist()))
    assert len(seen) == num_orders
    assert abs(sigmas(np.array(list(seen.values())))) < 4


def steps_off(length: int) -> float:
    found = shuffled(length, 200_000 // length)
    steps = np.diff(found, axis=1) % length
    return sigmas(np.bincount(steps.ravel(), minlength=length)[1:])


@pytest.mark.parametrize("length", [16, 100, 2000])
def test_neighbours_show_no_pattern(length: int) -> None:
    assert abs(steps_off(length)) < 4.5


def test_eight_rounds_would_show_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWAP_ROUNDS", 8)
    assert steps_off(2000) > 20


def test_first_places_are_uniform_over_keys() -> None:
    keys = mix64_many(np.arange(50_000, dtype=np.uint64))
    found = shuffle_many(np.full(50_000, 5), np.full(50_000, 500), keys)
    assert abs(sigmas(np.bincount(found, minlength=500))) < 4.5


def test_bits_are_counted_exactly() -> None:
    numbers = [0, *(2**bits + more for bits in range(1, 62) for more in (-1, 0, 1))]
    found = num_bits(np.array(numbers, dtype=np.int64)).tolist()
    assert found == [number.bit_length() for number in numbers]
