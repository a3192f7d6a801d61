"""A lost worker costs a retry, and the batches are bit-identical to those of a fault-free run."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset, TensorDataset

from penstock import DataLoader
from penstock.engine.parent.restart_decision import NO_PROGRESS
from penstock.errors import WorkerDied
from support import leftovers
from support.datasets import PROCESS_WAYS, WAYS, Unequal, assert_same, collect, differences
from support.worker_faults import (
    DEATHS,
    Fateful,
    FatefulBatches,
    FatefulStream,
    Log,
    ResumableStream,
    leave,
)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SPREAD = {index: [*DEATHS][place % 4] for place, index in enumerate((5, 17, 18, 40))}
"""One sample for each kind of death, two of them neighbors."""


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "met")


@pytest.fixture
def restarts(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """Return the number of workers replaced so far, according to the log."""
    caplog.set_level(logging.WARNING, "penstock")
    return lambda: sum("a new worker replaces it" in text for text in caplog.messages)


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, **arguments}
    return collect(DataLoader(dataset, **arguments))


@pytest.mark.legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("name", DEATHS)
def test_a_death_in_a_sample_changes_nothing_in_the_batches(
    name: str, way: str, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    assert_same(batches(Fateful({13: name}, log), **WAYS[way]), batches(Fateful()))
    assert log.lines == ["13"]  # control: the worker did die
    (told,) = caplog.messages
    assert "while loading sample 13" in told
    assert "a new worker replaces it" in told


def test_a_death_under_spawn_changes_nothing_in_the_batches(log: Log) -> None:
    spawn = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert_same(batches(Fateful({13: "SIGSEGV"}, log), **spawn), batches(Fateful()))
    assert log.lines == ["13"]


def test_another_seed_is_told_apart() -> None:
    assert differences(batches(Fateful(), seed=4), batches(Fateful()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_pytorchs_loader_dies_at_the_first_one(log: Log) -> None:
    torch_loader = TorchDataLoader(
        Fateful({13: "SIGKILL"}, log), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    # torch's loader may instead raise the error of fetching data that the dead worker left for it.
    words = r"killed|exited unexpectedly|reset|refused|No such file|Broken pipe|^$"
    with pytest.raises((RuntimeError, OSError, EOFError), match=words):
        collect(torch_loader)
    assert log.lines == ["13"]  # the cause


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_several_deaths_change_nothing(way: str, log: Log, restarts: Any) -> None:
    found = batches(Fateful(SPREAD, log), **{**WAYS[way], "num_workers": 3})
    assert_same(found, batches(Fateful()))
    assert sorted(map(int, log.lines)) == sorted(SPREAD)
    assert restarts() == len(SPREAD)


@pytest.mark.parametrize("at", [[0], [47], [0, 1, 2, 3], [44, 45, 46, 47]])
def test_deaths_in_the_first_and_in_the_last_batch(at: list[int], log: Log) -> None:
    dataset = Fateful(dict.fromkeys(at, "SIGKILL"), log)
    found = batches(dataset, shuffle=False, num_workers=4)
    assert_same(found, batches(Fateful(), shuffle=False))
    assert sorted(map(int, log.lines)) == at


def stacked(samples: list[torch.Tensor]) -> dict[str, Any]:
    drawn = torch.rand(2)
    return {"stack": torch.stack(samples), "rest": [f"{len(samples)} samples"], "drawn": drawn}


KINDS: dict[str, dict[str, Any]] = {
    "a collate_fn": {"collate_fn": stacked},
    "no batches": {"batch_size": None},
    "a sampler": {"sampler": [*range(40, 3, -1)], "shuffle": None, "seed": None},
    "a batch sampler": {
        "batch_sampler": [[5, 6], [17, 18, 40], [1]],
        "shuffle": None,
        "seed": None,
        "batch_size": 1,
    },
    "a prefetch of one": {"prefetch_factor": 1},
    "a rest that is dropped": {"batch_size": 7, "drop_last": True},
    "ranks": {"rank": 1, "world_size": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_deaths_change_nothing_however_samples_are_put_together(kind: str, log: Log) -> None:
    torch.manual_seed(9)
    found = batches(Fateful(SPREAD, log), num_workers=2, **KINDS[kind])
    torch.manual_seed(9)
    quiet = {name: value for name, value in KINDS[kind].items() if name != "prefetch_factor"}
    assert_same(found, batches(Fateful(), **quiet))
    assert log.lines  # control


@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(48))])
def test_deaths_in_getitems_change_nothing(wrap: Any, way: str, log: Log) -> None:
    found = batches(wrap(FatefulBatches(SPREAD, log)), **WAYS[way])
    assert_same(found, batches(wrap(FatefulBatches())))
    assert len(log.lines) == len(SPREAD)


def test_out_of_order_nothing_is_lost_and_nothing_doubled(log: Log) -> None:
    def as_sets(found: list[Any]) -> list[Any]:
        return sorted(batch.tolist() for batch in found)

    found = batches(Fateful(SPREAD, log), num_workers=3, in_order=False)
    assert as_sets(found) == as_sets(batches(Fateful()))
    assert len(log.lines) == len(SPREAD)


def test_with_randomness_of_the_worker_every_sample_comes_once_and_in_its_place(log: Log) -> None:
    found = batches(Fateful(SPREAD, log), num_workers=2, randomness="worker", shuffle=False)
    assert [batch[:, 0].tolist() for batch in found] == [
        [*range(n, n + 4)] for n in range(0, 48, 4)
    ]
    assert len(log.lines) == len(SPREAD)


def test_a_death_in_a_collate_fn_costs_a_retry_too(log: Log) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        if any(int(sample[0]) == 20 for sample in samples) and not log.lines:
            log.add("met")
            leave()
        return torch.stack(samples)

    found = batches(Fateful(), num_workers=2, collate_fn=collate)
    assert_same(found, batches(Fateful()))
    assert log.lines == ["met"]


def test_a_worker_that_dies_in_its_init_fn_is_tried_again(log: Log, restarts: Any) -> None:
    def init(number: int) -> None:
        if number == 1 and len(log.lines) < 2:
            log.add("met")
            leave()

    found = batches(Fateful(), num_workers=2, worker_init_fn=init)
    assert_same(found, batches(Fateful()))
    assert restarts() == 2


# -- restart limits --------------------------------------------------------------------------------


def test_without_restarts_the_first_death_is_the_end(log: Log) -> None:
    with pytest.raises(WorkerDied, match="sample 13"):
        batches(Fateful({13: "os._exit"}, log), num_workers=2, max_restarts=0)


def test_restarts_are_bounded_and_the_error_says_so(log: Log) -> None:
    dataset = Fateful(dict.fromkeys(range(0, 48, 4), "os._exit"), log)
    with pytest.raises(WorkerDied, match="max_restarts=3") as info:
        batches(dataset, num_workers=2, max_restarts=3)
    assert info.value.num_restarts == 3  # type: ignore[attr-defined]
    assert len(log.lines) in (4, 5)  # the fourth is the last; the other worker may meet one too
    log.add("none")
    assert len(batches(dataset, num_workers=2, max_restarts=12)) == 12  # control


def test_restarts_leave_no_descriptors_and_no_threads(log: Log) -> None:
    dataset = Fateful(dict.fromkeys(range(0, 240, 12), "SIGKILL"), log, length=240)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=2))

    def census() -> tuple[int, int]:
        fds = [name for name in leftovers.look().fds.values() if "memfd" not in name]
        return len(fds), psutil.Process().num_threads()  # without memfds, because the ring grows

    next(iterator)
    before, num_before = census(), len(log.lines)
    for _ in range(57):
        next(iterator)
    assert len(log.lines) == 20
    assert num_before < 10  # control
    assert census() == before
    assert len(list(iterator)) == 2


# -- kills from outside ----------------------------------------------------------------------------


class Waiting(Fateful):
    """Samples that sleep briefly, so that a kill hits a busy worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return super().__getitem__(index)


