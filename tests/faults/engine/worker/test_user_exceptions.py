"""Exceptions from dataset[i] reach the caller unchanged, and samples that time out are named."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from penstock import DataLoader
from penstock.errors import WorkerTimeout
from support import leftovers
from support.datasets import (
    PROCESS_WAYS,
    QUICK_WAYS,
    WAYS,
    WORKER_WAYS,
    Numbers,
    Samples,
    Slow,
    collect,
)

pytestmark = pytest.mark.fault


class Corrupt(Exception):
    def __init__(self, path: str, offset: int) -> None:
        super().__init__(path, offset)
        self.path = path
        self.hint = {"offset": offset}


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class LockInside(ValueError):
    """Its arguments cannot be pickled. torch's own loader hangs on it."""

    def __init__(self) -> None:
        super().__init__("bad", threading.Lock())


def corrupt_at_7(index: int) -> Any:
    if index == 7:
        raise Corrupt(f"{index}.jpg", 128)  # this line is named in the traceback
    return index


def first_error(loader: Any) -> BaseException:
    try:
        collect(loader)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_an_exception_keeps_its_type_arguments_and_attributes(way: str) -> None:
    error: Any = first_error(DataLoader(Samples(corrupt_at_7), batch_size=4, **WAYS[way]))
    assert isinstance(error, Corrupt)
    assert error.args == ("7.jpg", 128)
    assert error.path == "7.jpg"
    assert error.hint == {"offset": 128}


@pytest.mark.legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_an_exception_says_which_sample_which_worker_and_which_line(way: str) -> None:
    error: Any = first_error(DataLoader(Samples(corrupt_at_7), batch_size=4, **WAYS[way]))
    assert error.sample_index == 7
    assert error.worker_id in (0, 1)
    for text in (str(error), str(error.__cause__)):
        assert "test_user_exceptions.py" in text
        assert "this line is named in the traceback" in text
        assert "in corrupt_at_7" in text
    kind = "thread" if way == "thread" else "process"  # torch's wording for processes
    assert f"Caught Corrupt in DataLoader worker {kind}" in str(error)


def test_without_workers_the_exception_is_the_very_one() -> None:
    error = first_error(DataLoader(Samples(corrupt_at_7), batch_size=4))
    assert type(error) is Corrupt
    assert error.args == ("7.jpg", 128)


def test_under_spawn_the_exception_is_whole_too() -> None:
    error: Any = first_error(
        DataLoader(
            Samples(corrupt_at_7), batch_size=4, num_workers=1, multiprocessing_context="spawn"
        )
    )
    assert isinstance(error, Corrupt)
    assert error.sample_index == 7


@pytest.mark.legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
@pytest.mark.parametrize("kind", [Unpicklable, LockInside])
def test_an_exception_that_cannot_be_pickled_arrives(kind: Any, way: str) -> None:
    def fail(index: int) -> Any:
        raise kind("x") if kind is Unpicklable else kind()

    error: Any = first_error(DataLoader(Samples(fail), batch_size=4, **WAYS[way]))
    assert isinstance(error, kind)
    assert "Traceback" in str(error)


@pytest.mark.parametrize("way", WORKER_WAYS)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_in_the_first_batch_the_right_sample_is_named(way: str, at: int) -> None:
    def fail(index: int) -> int:
        if index == at:
            raise LookupError(index)
        return index

    error: Any = first_error(DataLoader(Samples(fail), batch_size=4, **WAYS[way]))
    assert error.sample_index == at


def test_of_two_bad_samples_in_a_batch_the_first_is_told() -> None:
    def fail(index: int) -> int:
        if index in (1, 3):
            raise LookupError(index)
        return index

    for num_workers in (0, 1, 2, 4):
        error = first_error(DataLoader(Samples(fail), batch_size=4, num_workers=num_workers))
        assert error.args == (1,)


