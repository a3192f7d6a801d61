"""Leases are given to workers in turn or by load, and outstanding leases are tracked."""

from __future__ import annotations

import itertools

import pytest

from penstock.engine.memory.messages import Lease
from penstock.engine.parent.in_flight import LeaseQueue

pytestmark = pytest.mark.legacy

numbers = itertools.count()


def lease(rows: int) -> Lease:
    return Lease(0, next(numbers), 0, list(range(rows)), 0, rows, 0, True, (0, 0), 0, 0)


def test_the_one_with_the_least_to_do_is_next() -> None:
    turns = LeaseQueue(3, in_turn=False)
    first = lease(8)
    assert turns.give(first) == 0
    assert [turns.give(lease(rows)) for rows in (4, 2, 1, 1)] == [1, 2, 2, 2]
    turns.take_back(0, first.key)
    assert turns.give(lease(1)) == 0


def test_in_turn_the_load_does_not_matter() -> None:
    turns = LeaseQueue(3, in_turn=True)
    assert [turns.give(lease(rows)) for rows in (8, 1, 1, 1, 9, 1)] == [0, 1, 2, 0, 1, 2]


def test_a_retired_worker_is_passed_over_until_the_next_epoch() -> None:
    turns = LeaseQueue(3, in_turn=True)
    turns.retire(1)
    assert [turns.give(lease(1)) for _ in range(4)] == [0, 2, 0, 2]
    assert turns.has_active
    turns.retire(0)
    turns.retire(2)
    assert not turns.has_active
    turns.begin()
    assert turns.has_active
    assert [turns.give(lease(1)) for _ in range(3)] == [0, 1, 2]


def test_a_worker_at_the_limit_is_passed_over() -> None:
    turns = LeaseQueue(2, in_turn=True)
    large = lease(5)
    turns.give(large, 4)
    turns.give(lease(1), 4)
    assert turns.give(lease(1), 4) == 1
    turns.take_back(0, large.key)
    assert turns.give(lease(1), 4) == 0


def test_what_a_worker_owes_is_in_the_order_it_was_given() -> None:
    turns = LeaseQueue(1, in_turn=False)
    leases = [lease(2), lease(3), lease(1)]
    for one in leases:
        turns.give(one)
    assert turns.owed(0) == leases
    assert turns.has_owed
    turns.take_back(0, leases[1].key)
    assert turns.owed(0) == [leases[0], leases[2]]
    changed = leases[0]._replace(is_suspect=True)
    turns.amend(0, changed)
    assert turns.owed(0) == [changed, leases[2]]
    turns.take_back(0, changed.key)
    turns.take_back(0, leases[2].key)
    assert not turns.has_owed
