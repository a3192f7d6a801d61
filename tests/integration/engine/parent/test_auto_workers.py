"""num_workers="auto" times the first batches in this process and starts workers if they help."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from penstock import DataLoader
from penstock.engine.parent import auto_workers
from penstock.engine.parent import fork_server as fork_servers
from penstock.machine.collect import quick_facts
from support.datasets import Numbers, Samples, Shards, assert_same, collect, draw

legacy = pytest.mark.legacy
CORES = quick_facts().usable_cores
needs_cores = pytest.mark.skipif(CORES < 2, reason="one core: workers never pay there")


def busy(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Slow(Dataset):
    """Samples slow enough to benefit from workers. Each contains the PID that loaded it."""

    def __init__(self, length: int = 120, work_s: float = 0.006) -> None:
        self.length = length
        self.work_s = work_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        busy(self.work_s)
        return *draw(index), os.getpid()


class Waiting(Slow):
    """Samples that wait, as for a disk, and leave the cores to others."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.work_s)
        return *draw(index), os.getpid()


@pytest.fixture
def warm_fork_server() -> None:
    fork_server = fork_servers.current_fork_server()
    limit_s = time.monotonic() + 240
    while not fork_server.is_warm() and time.monotonic() < limit_s:
        time.sleep(0.01)


def run(loader: DataLoader[Any]) -> tuple[list[int], list[int]]:
    """Return the indices of the samples and the PID that loaded each."""
    batches = list(loader)
    indices = [int(index) for batch in batches for index in batch[0]]
    return indices, [int(pid) for batch in batches for pid in batch[-1]]


@legacy
@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
def test_slow_samples_get_the_cores_and_the_first_batch_is_not_wasted() -> None:
    loader = DataLoader(Slow(400), batch_size=8, num_workers="auto")
    indices, pids = run(loader)
    assert indices == list(range(400))  # each once, in order, across the switch
    assert set(pids[:8]) == {os.getpid()}
    assert os.getpid() not in set(pids[-40:])
    # On 16 cores, one worker fewer is close enough. Time taken by other programs looks like
    # waiting, which adds workers.
    assert loader.num_workers >= 0.9 * CORES
    choice = loader.plan.num_workers
    assert choice.source == "measured"
    assert "a batch takes" in choice.reason