@pytest.mark.legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_the_batches_after_a_bad_one_still_come(way: str) -> None:
    iterator = iter(DataLoader(Samples(corrupt_at_7), batch_size=4, **WAYS[way]))
    found: list[Any] = []
    while True:
        try:
            found.append(next(iterator).tolist())
        except Corrupt:
            found.append("bad")
        except StopIteration:
            break
    assert found == [[0, 1, 2, 3], "bad", [8, 9, 10, 11], [12, 13, 14, 15]]


def test_in_a_subset_the_bad_sample_is_among_those_named() -> None:
    subset = Subset(Samples(corrupt_at_7), range(16))
    error: Any = first_error(DataLoader(subset, batch_size=4, num_workers=1))
    named = error.sample_index
    assert 7 in (named if isinstance(named, list) else [named])


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_a_stop_iteration_in_a_sample_does_not_end_the_epoch_silently(way: str) -> None:
    def stop(index: int) -> int:
        if index == 7:
            raise StopIteration
        return index

    with pytest.raises(RuntimeError):
        collect(DataLoader(Samples(stop), batch_size=4, **WAYS[way]))


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_an_exception_in_a_sampler_comes_in_its_turn_and_then_it_is_over(way: str) -> None:
    class Broken:
        def __iter__(self) -> Any:
            yield from ([0, 1], [2, 3], [4, 5])
            raise LookupError("no more")

    iterator = iter(DataLoader(Numbers(), batch_sampler=Broken(), **WAYS[way]))
    assert [next(iterator)[1].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(LookupError, match="no more"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_exception_while_the_dataset_is_unpacked_is_told_with_its_place() -> None:
    error = first_error(DataLoader(FailsOnArrival(), batch_size=4, num_workers=2))
    assert isinstance(error, LookupError)
    assert "worker process" in str(error)
    assert "__setstate__" in str(error)


class FailsOnArrival(Numbers):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise LookupError("cannot be rebuilt here")


# -- time limits -----------------------------------------------------------------------------------


@pytest.mark.legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_a_batch_that_takes_too_long_is_an_error_that_names_the_sample(way: str) -> None:
    iterator = iter(DataLoader(Slow(20, stuck=5), batch_size=2, timeout=2.0, **WAYS[way]))
    pids = [worker.pid for worker in iterator._workers]
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match="sample 5") as info:
        next(iterator)
    assert time.monotonic() - started > 1.9  # the sample takes longer than any test
    assert "timed out" in str(info.value)  # torch's wording
    assert isinstance(info.value, RuntimeError)
    del iterator, info
    assert leftovers.wait_until_gone(pids) == []


def test_a_batch_that_takes_long_but_not_too_long_comes() -> None:
    loader = DataLoader(Slow(4, sample_s=0.3), batch_size=2, num_workers=1, timeout=5.0)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_the_limit_is_per_batch_and_not_for_the_epoch() -> None:
    loader = DataLoader(Slow(12, sample_s=0.3), batch_size=1, num_workers=1, timeout=3.0)
    started = time.monotonic()
    assert torch.cat(list(loader)).tolist() == list(range(12))
    assert time.monotonic() - started > 3.0  # control: the epoch exceeded the limit


def test_a_slow_consumer_is_not_timed_out() -> None:
    loader = DataLoader(Slow(6), batch_size=1, num_workers=1, timeout=3.0)
    started = time.monotonic()
    for _ in loader:
        time.sleep(0.6)
    assert time.monotonic() - started > 3.0  # control: the limit was exceeded


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_leaving_while_a_sample_hangs_takes_no_more_than_a_moment(way: str) -> None:
    iterator = iter(DataLoader(Slow(20, stuck=2), batch_size=1, **WAYS[way]))
    pids = [worker.pid for worker in iterator._workers]
    next(iterator)
    time.sleep(0.2)
    del iterator  # the sample takes longer than any test
    assert leftovers.wait_until_gone(pids) == []