@pytest.mark.legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_all_workers_killed_at_once_change_nothing(way: str, restarts: Any) -> None:
    loader = DataLoader(
        Waiting(length=200), batch_size=4, shuffle=True, seed=3, **{**WAYS[way], "num_workers": 3}
    )
    iterator, found = iter(loader), []
    for batch in iterator:
        found.append(batch.clone())
        if len(found) in (3, 25):
            for worker in iterator._workers:
                os.kill(worker.pid, signal.SIGKILL)
    assert_same(found, batches(Fateful(length=200)))
    assert restarts() == 6


def test_data_in_memory_is_delivered_in_spite_of_kills() -> None:
    numbers = torch.arange(4000)
    iterator = iter(DataLoader(TensorDataset(numbers), batch_size=4, num_workers=2))
    found = [next(iterator)[0].clone()]
    for worker in iterator._workers:
        os.kill(worker.pid, signal.SIGKILL)
    found += [batch.clone() for (batch,) in iterator]
    assert torch.equal(torch.cat(found), numbers)


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_persistent_workers_killed_between_epochs_are_replaced(way: str, restarts: Any) -> None:
    loader = DataLoader(
        Fateful(), batch_size=4, shuffle=True, seed=3, persistent_workers=True, **WAYS[way]
    )
    quiet = DataLoader(Fateful(), batch_size=4, shuffle=True, seed=3)
    for _ in range(3):
        assert_same(collect(loader), collect(quiet))
        pids = [worker.pid for worker in loader._iterator._workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert leftovers.wait_until_gone(pids) == []
    assert restarts() == 4
    loader.close()


def test_the_fork_server_killed_in_the_middle_is_replaced_with_its_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(Waiting(length=400), batch_size=4, shuffle=True, seed=3, num_workers=2)
    iterator = iter(loader)
    found = [next(iterator).clone()]
    old, pids = leftovers.fork_server_pid(), [worker.pid for worker in iterator._workers]
    assert old is not None
    os.kill(old, signal.SIGKILL)
    assert leftovers.wait_until_gone([old, *pids]) == []
    found += [batch.clone() for batch in iterator]
    assert_same(found, batches(Fateful(length=400)))
    assert leftovers.fork_server_pid() not in (None, old)
    assert sum("died with its fork server" in text for text in caplog.messages) == 2


def test_a_fork_server_killed_again_and_again_blames_no_sample() -> None:
    loader = DataLoader(Waiting(length=400), batch_size=4, shuffle=True, seed=3, num_workers=2)
    found = []
    for batch in loader:
        found.append(batch.clone())
        if len(found) in (10, 11):  # both kills hit the same samples
            pid = leftovers.fork_server_pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    assert_same(found, batches(Fateful(length=400)))


class HoldsThePipe(Fateful):
    """The worker leaves a child that keeps the inherited descriptors open."""

    def meet(self, index: int) -> None:
        if index in self.fates and self.log is not None and not self.log.lines:
            child = subprocess.Popen(["sleep", "300"], close_fds=False)
            self.log.add(child.pid)
            leave()


def test_a_worker_whose_child_holds_its_pipe_open_is_missed_all_the_same(log: Log) -> None:
    try:
        found = batches(HoldsThePipe({13: ""}, log), num_workers=2)
        assert_same(found, batches(Fateful()))
        assert leftovers.is_running(int(log.lines[0]))  # control: the pipe stayed open
    finally:
        for pid in log.lines:
            os.kill(int(pid), signal.SIGKILL)


# -- epochs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_death_in_an_epoch_that_is_left_does_not_touch_the_next(
    is_persistent: bool, log: Log
) -> None:
    loader = DataLoader(
        Fateful(dict.fromkeys(range(8, 48, 3), "os._exit"), log),
        batch_size=4,
        shuffle=True,
        seed=3,
        num_workers=2,
        persistent_workers=is_persistent,
    )
    quiet = DataLoader(Fateful(), batch_size=4, shuffle=True, seed=3)
    for num_taken in (1, 3, 5, 12):
        for (_, ours), theirs in zip(
            zip(range(num_taken), loader, strict=False), quiet, strict=False
        ):
            assert_same(ours, theirs)
    assert_same(collect(loader), collect(quiet))
    assert len(log.lines) > 5  # control
    loader.close()