@pytest.mark.slow
@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
def test_the_bits_do_not_depend_on_where_the_change_came() -> None:
    def epochs(**arguments: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = DataLoader(Slow(), batch_size=8, shuffle=True, **arguments)
        return [[batch[:-1] for batch in loader] for _ in range(2)]

    inline = epochs(num_workers=0)
    for arguments in ({}, {"multiprocessing_context": "spawn"}):
        assert_same(epochs(num_workers="auto", **arguments), inline)
    kept = epochs(num_workers="auto", persistent_workers=True)
    assert_same(kept, epochs(num_workers=2, persistent_workers=True))


@pytest.mark.parametrize(
    "make", [lambda: Samples(draw, 40), lambda: TensorDataset(torch.arange(40))]
)
def test_the_bits_of_persistent_workers_do_not_depend_on_whether_they_pay(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    # A batch that waits for a core must not count: the decision comes after the fastest of five.
    monkeypatch.setattr(auto_workers, "SURE_FROM_S", 1e9)

    def epochs(**arguments: Any) -> list[Any]:
        torch.manual_seed(0)
        data = make()
        loader = DataLoader(data, 8, shuffle=True, persistent_workers=True, **arguments)
        batches = [list(loader) for _ in range(3)]
        loader.close()
        assert loader.num_workers == (0 if arguments["num_workers"] == "auto" else 2)
        return batches

    assert_same(epochs(num_workers="auto"), epochs(num_workers=2))


@needs_cores
def test_a_cold_fork_server_is_not_waited_for() -> None:
    fork_servers.close_fork_server()
    loader = DataLoader(Waiting(1_000_000, 0.002), batch_size=8, num_workers="auto")
    fork_server = fork_servers.current_fork_server()
    os.kill(fork_server.pid, signal.SIGSTOP)  # so that it stays cold
    came, limit_s = [], time.monotonic() + 240
    for batch in loader:
        came.append((os.getpid() in batch[-1].tolist(), fork_server.is_warm()))
        if len(came) == 8:
            os.kill(fork_server.pid, signal.SIGCONT)
        if not came[-1][0] or time.monotonic() > limit_s:
            break
    assert came[:8] == [(True, False)] * 8
    assert came[-1] == (False, True)


@needs_cores
def test_a_fork_server_that_is_killed_while_it_warms_up_is_replaced() -> None:
    fork_servers.close_fork_server()
    loader = DataLoader(Waiting(3_000, 0.002), batch_size=8, num_workers="auto")
    batches = iter(loader)
    first = next(batches)
    fork_server = fork_servers.current_fork_server()
    os.kill(fork_server.pid, signal.SIGKILL)
    indices = [int(index) for batch in [first, *batches] for index in batch[0]]
    assert indices == list(range(3_000))


@legacy
def test_tiny_samples_are_loaded_here_and_no_process_is_started() -> None:
    for _ in range(4):  # on busy cores, samples may seem slow once, not each time
        fork_servers.close_fork_server()
        before = psutil.Process().children()  # may include multiprocessing's resource tracker
        loader = DataLoader(Samples(lambda i: i, 5_000), batch_size=50, num_workers="auto")
        assert torch.cat(collect(loader)).tolist() == list(range(5_000))
        if psutil.Process().children() == before:
            break
    assert psutil.Process().children() == before
    assert loader.num_workers == 0
    assert loader.plan.pool.value == "inline"
    assert loader.plan.num_workers.source == "measured"


@legacy
def test_the_timeline_has_each_batch_that_was_loaded_here() -> None:
    loader = DataLoader(Samples(lambda i: i, 400), batch_size=50, num_workers="auto")
    collect(loader)
    account = loader.timeline().account
    assert account.num_batches == 8
    assert account.steady_rows == 400 - 50 * account.num_passes  # all but each pass's first batch
    assert account.num_passes <= 2


@legacy
def test_tensors_in_memory_need_no_worker_and_no_trial() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=8, num_workers="auto")
    assert loader.plan.num_workers.value == 0
    assert "memory" in loader.plan.num_workers.reason
    assert len(list(loader)) == 5


def test_an_iterable_dataset_gets_one_worker_so_that_nothing_comes_twice() -> None:
    loader = DataLoader(Shards(20), batch_size=5, num_workers="auto")
    assert torch.cat(list(loader)).tolist() == list(range(20))
    assert loader.plan.num_workers.value == 1


@pytest.mark.usefixtures("warm_fork_server")
def test_samples_that_wait_get_more_workers_than_there_are_cores() -> None:
    def wait(index: int) -> int:
        time.sleep(0.01)
        return index

    loader = DataLoader(Samples(wait, 320), batch_size=16, num_workers="auto")
    assert torch.cat(list(loader)).tolist() == list(range(320))
    assert loader.num_workers > CORES
    assert "wait" in loader.plan.num_workers.reason


class Slowing(Dataset):
    """Samples that are in a cache at first. Each contains the PID that loaded it."""

    def __init__(self, length: int, num_cached: int, wait_s: float = 0.01) -> None:
        self.length, self.num_cached, self.wait_s = length, num_cached, wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.num_cached:
            time.sleep(self.wait_s)
        return *draw(index), os.getpid()


@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
@pytest.mark.parametrize("again_s", [0.1, 1e9])
def test_loading_here_is_reconsidered_when_samples_become_slow(
    monkeypatch: pytest.MonkeyPatch, again_s: float
) -> None:
    monkeypatch.setattr(auto_workers, "AGAIN_S", again_s)
    monkeypatch.setattr(auto_workers, "MAX_AGAIN_S", again_s)
    monkeypatch.setattr(auto_workers, "SURE_FROM_S", 0.0)
    loader = DataLoader(Slowing(600, 64), batch_size=8, num_workers="auto")
    loader._measured = {"sample_s": 1e-6, "busy_share": 1.0, "num_samples": 600}
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) <= 8:
            time.sleep(0.2)  # a training step that takes much longer than a batch
    assert torch.cat([batch[0] for batch in batches]).tolist() == list(range(600))
    pids = torch.cat([batch[-1] for batch in batches]).tolist()
    assert set(pids[:64]) == {os.getpid()}
    if again_s < 1.0:
        assert os.getpid() not in set(pids[-40:])
        assert loader.num_workers > 1
    else:  # the control: nothing is measured again
        assert set(pids) == {os.getpid()}
        assert loader.num_workers == 0


@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
@pytest.mark.parametrize("again_from", [auto_workers.AGAIN_FROM, 1_000_000])
def test_a_first_measurement_that_was_wrong_is_corrected_in_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch, again_from: int
) -> None:
    monkeypatch.setattr(auto_workers, "AGAIN_FROM", again_from)
    loader = DataLoader(Slowing(400, 0), batch_size=8, num_workers="auto")
    loader._measured = {"sample_s": 1e-6, "busy_share": 1.0, "num_samples": 400}
    loader._settle(loader._settings(loader.plan))
    assert loader.num_workers == 0
    indices, pids = run(loader)
    assert indices == list(range(400))
    if again_from < 100:
        assert os.getpid() not in set(pids[-40:])
        assert loader.num_workers > 0
    else:
        assert set(pids) == {os.getpid()}


@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
def test_workers_come_also_if_only_the_iterator_is_kept() -> None:
    batches = iter(DataLoader(Waiting(400, 0.01), batch_size=8, num_workers="auto"))
    pids = [set(batch[-1].tolist()) for batch in batches]
    assert os.getpid() not in pids[-1]


