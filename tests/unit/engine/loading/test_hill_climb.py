"""A number is raised while that is faster, taken back otherwise, and tried again later."""

from __future__ import annotations

import itertools

import pytest

from penstock.engine.loading.hill_climb import FIRST_PAUSE_S, MAX_PAUSE_S, HillClimb

pytestmark = pytest.mark.legacy


def run(climb: HillClimb, best: int, *, start_s: float = 0.0, end_s: float) -> list[int]:
    """Judge once a second, while samples arrive faster up to ``best`` at a time."""
    numbers, now_s = [], start_s
    while now_s < end_s:
        climb.judge(float(min(climb.value, best)), now_s, 2 * climb.value)
        numbers.append(climb.value)
        now_s += 1.0
    return numbers


def test_it_is_raised_as_long_as_that_is_faster() -> None:
    climb = HillClimb(8, faster=1.1)
    assert run(climb, 64, end_s=5.0) == [16, 32, 64, 128, 64]


def test_a_raise_that_failed_is_tried_again_after_seconds_and_then_less_often() -> None:
    climb = HillClimb(8, faster=1.1)
    numbers = run(climb, 8, end_s=300.0)
    tried_s = [at_s for at_s, number in enumerate(numbers) if number > 8]
    pauses = [after - before for before, after in itertools.pairwise(tried_s)]
    assert pauses[0] <= FIRST_PAUSE_S + 1
    assert pauses == sorted(pauses)
    assert MAX_PAUSE_S <= pauses[-1] <= MAX_PAUSE_S + 2


def test_a_rate_that_was_wrong_once_is_corrected() -> None:
    climb = HillClimb(8, faster=1.1)
    climb.judge(100.0, 0.0, 16)
    climb.judge(50.0, 1.0, 32)  # another program was busy
    assert climb.value == 8
    assert run(climb, 64, start_s=2.0, end_s=30.0)[-1] >= 64


def test_it_is_not_raised_unless_asked() -> None:
    climb = HillClimb(8, faster=1.1)
    for now_s in range(20):
        climb.judge(float(now_s), float(now_s), 0)
    assert climb.value == 8