def test_an_epoch_with_deaths_is_resumed_where_it_stood(log: Log) -> None:
    def make(dataset: Any, **arguments: Any) -> Any:
        return DataLoader(dataset, batch_size=4, shuffle=True, seed=3, **arguments)

    iterator = iter(loader := make(Fateful(SPREAD, log), num_workers=2))
    found = [next(iterator).clone() for _ in range(6)]
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    other = make(Fateful(SPREAD, log), num_workers=3)
    other.load_state_dict(state)
    assert_same(found + collect(other), collect(make(Fateful())))
    assert len(log.lines) == 4


# -- iterable datasets -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("batch_size", [3, None])
def test_a_stream_goes_on_without_loss_and_without_doubles(
    batch_size: Any, way: str, log: Log
) -> None:
    stream = FatefulStream({0: "SIGKILL", 13: "SIGSEGV", 14: "os._exit", 39: "SIGABRT"}, log)
    torch.manual_seed(5)
    found = collect(DataLoader(stream, batch_size=batch_size, **WAYS[way]))
    torch.manual_seed(5)
    assert_same(found, collect(DataLoader(FatefulStream(), batch_size=batch_size, **WAYS[way])))
    assert len(log.lines) == 4


def test_a_stream_with_a_state_goes_on_from_it(tmp_path: Path, log: Log) -> None:
    seen = Log(tmp_path / "seen")
    stream = ResumableStream({20: "SIGKILL", 33: "SIGKILL"}, log, seen)
    found = torch.cat(collect(DataLoader(stream, batch_size=2, num_workers=2)))
    assert sorted(found.tolist()) == [*range(40)]
    assert len(log.lines) == 2
    # Control: without a state, the 20 samples before the first death would be loaded again.
    assert len(seen.lines) < 40 + 2 * 2 * 2