class NeedsWorker(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        return index


def test_what_a_worker_init_fn_prepares_is_never_tried_without_it() -> None:
    loader = DataLoader(
        NeedsWorker(), batch_size=8, num_workers="auto", worker_init_fn=lambda number: None
    )
    assert torch.cat(list(loader)).tolist() == list(range(40))
    assert loader.num_workers == CORES


class OpensLate(Dataset):
    """Opens its file on first use and records the process that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle: Any = None

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        busy(0.004)
        if self.handle is None:
            self.handle = _Handle(self.path)
        return index


class _Handle:
    """Cannot be pickled, like the handles of many libraries."""

    def __init__(self, path: Path) -> None:
        with path.open("a") as log:
            log.write(f"{os.getpid()}\n")

    def __reduce__(self) -> Any:
        raise TypeError("a handle belongs to its process")


@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
def test_a_handle_that_is_opened_on_first_use_is_opened_once_in_each_process(
    tmp_path: Path,
) -> None:
    log = tmp_path / "opened"
    loader = DataLoader(OpensLate(log), batch_size=8, num_workers="auto")
    assert torch.cat(list(loader)).tolist() == list(range(200))
    opened = log.read_text().split()
    assert opened.count(str(os.getpid())) == 1
    assert 2 <= len(opened) == len(set(opened))


@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
def test_what_the_first_batches_opened_here_is_not_sent_in_the_next_epoch(tmp_path: Path) -> None:
    dataset = OpensLate(tmp_path / "opened")
    loader = DataLoader(torch.utils.data.Subset(dataset, range(200)), 8, num_workers="auto")
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(200))
    assert loader.num_workers > 0
    assert dataset.handle is None  # as if workers had loaded all samples


def test_a_dataset_that_cannot_travel_is_loaded_here_with_a_warning_that_names_the_part() -> None:
    dataset = Samples(lambda i: i, 40)
    dataset.handle = open(os.devnull, "w")  # type: ignore[attr-defined] # noqa: SIM115
    loader = DataLoader(dataset, batch_size=8, num_workers="auto")
    with pytest.warns(UserWarning, match=r"dataset\.handle") as told:
        batches = list(loader)
    assert {one.filename for one in told} == {__file__}  # the user's line, not Penstock's
    assert torch.cat(batches).tolist() == list(range(40))
    assert loader.num_workers == 0
    assert "dataset.handle" in loader.plan.num_workers.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader)) == 5  # no second warning
    dataset.handle.close()  # type: ignore[attr-defined]


def test_a_number_that_is_set_later_is_obeyed() -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers="auto")
    loader.num_workers = 1
    assert loader.plan.num_workers.value == 1
    assert loader.plan.num_workers.source == "asked"
    assert len(list(loader)) == 5


@needs_cores
@pytest.mark.usefixtures("warm_fork_server")
def test_an_epoch_that_is_left_half_way_leaves_nothing_and_the_next_is_whole() -> None:
    loader = DataLoader(Slow(), batch_size=8, num_workers="auto")
    for taken in (1, 3, 9):
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        del batches
    assert run(loader)[0] == list(range(120))


def test_an_error_in_the_first_batch_is_the_user_s_own() -> None:
    def fail(index: int) -> int:
        raise LookupError(f"no sample {index}")

    with pytest.raises(LookupError, match="no sample 0"):
        list(DataLoader(Samples(fail), batch_size=4, num_workers="auto"))


def test_a_short_epoch_is_settled_anew_each_time_and_stays_right() -> None:
    loader = DataLoader(Numbers(6), batch_size=4, num_workers="auto")
    for _ in range(3):
        assert [len(batch[0]) for batch in loader] == [4, 2]


def test_a_sampler_without_a_length_and_no_batches_work_too() -> None:
    def endless() -> Any:
        yield from range(10)

    class NoLength:
        def __iter__(self) -> Any:
            return endless()

    loader = DataLoader(Numbers(), batch_size=4, sampler=NoLength(), num_workers="auto")
    assert [len(batch[0]) for batch in loader] == [4, 4, 2]
    alone = DataLoader(Numbers(5), batch_size=None, num_workers="auto")
    assert [label for _, label in alone] == list(range(5))


@pytest.mark.parametrize(
    ("dataset", "arguments", "expected"),
    [
        (Shards(20), {}, 1),
        (Numbers(), {"pool": "inline"}, 0),
        (TensorDataset(torch.arange(40)), {}, 0),
        (Numbers(), {}, CORES),
    ],
)
def test_the_attribute_says_what_is_known_before_any_batch(
    dataset: Any, arguments: dict[str, Any], expected: int
) -> None:
    loader = DataLoader(dataset, batch_size=5, num_workers="auto", **arguments)
    assert loader.num_workers == loader.plan.num_workers.value == expected
    assert loader.plan.num_workers.source == "rule"
