"""The order of sources: exact counts, shares of any weights, bases and slots."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock.order.interleave import (
    MAX_TERM,
    Interleaving,
    count_bound,
    first_true,
    num_runs,
    prime_factors,
    prime_not_dividing,
    slot_terms,
    to_parts,
)

pytestmark = pytest.mark.legacy


def sequence_of(*weights: Any, group: int = 64) -> Interleaving:
    return Interleaving([(0, [Fraction(weight) for weight in weights])], group)


@pytest.mark.parametrize("group", [1, 4, 6, 30, 97, 210])
@pytest.mark.parametrize("weights", [(1,), (1, 3), (1, 0, 2, 5, 0), tuple(range(1, 90))])
def test_turns_count_the_terms_of_the_same_source_before(
    group: int, weights: tuple[int, ...]
) -> None:
    sequence, terms = sequence_of(*weights, group=group), np.arange(1000)
    sources, seen = sequence.sources_at(terms), [0] * len(weights)
    turns = sequence.turns_at(terms, sources)
    for term, (source, turn) in enumerate(zip(sources.tolist(), turns.tolist(), strict=True)):
        assert turn == seen[source]
        seen[source] += 1
        if term % 100 == 7:
            assert sequence.find_turn(source, turn) == term
    assert sequence.counts(1000).tolist() == seen
    assert not any(count for count, weight in zip(seen, weights, strict=True) if not weight)
    both = sequence.draw(terms[::-1])
    assert (both[0] == sources[::-1]).all()
    assert (both[1] == turns[::-1]).all()


def test_terms_far_away_are_computed_directly_and_full_periods_are_exact() -> None:
    sequence = sequence_of(1, 2, 0.7)
    assert sequence.unit == 3**20
    assert (sequence.counts(5 * sequence.unit) == 5 * sequence.parts[0]).all()
    far = MAX_TERM - np.arange(1, 5)
    sources, turns = sequence.draw(far)
    for term, source, turn in zip(far.tolist(), sources.tolist(), turns.tolist(), strict=True):
        assert sequence.counts(term)[source] == turn
        assert sequence.counts(term + 1)[source] == turn + 1


def test_a_change_of_weights_continues_the_turns() -> None:
    changes = [(0, [1, 1, 0]), (100, [0, 1, 3]), (101, [5, 0, 0])]
    sequence = Interleaving([(at, [Fraction(one) for one in all_]) for at, all_ in changes], 8)
    terms = np.arange(200)
    sources, turns = sequence.draw(terms)
    assert set(sources[:100]) == {0, 1}
    assert sources[100] in (1, 2)
    assert set(sources[101:]) == {0}
    for source in range(3):
        assert turns[sources == source].tolist() == list(range(int((sources == source).sum())))
    assert (sequence.turns_at(terms, sources) == turns).all()


def test_the_base_is_a_prime_that_does_not_divide_the_batch() -> None:
    for group in range(1, 400):
        base = prime_not_dividing(group)
        assert group % base
        assert prime_factors(base) == [base]
    assert np.prod(prime_factors(2**5 * 3 * 49)) == 2**5 * 3 * 49


@pytest.mark.parametrize("group", [1, 2, 6, 8, 12, 30, 97])
def test_slots_take_each_term_once_and_leading_parts_are_evenly_spaced(group: int) -> None:
    terms = slot_terms(group)
    assert sorted(terms.tolist()) == list(range(group))
    num_ranks = 1
    for prime in prime_factors(group):
        num_ranks *= prime
        size = group // num_ranks
        for rank in range(num_ranks):
            part = sorted(terms[rank * size : (rank + 1) * size].tolist())
            assert all(later - term == num_ranks for term, later in itertools.pairwise(part))
            assert num_runs(rank * size, (rank + 1) * size, group) == 1


def test_runs_of_any_slots_are_few() -> None:
    for group in (8, 12, 64, 96, 100):
        most = sum(2 * (prime - 1) for prime in prime_factors(group))
        for first in range(0, group, 5):
            for last in range(first, group + 1, 3):
                in_one = num_runs(first, last, group, in_one_batch=True)
                assert in_one <= num_runs(first, last, group) <= most
    assert num_runs(3, 3, 8) == 0


def test_the_bound_grows_by_digits_up_to_the_period() -> None:
    assert count_bound(0, 3) == 0
    assert count_bound(1, 3) == 2
    assert count_bound(3**20, 3) == count_bound(10**18, 3) < 29


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([1], [1000]),
        ([1, 1, 1], [334, 333, 333]),
        ([0, 2, 0], [0, 1000, 0]),
        ([1e-300, 1e300], [1, 999]),
        ([1e-9, 1e-9, 1], [1, 1, 998]),
        ([0.5, Fraction(1, 2)], [500, 500]),
        ([2**80, 3 * 2**80], [250, 750]),
    ],
)
def test_shares_are_rounded_by_the_stated_rule(weights: list[Any], parts: list[int]) -> None:
    assert to_parts([Fraction(weight) for weight in weights], 1000) == parts


def test_the_first_true_term_is_found() -> None:
    for wanted in (0, 1, 2, 3, 1000, 2**40 + 17):
        assert first_true(lambda term, wanted=wanted: term >= wanted) == wanted
    assert first_true(lambda term: False) == MAX_TERM
