"""Restart decisions after the loss of a worker."""

from __future__ import annotations

import pytest

from penstock.engine.parent.restart_decision import (
    DEATHS_ALONE,
    DEATHS_ALONE_IN_DOUBT,
    HANGS,
    NO_PROGRESS,
    OUTSIDE_S,
    STILLBORN,
    SUSPECT,
    Place,
    RestartDecision,
    RestartPolicy,
)

pytestmark = pytest.mark.legacy


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


LEASE = (0, 3, 0)
SAMPLE, OTHER = Place("sample", LEASE, 7), Place("sample", LEASE, 8)
BATCH = Place("batch", LEASE)
ISOLATE, POISON, RETRY = RestartDecision.ISOLATE, RestartDecision.POISON, RestartDecision.RETRY


def num_deaths_alone(policy: RestartPolicy, limit: int = 50) -> int:
    """Return how many deaths in a row mark a sample that is loaded alone as poison."""
    for number in range(1, limit):
        if policy.judge(0, SAMPLE, is_alone=True) is POISON:
            return number
    raise AssertionError("it is never poison")


def suspected(policy: RestartPolicy) -> RestartPolicy:
    for _ in range(SUSPECT):
        policy.judge(0, SAMPLE)
    return policy


def test_the_second_death_at_a_sample_has_it_loaded_alone_and_other_samples_are_not() -> None:
    policy = RestartPolicy(100)
    assert policy.judge(0, SAMPLE) is RETRY
    assert policy.judge(1, OTHER) is RETRY
    assert policy.judge(1, SAMPLE) is ISOLATE
    assert policy.num_restarts == 3


def test_deaths_that_were_not_alone_never_make_a_sample_poison() -> None:
    policy = RestartPolicy(100)
    decisions = {policy.judge(0, SAMPLE) for _ in range(NO_PROGRESS - 1)}
    assert decisions == {RETRY, ISOLATE}


def test_a_sample_that_ends_workers_alone_is_poison_after_four_deaths_in_all() -> None:
    policy = suspected(RestartPolicy(100))
    assert num_deaths_alone(policy) == DEATHS_ALONE
    assert (policy.num_there, policy.num_alone) == (4, 2)


@pytest.mark.parametrize("cause", ["idle", "fork server", "cleared"])
def test_while_something_else_ends_workers_it_takes_more_deaths(cause: str) -> None:
    policy = RestartPolicy(100)
    if cause == "idle":
        policy.judge(1, None, is_outside=True)
    elif cause == "fork server":
        policy.judge_fork_server()
    else:
        policy.judge(1, OTHER)
        policy.note_answer(1, LEASE)
    assert num_deaths_alone(suspected(policy)) == DEATHS_ALONE_IN_DOUBT


def test_a_crash_has_its_cause_inside_and_raises_no_doubts() -> None:
    policy = RestartPolicy(100)
    policy.judge(1, OTHER, is_crash=True)
    policy.note_answer(1, LEASE)
    assert num_deaths_alone(suspected(policy)) == DEATHS_ALONE
    policy = RestartPolicy(100)
    policy.judge(1, None, is_outside=True)
    suspected(policy)
    assert policy.judge(0, SAMPLE, is_alone=True, is_crash=True) is ISOLATE
    assert policy.judge(0, SAMPLE, is_alone=True, is_crash=True) is POISON


def test_doubts_pass() -> None:
    clock = Clock()
    policy = RestartPolicy(100, now=clock)
    policy.judge(1, None, is_outside=True)
    clock.now_s = OUTSIDE_S
    assert num_deaths_alone(suspected(policy)) == DEATHS_ALONE


def test_a_sample_that_was_loaded_alone_begins_anew() -> None:
    policy = suspected(RestartPolicy(100))
    assert policy.judge(0, SAMPLE, is_alone=True) is ISOLATE
    policy.clear(SAMPLE)
    assert policy.judge(0, SAMPLE) is RETRY


def test_an_answer_clears_the_samples_of_its_lease_only() -> None:
    policy = RestartPolicy(100)
    policy.judge(0, SAMPLE)
    policy.note_answer(1, (0, 4, 0))
    assert policy.judge(0, SAMPLE) is ISOLATE
    policy.note_answer(0, LEASE)
    assert policy.judge(0, SAMPLE) is RETRY


def test_a_second_hang_is_poison_whatever_else_ends_workers() -> None:
    policy = RestartPolicy(100)
    policy.judge(1, None, is_outside=True)
    decisions = [policy.judge(0, SAMPLE, is_hang=True) for _ in range(HANGS)]
    assert decisions == [RETRY, POISON]


def test_a_batch_cannot_be_isolated_and_is_at_fault_only_where_nothing_else_ends_workers() -> None:
    policy = RestartPolicy(100)
    assert [policy.judge(0, BATCH) for _ in range(4)] == [RETRY, RETRY, RETRY, POISON]
    policy = RestartPolicy(100)
    policy.judge(1, None, is_outside=True)
    assert {policy.judge(0, BATCH) for _ in range(NO_PROGRESS - 1)} == {RETRY}


def test_a_new_epoch_begins_without_suspicions() -> None:
    policy = RestartPolicy(100)
    policy.judge(0, SAMPLE)
    policy.forget_places()
    assert policy.judge(0, SAMPLE) is RETRY


def test_losses_without_progress_are_the_end_and_an_answer_is_progress() -> None:
    policy = RestartPolicy(10**6)
    for _ in range(3):
        decisions = [policy.judge(0, None, is_outside=True) for _ in range(NO_PROGRESS - 1)]
        assert set(decisions) == {RETRY}
        policy.note_answer(0, LEASE)
    assert policy.judge(1, None) is RETRY  # losses of different workers are separate
    for _ in range(NO_PROGRESS - 1):
        policy.judge(0, None, is_outside=True)
    assert policy.judge(0, None, is_outside=True) is RestartDecision.NO_PROGRESS


def test_a_worker_without_work_may_be_lost_as_often_as_the_budget_allows() -> None:
    policy = RestartPolicy(3 * NO_PROGRESS)
    decisions = [
        policy.judge(0, None, is_outside=True, has_work=False) for _ in range(3 * NO_PROGRESS)
    ]
    assert set(decisions) == {RETRY}
    assert policy.judge(0, None, has_work=False) is RestartDecision.LIMIT


def test_fork_servers_are_replaced_within_the_same_budget() -> None:
    policy = RestartPolicy(3)
    policy.judge(0, None)
    assert [policy.judge_fork_server() for _ in range(3)] == [RETRY, RETRY, RestartDecision.LIMIT]
    assert policy.is_spent


def test_fork_servers_that_start_nothing_are_the_end_and_a_worker_is_progress() -> None:
    policy = RestartPolicy(10**6)
    assert {policy.judge_fork_server() for _ in range(NO_PROGRESS - 1)} == {RETRY}
    policy.note_start()
    assert {policy.judge_fork_server() for _ in range(NO_PROGRESS - 1)} == {RETRY}
    assert not policy.is_spent
    assert policy.judge_fork_server() is RestartDecision.NO_PROGRESS
    assert policy.is_spent


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


def test_workers_that_are_killed_before_they_are_ready_are_not_hopeless() -> None:
    policy = RestartPolicy(100)
    policy.judge(1, None, is_outside=True)
    decisions = {policy.judge(0, None, was_ready=False) for _ in range(NO_PROGRESS - 1)}
    assert decisions == {RETRY}


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
        assert policy.judge(0, Place("sample", LEASE, position)) is RestartDecision.RETRY
