"""Regression tests for defects found in the fault handling."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock import DataLoader
from penstock.engine.parent import fork_server as fork_servers
from penstock.engine.parent import restarts as recovery
from penstock.errors import NoSubstitute, SampleTimeout, TooManyBad
from support import leftovers
from support.datasets import Numbers, Slow, collect

pytestmark = [pytest.mark.fault, pytest.mark.legacy]


class Broken(Numbers):
    """Some samples raise."""

    def __init__(self, bad: Any, length: int = 16) -> None:
        super().__init__(length)
        self.bad = frozenset(bad)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError("broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_nobody_keeps_has_its_budget_and_its_file(
    tmp_path: Path, num_workers: int
) -> None:
    file = tmp_path / "bad.jsonl"
    with pytest.raises(TooManyBad):
        for _ in DataLoader(
            Broken({3}),
            on_error="skip",
            max_bad=0,
            bad_samples_file=file,
            num_workers=num_workers,
        ):
            pass
    (line,) = file.read_text().splitlines()
    assert json.loads(line)["time"]


def test_bad_substitutes_do_not_count_as_further_samples() -> None:
    loader = DataLoader(Broken(range(8)), batch_size=4, on_error="replace", max_bad=8, seed=0)
    assert len(collect(loader)) == 4


def test_a_budget_that_is_spent_does_not_count_what_was_not_delivered() -> None:
    loader = DataLoader(Broken({1, 5}), batch_size=4, on_error="skip", max_bad=1, seed=0)
    with pytest.raises(TooManyBad):
        collect(loader)
    assert loader.state_dict()["bad"]["positions"] == [1]
    more = DataLoader(Broken({1, 5}), batch_size=4, on_error="skip", max_bad=2, seed=0)
    more.load_state_dict(loader.state_dict())
    assert len(collect(more)) == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_nothing_can_stand_in_the_bad_sample_is_listed_and_the_reason_given(
    num_workers: int,
) -> None:
    loader = DataLoader(Broken({0}, length=1), on_error="replace", num_workers=num_workers)
    with pytest.raises(NoSubstitute, match="has no other sample"):
        collect(loader)
    assert [bad.index for bad in loader.bad_samples] == [0]


@pytest.mark.parametrize("batch_size", [None, 4])
def test_stop_iteration_in_a_sample_is_no_end_of_the_epoch(batch_size: int | None) -> None:
    class Stopping(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise StopIteration
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="StopIteration"):
        collect(DataLoader(Stopping(16), batch_size=batch_size))


def test_an_on_error_that_draws_gives_the_same_in_threads() -> None:
    def draw(index: Any, error: Exception) -> Any:
        return index, random.random()

    class Drawing(Broken):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return index, random.random()

    def run(**arguments: Any) -> Any:
        data = Drawing(range(0, 64, 5), length=64)
        loader = DataLoader(data, batch_size=4, seed=1, on_error=draw, **arguments)
        return [(indices.tolist(), drawn.tolist()) for indices, drawn in loader]

    assert run() == run(num_workers=2, pool="thread") == run(num_workers=2)


def test_the_log_has_the_likely_cause(caplog: pytest.LogCaptureFixture) -> None:
    iterator = iter(DataLoader(Slow(8, sample_s=0.05), batch_size=2, num_workers=2))
    next(iterator)
    with caplog.at_level(logging.WARNING, "penstock"):
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        collect(iterator)
    assert "Likely: another process killed it" in caplog.text


def test_a_worker_stopped_in_the_middle_of_a_sample_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "OWN_LIMIT_S", 2.0)
    iterator = iter(DataLoader(Slow(12, sample_s=0.2), batch_size=2, num_workers=2))
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGSTOP)
    assert len(collect(iterator)) == 5


def hang_at_start(worker: int) -> None:
    time.sleep(3600)


def test_a_worker_that_does_not_get_ready_is_hung_where_there_is_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "STARTING_S", 1.5)
    loader = DataLoader(
        Numbers(8), num_workers=1, sample_timeout_s=0.3, worker_init_fn=hang_at_start
    )
    with pytest.raises(SampleTimeout, match="during startup") as info:
        collect(loader)
    assert "hang_at_start" in str(info.value)


def test_a_fork_server_killed_while_it_starts_is_replaced() -> None:
    fork_servers.close_fork_server()
    fork_server = fork_servers.current_fork_server()
    psutil.Process(fork_server.pid).kill()
    assert len(collect(DataLoader(Numbers(8), batch_size=2, num_workers=1))) == 4
    assert leftovers.fork_server_pid() != fork_server.pid


def test_a_signal_handler_of_the_user_s_is_heard_while_a_worker_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterator = iter(DataLoader(Slow(20, sample_s=0.02), batch_size=2, num_workers=1))
    next(iterator)
    pool = iterator._producer.dispatcher.pool

    def interrupted(worker: int) -> None:
        raise TimeoutError("my own alarm")

    monkeypatch.setattr(pool, "replace", interrupted)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(TimeoutError, match="my own alarm"):
        collect(iterator)