def test_a_persistent_stream_goes_on_in_later_epochs(tmp_path: Path, log: Log) -> None:
    for stream in (
        FatefulStream({13: "SIGKILL", 20: "SIGKILL"}, log),
        ResumableStream({13: "SIGKILL", 20: "SIGKILL"}, Log(tmp_path / "b"), Log(tmp_path / "c")),
    ):
        loader = DataLoader(stream, batch_size=2, num_workers=2, persistent_workers=True)
        for number in range(3):
            found = torch.cat(collect(loader)).reshape(40, -1)[:, 0]
            assert sorted(found.tolist()) == [*range(40)], number
            if number == 1:
                for worker in loader._iterator._workers:
                    os.kill(worker.pid, signal.SIGKILL)
        loader.close()


def test_a_worker_killed_after_its_share_has_ended_gives_nothing_twice() -> None:
    """The shares have 3, 6 and 9 samples. The first worker is idle while the others continue."""

    class SlowlyUnequal(Unequal):
        def __iter__(self) -> Any:
            for sample in super().__iter__():
                time.sleep(0.02)
                yield sample

    quiet = collect(DataLoader(Unequal(), batch_size=1, num_workers=3))
    iterator, found = iter(DataLoader(SlowlyUnequal(), batch_size=1, num_workers=3)), []
    for batch in iterator:
        found.append(batch.clone())
        if len(found) == 11:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
    assert_same(found, quiet)


class PatchyStream(IterableDataset):
    """Numbers from 0, except 4 to 7 and 12, which raise. Worker 0 dies once, at 20."""

    def __init__(self, log: Log) -> None:
        self.fate = Fateful({20: "SIGKILL"}, log)

    def __iter__(self) -> Any:
        self.numbers = iter(range(32))
        return self

    def __next__(self) -> torch.Tensor:
        number = next(self.numbers)
        if number in (4, 5, 6, 7, 12):
            raise OSError(f"shard {number}")
        self.fate.meet(number)
        return torch.tensor(number)


def test_a_patchy_stream_goes_on_and_its_bad_samples_are_told_once(log: Log) -> None:
    """The second batch is empty. Loading it again must not count its bad samples twice."""
    loader = DataLoader(PatchyStream(log), batch_size=4, num_workers=1, on_error="skip")
    assert [batch.tolist() for batch in loader] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
        [13, 14, 15],
        *([*range(n, n + 4)] for n in range(16, 32, 4)),
    ]
    assert [one.count for one in loader.bad_samples] == [1] * 5
    assert log.lines == ["20"]


# -- samples that always kill ----------------------------------------------------------------------


def poisoned(log: Log, at: Any = (13,), **arguments: Any) -> Fateful:
    return Fateful(dict.fromkeys(at, "SIGSEGV"), log, times=99, **arguments)


@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("name", DEATHS)
def test_a_sample_that_ends_workers_alone_is_named_after_four_deaths(
    name: str, way: str, log: Log
) -> None:
    dataset = Fateful({13: name}, log, times=99)
    with pytest.raises(WorkerDied, match=r"sample 13.*4 workers.*2 of them in isolation") as info:
        batches(dataset, **WAYS[way])
    assert info.value.sample_index == 13  # type: ignore[attr-defined]
    assert log.lines == ["13"] * 4


