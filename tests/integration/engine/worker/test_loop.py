"""Worker state seen by user code, and the iterator attributes that other libraries use."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import get_worker_info

from penstock import DataLoader
from support import leftovers
from support.datasets import (
    PROCESS_WAYS,
    QUICK_WAYS,
    WAYS,
    WORKER_WAYS,
    Numbers,
    Samples,
    Shards,
    collect,
)

legacy = pytest.mark.legacy


def about_me(index: int) -> dict[str, Any]:
    info = get_worker_info()
    return {
        "id": -1 if info is None else info.id,
        "of": 0 if info is None else info.num_workers,
        "seed": 0 if info is None else info.seed,
        "length": 0 if info is None else len(info.dataset),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


@legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_get_worker_info_tells_the_worker_who_it_is(way: str) -> None:
    torch.manual_seed(0)
    loader = DataLoader(Samples(about_me, 16), batch_size=None, **WAYS[way])
    found = list(loader)
    assert {info["id"] for info in found} == {0, 1}
    assert {(info["of"], info["length"]) for info in found} == {(2, 16)}
    seeds = {info["id"]: info["seed"] for info in found}
    assert seeds[1] == seeds[0] + 1
    assert get_worker_info() is None  # in this process


@pytest.mark.parametrize("way", ["inline", "thread"])
def test_where_the_dataset_is_the_caller_s_own_there_is_no_worker_info(way: str) -> None:
    found = list(DataLoader(Samples(about_me, 2), batch_size=None, **WAYS[way]))
    assert {info["id"] for info in found} == {-1}


@legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_the_work_is_done_in_other_processes(way: str) -> None:
    found = list(DataLoader(Samples(about_me, 16), batch_size=None, **WAYS[way]))
    assert len({info["pid"] for info in found}) == 2
    assert os.getpid() not in {info["pid"] for info in found}
    assert {info["threads"] for info in found} == {1}


def test_without_workers_the_work_is_done_here() -> None:
    found = list(DataLoader(Samples(about_me, 4), batch_size=None))
    assert {info["pid"] for info in found} == {os.getpid()}


class Initialised(Numbers):
    """Samples are the value that worker_init_fn stored in the worker."""

    mark = -1

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        return self.mark if info is None else info.dataset.mark


def leave_a_mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.mark = 100 + worker


@legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_worker_init_fn_runs_in_each_worker_before_its_samples(way: str) -> None:
    loader = DataLoader(Initialised(), batch_size=None, worker_init_fn=leave_a_mark, **WAYS[way])
    assert set(loader) == {100, 101}
    assert Initialised.mark == -1  # control: without worker_init_fn
    assert set(DataLoader(Initialised(), batch_size=None, **WAYS[way])) == {-1}


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_an_exception_in_worker_init_fn_reaches_the_caller(way: str) -> None:
    def broken(worker: int) -> None:
        raise LookupError(f"no shard for {worker}")

    loader = DataLoader(Numbers(), batch_size=2, worker_init_fn=broken, **WAYS[way])
    with pytest.raises(LookupError, match="no shard for"):
        collect(loader)


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_worker_init_fn_may_share_an_iterable_dataset_out(way: str) -> None:
    def share(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.mine = worker

    class Mine(Shards):
        mine = -1

        def __iter__(self) -> Any:
            return iter([self.mine] * 3)

    loader = DataLoader(Mine(), batch_size=None, worker_init_fn=share, **WAYS[way])
    assert sorted(loader) == [0, 0, 0, 1, 1, 1]


@legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_the_workers_can_be_asked_for_their_pids_and_ended_by_name(way: str) -> None:
    iterator = iter(DataLoader(Numbers(200), batch_size=2, **WAYS[way]))
    next(iterator)
    assert len(iterator._workers) == 2
    pids = [worker.pid for worker in iterator._workers]
    assert all(leftovers.is_running(pid) for pid in pids)
    assert all(worker.is_alive() for worker in iterator._workers)
    assert [worker.exitcode for worker in iterator._workers] == [None, None]
    iterator._shutdown_workers()
    for worker in iterator._workers:
        worker.join(120.0)
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert [worker.exitcode for worker in iterator._workers] == [0, 0]
    assert not any(leftovers.is_running(pid) for pid in pids)


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_a_worker_can_be_terminated_as_a_process_can(way: str) -> None:
    iterator = iter(DataLoader(Numbers(4), batch_size=2, persistent_workers=True, **WAYS[way]))
    list(iterator)
    worker = iterator._workers[0]
    worker.terminate()
    worker.join(120.0)
    assert worker.exitcode == -15
    iterator._shutdown_workers()


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_after_the_workers_were_shut_down_there_is_an_end_and_not_a_hang(way: str) -> None:
    iterator = iter(DataLoader(Numbers(200), batch_size=2, **WAYS[way]))
    next(iterator)
    iterator._shutdown_workers()
    assert len(list(iterator)) < 199  # batches that had arrived, then the end


def test_reset_begins_a_new_epoch_on_the_same_workers() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]
    next(iterator)
    iterator._reset(loader)
    assert [labels.tolist() for _, labels in iterator] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [worker.pid for worker in iterator._workers] == pids
    loader.close()


@legacy
def test_an_infinite_loader_as_ultralytics_builds_it_works() -> None:
    class Repeat:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Any:
            while True:
                yield from iter(self.sampler)

    class InfiniteDataLoader(DataLoader):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    loader = InfiniteDataLoader(Numbers(8), batch_size=4, num_workers=2)
    for _ in range(3):
        assert [labels.tolist() for _, labels in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for worker in loader.iterator._workers:
        if worker.is_alive():
            worker.terminate()
    loader.iterator._shutdown_workers()
    loader.reset()
    assert [labels.tolist() for _, labels in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.iterator._shutdown_workers()


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_the_length_of_an_iterator_is_the_length_of_its_loader(way: str) -> None:
    loader = DataLoader(Numbers(10), batch_size=4, **WAYS[way])
    assert len(iter(loader)) == len(loader) == len(TorchDataLoader(Numbers(10), batch_size=4)) == 3


def test_workers_are_named_for_people_who_look_at_processes() -> None:
    iterator = iter(DataLoader(Numbers(8), batch_size=2, num_workers=2))
    assert [worker.name for worker in iterator._workers] == [
        "penstock-worker-0",
        "penstock-worker-1",
    ]
