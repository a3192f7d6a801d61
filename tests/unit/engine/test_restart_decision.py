"""What a lost worker means."""

from __future__ import annotations

import pytest

from penstock.engine.parent.restart_decision import STILLBORN, RestartDecision, RestartPolicy

pytestmark = pytest.mark.legacy


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_second_fault_at_one_place_is_poison_and_other_places_are_not() -> None:
    policy = RestartPolicy(100)
    assert policy.judge(0, ("sample", 7)) is RestartDecision.RETRY
    assert policy.judge(1, ("sample", 8)) is RestartDecision.RETRY
    assert policy.judge(1, ("sample", 7)) is RestartDecision.POISON
    assert policy.num_restarts == 3


def test_a_new_epoch_begins_without_strikes() -> None:
    policy = RestartPolicy(100)
    policy.judge(0, ("sample", 7))
    policy.forget_strikes()
    assert policy.judge(0, ("sample", 7)) is RestartDecision.RETRY


def test_the_limit_counts_within_its_window_only() -> None:
    clock = Clock()
    policy = RestartPolicy(2, window_s=10.0, now=clock)
    decisions = []
    for moment in (0.0, 6.0, 12.0, 13.0, 14.0):
        clock.now_s = moment
        decisions.append(policy.judge(0, None))
    assert decisions == [
        RestartDecision.RETRY,
        RestartDecision.RETRY,
        RestartDecision.RETRY,
        RestartDecision.LIMIT,
        RestartDecision.LIMIT,
    ]


def test_with_no_restarts_allowed_the_first_fault_is_the_end() -> None:
    assert RestartPolicy(0).judge(0, None) is RestartDecision.LIMIT


def test_workers_that_die_before_they_are_ready_are_hopeless_after_a_few() -> None:
    policy = RestartPolicy(100)
    decisions = [policy.judge(0, None, was_ready=False) for _ in range(STILLBORN)]
    assert decisions == [RestartDecision.RETRY] * (STILLBORN - 1) + [RestartDecision.HOPELESS]


def test_one_that_was_ready_in_between_is_a_new_beginning() -> None:
    policy = RestartPolicy(100)
    for _ in range(5):
        assert policy.judge(0, None, was_ready=False) is RestartDecision.RETRY
        assert policy.judge(0, None, was_ready=False) is RestartDecision.RETRY
        assert policy.judge(0, None, was_ready=True) is RestartDecision.RETRY


def test_a_worker_that_was_lost_at_work_in_between_is_a_new_beginning() -> None:
    policy = RestartPolicy(100)
    for position in range(5):
        assert policy.judge(0, None, was_ready=False) is RestartDecision.RETRY
        assert policy.judge(0, ("sample", position)) is RestartDecision.RETRY