def test_a_sample_that_is_loaded_alone_without_harm_is_not_left_out(
    log: Log, restarts: Any
) -> None:
    """Two workers die there, as if by chance. The third loads the sample alone without dying."""
    loader = DataLoader(
        Fateful({13: "SIGKILL"}, log, times=2),
        batch_size=4,
        shuffle=True,
        seed=3,
        num_workers=2,
        on_error="skip",
    )
    assert_same(collect(loader), batches(Fateful()))
    assert log.lines == ["13", "13"]
    assert restarts() == 2
    assert loader.bad_samples == []


@pytest.mark.parametrize("kind", [{"collate_fn": torch.stack}, {"batch_size": None}], ids=str)
def test_poison_is_found_however_samples_are_put_together(kind: Any, log: Log) -> None:
    quiet = [
        batch[batch[:, 0] != 13] if batch.ndim == 2 else batch
        for batch in batches(Fateful(), **kind)
        if batch.ndim == 2 or int(batch[0]) != 13
    ]
    found = batches(poisoned(log), num_workers=2, on_error="skip", **kind)
    assert_same(found, quiet)
    assert log.lines == ["13"] * 4


class Truncated(Fateful):
    """Sample 13 is in a truncated file, which is detected when the sample is copied."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != 13 or self.log is None:
            return torch.full((1 << 18,), index, dtype=torch.int64)
        self.log.add(index)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        path = f"{self.log.path}-{os.getpid()}"
        mapped = np.memmap(path, dtype=np.int64, mode="w+", shape=(1 << 18,))
        os.truncate(path, 0)
        return torch.from_numpy(mapped)


def test_a_sample_that_kills_when_it_is_copied_is_found_alone(log: Log) -> None:
    loader = DataLoader(Truncated({}, log, length=20), batch_size=4, num_workers=2, on_error="skip")
    found = [int(row[0]) for batch in loader for row in batch]
    assert found == [*range(13), *range(14, 20)]
    assert log.lines == ["13"] * 4
    assert "SIGBUS" in loader.bad_samples[0].error


class DiesInCompany(Fateful):
    """Sample 13 kills a worker that has already loaded a different sample."""

    num_loaded = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13 and self.num_loaded:
            leave()
        self.num_loaded += index != 13
        return super().__getitem__(index)


def test_a_sample_that_ends_no_worker_alone_is_not_blamed_and_the_loop_has_an_end(
    restarts: Any,
) -> None:
    loader = DataLoader(
        DiesInCompany(), batch_size=8, num_workers=2, on_error="skip", max_restarts=10**6
    )
    with pytest.raises(WorkerDied, match=f"{NO_PROGRESS} workers in its place were lost in a row"):
        collect(loader)
    assert restarts() == NO_PROGRESS - 1
    assert loader.bad_samples == []


@pytest.mark.parametrize("way", PROCESS_WAYS)
@pytest.mark.parametrize("kind", [Fateful, FatefulBatches])
def test_poison_is_skipped_and_nothing_else_moves(kind: Any, way: str, log: Log) -> None:
    dataset = kind({13: "SIGSEGV", 30: "os._exit"}, log, times=99)
    loader = DataLoader(dataset, batch_size=4, on_error="skip", shuffle=True, seed=3, **WAYS[way])
    found = collect(loader)
    quiet = [batch[(batch[:, 0] != 13) & (batch[:, 0] != 30)] for batch in batches(Fateful())]
    if kind is Fateful:
        assert_same(found, quiet)
    else:  # draws happen per call
        assert [batch[:, 0].tolist() for batch in found] == [b[:, 0].tolist() for b in quiet]
    bad = {one.index: one for one in loader.bad_samples}
    assert sorted(bad) == [13, 30]
    assert "SIGSEGV" in bad[13].error
    assert "exit code 7" in bad[30].error


def test_poison_is_replaced_by_the_substitute_that_any_bad_sample_would_get(log: Log) -> None:
    found = batches(poisoned(log), num_workers=2, on_error="replace")
    failing = Fateful({13: "error"}, Log(f"{log.path}-other"), times=99)
    assert_same(found, batches(failing, on_error="replace"))
    assert differences(found, batches(Fateful()))  # control


def test_a_function_is_told_what_the_sample_did_to_the_workers(log: Log) -> None:
    def decide(index: int, error: Exception) -> Any:
        assert isinstance(error, WorkerDied)
        return torch.full((4,), error.exit_code)  # type: ignore[attr-defined]

    found = torch.cat(batches(poisoned(log), num_workers=2, shuffle=False, on_error=decide))
    assert found[13].tolist() == [-11] * 4
    assert found[12:15, 0].tolist() == [12, -11, 14]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_poison_is_not_tried_again_in_later_epochs(is_persistent: bool, log: Log) -> None:
    loader = DataLoader(
        poisoned(log),
        batch_size=4,
        shuffle=True,
        seed=3,
        on_error="skip",
        num_workers=2,
        persistent_workers=is_persistent,
    )
    for epoch in range(3):
        assert sum(len(batch) for batch in loader) == 47, epoch
    assert log.lines == ["13"] * 4
    assert [(one.index, one.count) for one in loader.bad_samples] == [(13, 3)]
    loader.close()


@pytest.mark.parametrize("num_workers", [2, 0, "auto"])
def test_poison_is_remembered_by_a_saved_state(num_workers: Any, log: Log) -> None:
    def make(**arguments: Any) -> Any:
        return DataLoader(
            poisoned(log), batch_size=4, shuffle=True, seed=3, on_error="skip", **arguments
        )

    iterator = iter(loader := make(num_workers=2))
    found = []
    while not loader.bad_samples:
        found.append(next(iterator).clone())
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["bad"]["poison"] == [13]
    del iterator
    other = make(num_workers=num_workers)
    other.load_state_dict(state)
    found += collect(other)
    assert sum(len(batch) for batch in found) == 47
    assert sum(len(batch) for batch in other) == 47  # the next epoch, complete
    assert log.lines == ["13"] * 4


@pytest.mark.parametrize("kind", [int, torch.tensor, str])
def test_poison_is_remembered_whatever_an_index_is(kind: Any, log: Log) -> None:
    class Named(Fateful):
        def __getitem__(self, index: Any) -> torch.Tensor:
            return super().__getitem__(int(index))

    sampler = [kind(index) for index in range(20)]
    dataset = Named({13: "SIGSEGV"}, log, times=99)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, on_error="skip", num_workers=2)
    for _ in range(2):
        assert sum(len(batch) for batch in loader) == 19
    assert log.lines == ["13"] * 4


def test_a_substitute_that_is_poison_too_gives_way_to_the_next(log: Log) -> None:
    """Half of the dataset kills its worker. The other half provides the substitutes."""
    at = range(0, 16, 2)
    dataset = poisoned(log, at, length=16)
    found = batches(dataset, num_workers=2, on_error="replace", max_restarts=1000)
    failing = Fateful(dict.fromkeys(at, "error"), Log(f"{log.path}-other"), times=99, length=16)
    assert_same(found, batches(failing, on_error="replace"))
    assert all(int(sample[0]) % 2 for batch in found for sample in batch)


def test_poison_in_a_first_batch_of_many_parts_is_found(log: Log) -> None:
    loader = DataLoader(
        poisoned(log, (0, 1, 3), length=8), batch_size=4, num_workers=4, on_error="skip"
    )
    assert [batch[:, 0].tolist() for batch in loader] == [[2], [4, 5, 6, 7]]
    assert sorted(one.index for one in loader.bad_samples) == [0, 1, 3]


def test_a_collate_fn_that_kills_is_an_error_also_where_samples_are_skipped() -> None:
    loader = DataLoader(
        Fateful(), batch_size=4, num_workers=2, collate_fn=lambda samples: leave(), on_error="skip"
    )
    with pytest.raises(WorkerDied) as info:
        collect(loader)
    assert info.value.sample_index is None  # type: ignore[attr-defined]


def test_a_stream_that_always_dies_at_one_place_is_an_error(log: Log) -> None:
    stream = FatefulStream({13: "os._exit"}, log)
    stream.fate.times = 99
    with pytest.raises(WorkerDied, match="4 workers were lost at this point"):
        collect(DataLoader(stream, batch_size=2, num_workers=2, on_error="skip"))
    assert log.lines == ["13"] * 4
