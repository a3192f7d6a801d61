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


def give_and_load(turns: LeaseQueue, sample_ns: list[float], num_leases: int) -> list[int]:
    """Give leases in groups of four, each of which is answered before the next."""
    workers = []
    for _ in range(num_leases // 4):
        leases = [lease(2) for _ in range(4)]
        given = [turns.give(one) for one in leases]
        for worker, one in zip(given, leases, strict=True):
            turns.take_back(worker, one.key)
            turns.note_time(worker, sample_ns[worker])
        workers += given
    return workers


@pytest.mark.parametrize(("slower", "share"), [(1.0, 0.5), (1.9, 0.5), (3.0, 0.25), (9.0, 0.0)])
def test_a_slow_machine_gets_fewer_leases(slower: float, share: float) -> None:
    turns = LeaseQueue(2, in_turn=False, ready={0, 1})
    workers = give_and_load(turns, [100.0, slower * 100.0], 48)
    assert workers[4:].count(1) == share * 44
    same_machine = LeaseQueue(2, in_turn=False)
    assert give_and_load(same_machine, [100.0, slower * 100.0], 48).count(1) == 24


def test_a_machine_that_is_no_longer_slow_gets_its_share_again() -> None:
    turns = LeaseQueue(2, in_turn=False, ready={0, 1})
    assert give_and_load(turns, [100.0, 900.0], 48)[4:].count(1) == 0
    assert give_and_load(turns, [100.0, 100.0], 400)[-40:].count(1) == 20


@pytest.mark.parametrize(("num_slow", "share"), [(2, 0.5), (3, 0.0)])
def test_a_batch_that_was_held_up_makes_no_machine_slow(num_slow: int, share: float) -> None:
    turns = LeaseQueue(2, in_turn=False, ready={0, 1})
    for sample_ns in [100.0, 100.0, *[2000.0] * num_slow]:
        turns.note_time(0, 100.0)
        turns.note_time(1, sample_ns)
    assert [turns.give(lease(2)) for _ in range(8)].count(1) == share * 8


def test_a_new_worker_in_the_place_of_a_slow_one_gets_its_share() -> None:
    turns = LeaseQueue(2, in_turn=False, ready={0, 1})
    give_and_load(turns, [100.0, 900.0], 48)
    turns.forget_time(1)
    assert give_and_load(turns, [100.0, 100.0], 40).count(1) == 20


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
