"""A sample that kills its worker is reported with the exit code, and nothing hangs.

test_recovery.py shows that a worker killed once costs only a retry.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Subset

from penstock import DataLoader
from penstock.errors import WorkerDied
from support import leftovers
from support.datasets import PROCESS_WAYS, WAYS, Numbers, Shards, Slow, collect
from support.worker_faults import abort, kill, leave, segfault

pytestmark = pytest.mark.fault

PROMPT_S = 40.0
"""Below the limits for a hung worker, far above the time that a busy machine needs."""


def leave_politely() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


DEATHS: dict[str, tuple[Callable[[], None], int]] = {
    "SIGKILL": (kill, -9),
    "SIGSEGV": (segfault, -11),
    "SIGABRT": (abort, -6),
    "os._exit": (leave, 7),
    "sys.exit": (leave_politely, 3),
}


class Deadly(Numbers):
    """Sample ``at`` ends the worker that loads it."""

    def __init__(self, die: Callable[[], None], at: int = 7, length: int = 40) -> None:
        super().__init__(length)
        self.die = die
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files in the test folder
            faulthandler.disable()  # inherited from pytest by fork; it would print stacks
            self.die()
        return super().__getitem__(index)


def run_until_death(loader: Any) -> tuple[WorkerDied, Any, float]:
    """Iterate until the death. Also returns the iterator and the duration of the last wait."""
    iterator = iter(loader)
    while True:
        started = time.monotonic()
        try:
            next(iterator)
        except WorkerDied as error:
            error.__traceback__ = None  # it would keep this frame and the iterator alive
            return error, iterator, time.monotonic() - started


@pytest.mark.legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("name", DEATHS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_death_is_told_at_once_with_its_code_and_its_sample(name: str, way: str) -> None:
    die, exit_code = DEATHS[name]
    error, iterator, waited_s = run_until_death(DataLoader(Deadly(die), batch_size=4, **WAYS[way]))
    facts: Any = error
    assert waited_s < PROMPT_S
    assert isinstance(error, RuntimeError)
    assert facts.exit_code == exit_code
    assert facts.sample_index == 7
    assert facts.worker in (0, 1)
    assert "sample 7" in str(error)
    assert f"pid {facts.pid}" in str(error)
    if exit_code < 0:
        assert name in str(error)
    assert leftovers.wait_until_gone([w.pid for w in iterator._workers]) == []


def test_a_death_is_told_at_once_under_spawn() -> None:
    die, exit_code = DEATHS["sys.exit"]
    error, _, _ = run_until_death(
        DataLoader(
            Deadly(die),
            batch_size=4,
            num_workers=1,
            multiprocessing_context="spawn",
            max_restarts=0,  # each one imports torch
        )
    )
    facts: Any = error
    assert (facts.exit_code, facts.sample_index) == (exit_code, 7)


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_after_a_death_next_says_so_again_and_does_not_hang(way: str) -> None:
    error, iterator, _ = run_until_death(DataLoader(Deadly(kill), batch_size=4, **WAYS[way]))
    for _ in range(3):
        with pytest.raises(WorkerDied) as info:
            next(iterator)
        assert str(info.value) == str(error)


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_after_a_death_the_same_loader_can_start_a_new_epoch(way: str) -> None:
    loader = DataLoader(Deadly(kill, at=39), batch_size=4, **WAYS[way])
    for _ in range(2):
        _, iterator, _ = run_until_death(loader)
        del iterator
    loader.dataset.at = -1
    assert len(collect(loader)) == 10


def test_after_a_death_persistent_workers_are_new_ones_in_the_next_epoch() -> None:
    loader = DataLoader(Deadly(kill), batch_size=4, num_workers=2, persistent_workers=True)
    _, iterator, _ = run_until_death(loader)
    del iterator
    loader.dataset.at = -1
    loader.close()
    assert len(collect(loader)) == 10
    loader.close()


@pytest.mark.parametrize("at", range(4))
def test_in_the_first_batch_which_several_workers_load_the_right_sample_is_named(at: int) -> None:
    error, _, _ = run_until_death(DataLoader(Deadly(kill, at=at), batch_size=4, num_workers=4))
    assert error.sample_index == at  # type: ignore[attr-defined]


def test_the_name_is_the_index_and_not_the_position() -> None:
    loader = DataLoader(Deadly(kill), batch_size=2, sampler=[30, 20, 10, 7, 5], num_workers=1)
    error, _, _ = run_until_death(loader)
    assert error.sample_index == 7  # type: ignore[attr-defined]


def test_without_batches_the_sample_is_named_too() -> None:
    loader = DataLoader(Deadly(kill), batch_size=None, num_workers=2)
    assert run_until_death(loader)[0].sample_index == 7  # type: ignore[attr-defined]


def test_in_a_subset_no_innocent_sample_is_named() -> None:
    loader = DataLoader(Subset(Deadly(kill), range(40)), batch_size=4, num_workers=1)
    error: Any = run_until_death(loader)[0]
    named = error.sample_index
    assert named is None or named == 7 or (isinstance(named, (list, tuple)) and 7 in named), named
    assert "sample 4 " not in str(error)


def test_a_death_in_worker_init_fn_is_told() -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, worker_init_fn=lambda n: leave())
    error: Any = run_until_death(loader)[0]
    assert error.exit_code == 7
    assert error.sample_index is None


class DiesOnArrival(Numbers):
    def __setstate__(self, state: dict[str, Any]) -> None:
        os._exit(9)


def test_a_death_while_the_dataset_is_unpacked_is_told() -> None:
    error: Any = run_until_death(DataLoader(DiesOnArrival(), batch_size=4, num_workers=1))[0]
    assert error.exit_code == 9


def test_a_death_in_an_iterable_dataset_is_told() -> None:
    class DeadlyShards(Shards):
        def __iter__(self) -> Any:
            yield from range(5)
            leave()

    error: Any = run_until_death(DataLoader(DeadlyShards(), batch_size=2, num_workers=1))[0]
    assert error.exit_code == 7


def test_a_death_in_a_collate_fn_is_told() -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, collate_fn=lambda samples: leave())
    error: Any = run_until_death(loader)[0]
    assert error.exit_code == 7


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_without_restarts_a_worker_killed_from_outside_is_told_at_once(way: str) -> None:
    loader = DataLoader(Slow(40, stuck=5), batch_size=2, max_restarts=0, **WAYS[way])
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.2)
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied) as info:
        list(iterator)
    assert time.monotonic() - started < PROMPT_S
    assert info.value.exit_code == -9  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_without_restarts_a_persistent_worker_killed_between_epochs_is_told_at_once(
    way: str,
) -> None:
    loader = DataLoader(
        Numbers(), batch_size=2, persistent_workers=True, max_restarts=0, **WAYS[way]
    )
    collect(loader)
    os.kill(loader._iterator._workers[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied) as info:
        collect(loader)
    assert time.monotonic() - started < PROMPT_S
    assert info.value.worker == 1  # type: ignore[attr-defined]
    loader.close()


def test_a_loader_without_a_death_tells_of_none() -> None:
    assert len(collect(DataLoader(Deadly(kill, at=-1), batch_size=4, num_workers=2))) == 10


@pytest.mark.parametrize("end", [leave_politely, interrupt])
def test_a_thread_that_is_told_to_exit_is_an_error_and_not_a_hang(end: Any) -> None:
    loader = DataLoader(Deadly(end), batch_size=4, num_workers=2, pool="thread")
    with pytest.raises(RuntimeError, match="sample 7"):
        collect(loader)
