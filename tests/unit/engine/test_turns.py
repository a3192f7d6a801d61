"""Whose turn it is."""

from __future__ import annotations

import pytest

from penstock.engine.turns import Turns

pytestmark = pytest.mark.legacy


def test_the_one_with_the_least_to_do_is_next() -> None:
    turns = Turns(3, in_turn=False)
    assert [turns.give(rows) for rows in (8, 4, 2, 1, 1)] == [0, 1, 2, 2, 2]
    turns.take_back(0, 8)
    assert turns.give(1) == 0


def test_in_turn_the_load_does_not_matter() -> None:
    turns = Turns(3, in_turn=True)
    assert [turns.give(rows) for rows in (8, 1, 1, 1, 9, 1)] == [0, 1, 2, 0, 1, 2]


def test_a_retired_worker_is_passed_over_until_the_next_epoch() -> None:
    turns = Turns(3, in_turn=True)
    turns.retire(1)
    assert [turns.give(1) for _ in range(4)] == [0, 2, 0, 2]
    assert turns.has_active
    turns.retire(0)
    turns.retire(2)
    assert not turns.has_active
    turns.begin()
    assert turns.has_active
    assert [turns.give(1) for _ in range(3)] == [0, 1, 2]


def test_a_worker_at_the_limit_is_passed_over() -> None:
    turns = Turns(2, in_turn=True)
    turns.give(5, 4)
    turns.give(1, 4)
    assert turns.give(1, 4) == 1
    turns.take_back(0, 5)
    assert turns.give(1, 4) == 0
