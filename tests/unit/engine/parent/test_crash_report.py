"""Crash reports of dead workers."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from penstock.engine.parent.crash_report import (
    WorkerFault,
    describe_crash,
    describe_server_losses,
)
from penstock.engine.parent.restart_decision import Place, RestartDecision, RestartPolicy
from penstock.errors import StartFailed

pytestmark = pytest.mark.legacy


def crash_error(worker: int, pid: int, exit_code: int, index: Any) -> Any:
    return describe_crash(WorkerFault(worker=worker, pid=pid, exit_code=exit_code, index=index))


def test_a_signal_is_named_with_its_likely_cause() -> None:
    error: Any = crash_error(2, 4181, -int(signal.SIGKILL), 90412)
    text = str(error)
    assert "SIGKILL" in text
    assert "sample 90412" in text
    assert "pid 4181" in text
    assert "memory" in text
    assert "dataset[90412]" in text
    assert (error.worker, error.pid, error.exit_code, error.sample_index) == (2, 4181, -9, 90412)


def test_an_exit_code_is_given_as_it_was() -> None:
    error: Any = crash_error(0, 1, 3, None)
    assert "exit code 3" in str(error)
    assert "SIG" not in str(error)
    assert error.sample_index is None


def test_a_signal_without_a_name_is_given_by_number() -> None:
    assert "40" in str(crash_error(0, 1, -40, None))


def test_torch_s_words_are_kept_so_that_scripts_that_look_for_them_go_on() -> None:
    assert "DataLoader worker (pid 7) is killed by signal: " in str(crash_error(0, 7, -11, 0))
    assert isinstance(crash_error(0, 7, -11, 0), RuntimeError)


def test_the_limit_is_named_with_its_number() -> None:
    fault = WorkerFault(worker=0, pid=1, exit_code=-9)
    text = str(describe_crash(fault, RestartDecision.LIMIT, RestartPolicy(max_restarts=17)))
    assert "max_restarts=17" in text


def test_a_hang_is_told_with_its_time_and_its_stack() -> None:
    fault = WorkerFault(worker=1, pid=5, how="hung", index=7, seconds=2.5, stack="  File decode.py")
    error: Any = describe_crash(fault, RestartDecision.POISON, RestartPolicy(max_restarts=1))
    assert "2.5 s" in str(error)
    assert "sample 7" in str(error)
    assert "File decode.py" in str(error)
    assert (error.seconds, error.sample_index, error.stack) == (2.5, 7, "  File decode.py")


def judged(policy: RestartPolicy, *is_alone: bool) -> RestartDecision:
    place = Place("sample", (0, 0, 0), 7)
    return [policy.judge(0, place, is_alone=one) for one in is_alone][-1]


def test_a_poisonous_sample_is_told_with_the_workers_that_it_cost() -> None:
    fault = WorkerFault(worker=0, pid=1, exit_code=-9, index=7)
    policy = RestartPolicy(max_restarts=100)
    decision = judged(policy, False, False, True, True)
    text = str(describe_crash(fault, decision, policy))
    assert "4 workers were lost at this point, 2 of them in isolation" in text
    assert 'on_error="skip"' in text
    other = RestartPolicy(max_restarts=100)
    text = str(describe_crash(fault, judged(other, False, False), other))  # control
    assert "a new worker replaces it and retries in isolation" in text


def test_losses_without_progress_are_told_with_their_number() -> None:
    fault = WorkerFault(worker=0, pid=1, exit_code=-9)
    policy = RestartPolicy(max_restarts=100)
    text = str(describe_crash(fault, RestartDecision.NO_PROGRESS, policy))
    assert "20 workers in its place were lost in a row" in text


def test_fork_servers_that_were_lost_are_told_with_the_limit_that_was_met() -> None:
    error = StartFailed("the fork server was ended", likely="a kill.", remedy="less")
    policy = RestartPolicy(max_restarts=17)
    assert "max_restarts=17" in str(describe_server_losses(error, RestartDecision.LIMIT, policy))
    text = str(describe_server_losses(error, RestartDecision.NO_PROGRESS, policy))
    assert "20 fork servers in a row were killed before they started a worker" in text
    assert "max_restarts" not in text
