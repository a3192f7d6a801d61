"""The computed shuffle is a bijection and passes statistical tests."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import numpy as np
import pytest

from penstock.errors import BadArgument
from penstock.order import permutation
from penstock.order.keys import make_key
from penstock.order.permutation import TABLE_LENGTH, IdentityPermutation, Permutation

pytestmark = pytest.mark.legacy

LENGTHS = [0, 1, 2, 3, 7, 64, TABLE_LENGTH, TABLE_LENGTH + 1, 4095, 4096, 4097, 10_007, 65_537]
HUGE = [10**9, 2**32, 2**32 + 1, 2**53 + 1, 2**62 - 1, 2**62]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_index_comes_once(length: int) -> None:
    found = Permutation(length, key=3).at(np.arange(length))
    assert sorted(found.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [*LENGTHS, *HUGE])
def test_one_position_alone_is_what_many_at_once_say_and_the_inverse_leads_back(
    length: int,
) -> None:
    shuffle = Permutation(length, key=11)
    for place in {0, 1, 2, length // 3, length // 2, length - 2, length - 1}:
        if not 0 <= place < length:
            continue
        index = shuffle.index_at(place)
        assert 0 <= index < length
        assert shuffle.at(np.array([place], dtype=np.uint64)).tolist() == [index]
        assert shuffle.position_of(index) == place


def test_a_map_that_is_no_bijection_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(half: int, key: int, word: np.ndarray, spare: np.ndarray) -> None:
        word[:] = np.random.RandomState(0).randint(0, 2**32, len(word)).astype(np.uint64) << 32

    monkeypatch.setattr(permutation, "_scramble_many", lossy)
    found = Permutation(10_007, key=3).at(np.arange(10_007))
    assert len(set(found.tolist())) < 10_007


@pytest.mark.parametrize("place", [-1, 10, 2**63])
def test_places_outside_are_refused(place: int) -> None:
    for shuffle in (Permutation(10, key=0), IdentityPermutation(10)):
        for ask in (shuffle.index_at, shuffle.position_of, lambda p, s=shuffle: s.at([0, p])):
            with pytest.raises(IndexError, match="is out of range for length 10"):
                ask(place)


def test_arrays_of_any_shape_are_taken() -> None:
    for length in (100, 10_000):
        shuffle = Permutation(length, key=0)
        table = shuffle.at([[1, 2], [3, 4]])
        assert table.shape == (2, 2)
        assert table.ravel().tolist() == shuffle.at([1, 2, 3, 4]).tolist()
        assert shuffle.at([]).shape == (0,)


def test_a_pickled_one_is_small_and_the_same() -> None:
    for length in (1000, 10**9):
        shuffle = Permutation(length, key=5)
        expected = shuffle.at(np.arange(500)).tolist()
        data = pickle.dumps(shuffle)
        assert len(data) < 200
        assert pickle.loads(data).at(np.arange(500)).tolist() == expected


@pytest.mark.parametrize("length", [-1, 2**62 + 1, 1.5, "ten"])
def test_lengths_that_make_no_sense_are_refused(length: object) -> None:
    with pytest.raises(BadArgument, match="length="):
        Permutation(length, key=0)  # type: ignore[arg-type]


# -- statistical tests -----------------------------------------------------------------------------


def sigmas(observed: np.ndarray, freedom: int | None = None) -> float:
    """Return the deviation of a chi-square test against equal counts, in standard deviations."""
    expected = observed.sum() / observed.size
    freedom = observed.size - 1 if freedom is None else freedom
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", range(2, 6))
def test_all_orders_of_a_few_are_equally_likely(length: int) -> None:
    num_orders = math.factorial(length)
    seen = Counter(
        tuple(Permutation(length, make_key(0, seed)).at(range(length)).tolist())
        for seed in range(100 * num_orders)
    )
    assert len(seen) == num_orders
    assert sigmas(np.array(list(seen.values()))) < 4


@pytest.mark.parametrize("length", [6, 7, 8])
def test_first_places_of_a_few_more_are_equally_likely(length: int) -> None:
    """There are too many orders of 8 items to count.

    These lengths are shuffled by sorted hashes.
    """
    seen = Counter(
        tuple(Permutation(length, make_key(0, seed)).at(range(3)).tolist())
        for seed in range(20_000)
    )
    assert len(seen) == length * (length - 1) * (length - 2)
    assert abs(sigmas(np.array(list(seen.values())))) < 4


def neighbours_off(length: int, num_keys: int) -> dict[str, float]:
    """Chi-square tests for patterns that a shuffle must not have, summed over keys."""
    cells, size = 32, 64
    where, pairs, epochs = (np.zeros((cells, cells)) for _ in range(3))
    steps, before = np.zeros(size), None
    for key in range(num_keys):
        found = Permutation(length, make_key(9, 0, key)).at(np.arange(length))
        coarse = found * cells // length
        np.add.at(where, (np.arange(length) * cells // length, coarse), 1)
        np.add.at(pairs, (coarse[:-1], coarse[1:]), 1)
        steps += np.bincount(np.diff(found) % length * size // length, minlength=size)
        if before is not None:
            np.add.at(epochs, (before, coarse), 1)
        before = coarse
    freedom = (cells - 1) ** 2  # rows and columns have fixed sums in a permutation
    return {
        "positions": sigmas(where, freedom),
        "neighbours": sigmas(pairs, freedom),
        "differences of neighbours": sigmas(steps),
        "one epoch and the next": sigmas(epochs, freedom),
    }


@pytest.mark.parametrize("length", [TABLE_LENGTH + 1, 4096, 10_007])
def test_neither_positions_nor_neighbours_nor_epochs_show_a_pattern(length: int) -> None:
    found = neighbours_off(length, 100)
    assert max(abs(value) for value in found.values()) < 4.5, found


def test_two_rounds_would_show_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "ROUNDS", 2)
    assert neighbours_off(10_007, 30)["differences of neighbours"] > 20


def test_one_position_over_many_seeds_is_uniform() -> None:
    length = TABLE_LENGTH + 1
    seeds = range(20_000)
    found = [Permutation(length, make_key(1, seed)).index_at(5) for seed in seeds]
    counts = np.bincount(found, minlength=length)
    assert abs(sigmas(counts)) < 4.5
