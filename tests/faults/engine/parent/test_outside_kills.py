"""Kills from outside are not blamed on a sample, and the epoch continues with the same bits.

No test ends by a clock. A killer stops after a number of kills that cannot exhaust a budget, or
kills until a budget is exhausted. tests/soak/test_outside_kills_soak.py makes hundreds of kills.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.engine.parent import restarts as recovery
from penstock.engine.parent.restart_decision import NO_PROGRESS
from penstock.errors import StartFailed, WorkerDied
from support.datasets import PROCESS_WAYS, WAYS, assert_same, collect
from support.killer import Killer
from support.worker_faults import Fateful, FatefulBatches, FatefulStream, Log

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(300)]

LENGTH = 200
FEW_KILLS = 10
"""Below NO_PROGRESS, together with the deaths needed to find a sample that kills."""


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "met")


def a_moment() -> None:
    time.sleep(0.004)  # so that most kills hit a busy worker


class Slowly(Fateful):
    def __getitem__(self, index: int) -> torch.Tensor:
        a_moment()
        return super().__getitem__(index)


class SlowlyBatched(FatefulBatches):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        a_moment()
        return super().__getitems__(indices)


class SlowStream(FatefulStream):
    def __iter__(self) -> Any:
        for sample in super().__iter__():
            a_moment()
            yield sample


def make(dataset: Any, **arguments: Any) -> Any:
    arguments = {"batch_size": 4, "seed": 3, "max_restarts": 10**6, **arguments}
    if not isinstance(dataset, FatefulStream):
        arguments["shuffle"] = True
    return DataLoader(dataset, **arguments)


def test_an_epoch_whose_children_are_killed_all_the_time_is_the_inline_one() -> None:
    quiet = collect(make(Fateful(length=LENGTH)))
    num_epochs = 0
    with Killer(0, max_kills=NO_PROGRESS - 5) as killer:
        while not killer.is_done:
            assert_same(collect(make(Slowly(length=LENGTH), num_workers=2)), quiet)
            num_epochs += 1
    print(f"{num_epochs} epochs, {killer.num_killed} kills, {killer.num_servers} of servers")


@pytest.mark.parametrize("kind", ["fork", "getitems", "stream", "persistent", "one worker"])
def test_kills_change_nothing_however_samples_are_loaded(kind: str) -> None:
    datasets = {"getitems": (SlowlyBatched, FatefulBatches), "stream": (SlowStream, FatefulStream)}
    slow, quick = datasets.get(kind, (Slowly, Fateful))
    num_workers = 1 if kind == "one worker" else 2
    arguments = WAYS[kind] if kind in PROCESS_WAYS else {"num_workers": num_workers}
    # The order of a stream depends on the number of workers.
    calm = {"num_workers": num_workers} if kind == "stream" else {}
    is_persistent = kind == "persistent"
    quiet = make(quick(length=LENGTH), **calm)
    loader = make(slow(length=LENGTH), persistent_workers=is_persistent, **arguments)
    with Killer(5, max_kills=FEW_KILLS) as killer:
        while not killer.is_done:
            torch.manual_seed(7)
            found = collect(loader)
            torch.manual_seed(7)
            expected = collect(quiet)
            if kind == "stream":  # a stream draws from the worker's generators
                found, expected = ([batch[:, 0] for batch in one] for one in (found, expected))
            assert_same(found, expected)
    assert killer.num_killed == FEW_KILLS  # control
    loader.close()


def test_a_budget_that_is_used_up_is_the_error_and_no_sample_is() -> None:
    loader = make(Slowly(length=10**6), num_workers=2, max_restarts=6)
    with (
        Killer(1, pause_s=(0.2, 0.5), max_servers=0) as killer,
        pytest.raises(WorkerDied, match=r"6 workers were replaced.*max_restarts=6") as info,
    ):
        for _ in loader:
            pass
    assert killer.num_killed >= 7
    assert "lost at this point" not in str(info.value)


def test_fork_servers_that_are_all_killed_end_the_run_and_the_error_says_so() -> None:
    ends = (
        f"{NO_PROGRESS} fork servers in a row were killed|"
        f"{NO_PROGRESS} workers in its place were lost in a row|max_restarts=100"
    )
    loader = make(Slowly(length=10**6), num_workers=2, max_restarts=100)
    with (
        Killer(2, max_servers=None) as killer,
        pytest.raises((StartFailed, WorkerDied), match=ends) as info,
    ):
        for _ in loader:
            pass
    assert killer.num_servers
    assert "lost at this point" not in str(info.value)
    quiet = collect(make(Fateful()))
    assert_same(collect(make(Fateful(), num_workers=2)), quiet)  # with a new fork server


# -- samples that kill workers ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGKILL", "os._exit"])
def test_a_sample_that_kills_is_named_under_the_same_kills(name: str, log: Log) -> None:
    loader = make(Slowly({13: name}, log, length=LENGTH, times=999), num_workers=2)
    with Killer(3, max_kills=FEW_KILLS, max_servers=1) as killer:
        while not killer.num_killed:
            collect(make(Slowly(length=LENGTH), num_workers=2))
        with pytest.raises(WorkerDied, match=r"sample 13 .* of them in isolation") as info:
            collect(loader)
    assert info.value.sample_index == 13  # type: ignore[attr-defined]
    print(f"{killer.num_killed} kills, {len(log.lines)} deaths at the sample")


def test_only_the_sample_that_kills_is_left_out(log: Log) -> None:
    loader = make(
        Slowly({13: "SIGSEGV"}, log, length=LENGTH, times=999), num_workers=2, on_error="skip"
    )
    quiet = make(Fateful(length=LENGTH))
    with Killer(4, pause_s=(0.1, 0.6), max_kills=FEW_KILLS, max_servers=1) as killer:
        while not killer.is_done:
            expected = [batch[batch[:, 0] != 13] for batch in collect(quiet)]
            assert_same(collect(loader), expected)
    assert [one.index for one in loader.bad_samples] == [13]
    # Control: the sample itself kills workers. One of its deaths may have been an outside kill.
    assert len(log.lines) > 1


# -- workers stopped by a signal -------------------------------------------------------------------


def test_a_sample_at_which_workers_are_stopped_is_no_hung_one(log: Log) -> None:
    """A hang is blamed on the sample only the second time; see test_watchdog."""

    class Stops(Fateful):
        def meet(self, index: int) -> None:
            if index in self.fates and self.log is not None and len(self.log.lines) < self.times:
                self.log.add(index)
                os.kill(os.getpid(), signal.SIGSTOP)

    loader = make(
        Stops({13: ""}, log, times=3), num_workers=2, sample_timeout_s=0.8, on_error="skip"
    )
    assert_same(collect(loader), collect(make(Fateful())))
    assert log.lines == ["13"] * 3
    assert loader.bad_samples == []


def test_several_stopped_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "OWN_LIMIT_S", 2.0)
    iterator = iter(make(Slowly(length=LENGTH), num_workers=3))
    found = [next(iterator).clone()]
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGSTOP)
    found += [batch.clone() for batch in iterator]
    assert_same(found, collect(make(Fateful(length=LENGTH))))
