"""Workers see the parent's current environment and share the objects that can be shared."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import DataLoader
from penstock.errors import CannotTravel
from support import scripts
from support.datasets import PROCESS_WAYS, WAYS, Numbers, Samples, Whereabouts, collect

legacy = pytest.mark.legacy


@pytest.fixture(autouse=True)
def a_fork_server_that_is_older_than_the_test() -> None:
    collect(DataLoader(Numbers(2), num_workers=1))


def first(dataset: Any, **arguments: Any) -> Any:
    return next(iter(DataLoader(dataset, batch_size=None, **{"num_workers": 1, **arguments})))


@legacy
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_variables_set_after_the_fork_server_started_reach_new_workers(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("PENSTOCK_TEST_VARIABLE", value)
        assert first(Whereabouts("PENSTOCK_TEST_VARIABLE"), **WAYS[way])["value"] == value
    monkeypatch.delenv("PENSTOCK_TEST_VARIABLE")
    assert first(Whereabouts("PENSTOCK_TEST_VARIABLE"), **WAYS[way])["value"] == ""


def test_variables_that_only_the_fork_server_was_given_do_not_reach_workers() -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED"):
        assert first(Whereabouts(name))["value"] == os.environ.get(name, "")


@legacy
def test_the_present_folder_reaches_new_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first(Whereabouts())["folder"] == os.getcwd() != str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert first(Whereabouts())["folder"] == str(tmp_path)


@legacy
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a system without affinity")
@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_the_cores_of_this_process_are_those_of_new_workers(way: str) -> None:
    def cores(index: int) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        assert first(Samples(cores), **WAYS[way]) == [max(before)]
    finally:
        os.sched_setaffinity(0, before)
    assert first(Samples(cores), **WAYS[way]) == sorted(before)


@legacy
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the umask")
def test_the_umask_reaches_new_workers() -> None:
    def umask(index: int) -> int:
        before = os.umask(0)
        os.umask(before)
        return before

    before = os.umask(0o077)
    try:
        assert first(Samples(umask)) == 0o077
    finally:
        os.umask(before)
    assert first(Samples(umask)) == before


def test_a_present_folder_that_was_deleted_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert first(Numbers(2))[1] == 0


REDIRECTED = """
import os, sys, threading
if "fresh" in sys.argv:  # a process with threads is not forked
    threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.setrecursionlimit(6000)
from penstock import DataLoader

class Data:
    def __len__(self): return 2
    def __getitem__(self, i):
        def count(depth): return depth and 1 + count(depth - 1)
        print("sample", count(1500) - 1500 + i)
        return i

def load():
    list(DataLoader(Data(), 2, num_workers=1))

load()
old, file = os.dup(1), os.open("output.txt", os.O_CREAT | os.O_WRONLY)
os.dup2(file, 1)
load()
os.dup2(old, 1)
load()
sys.setrecursionlimit(1000)
try:
    load()
except RecursionError:
    print("too deep")
"""


@legacy
@pytest.mark.parametrize("kind", ["fork", "fresh"])
def test_redirected_output_and_the_recursion_limit_reach_new_workers(
    kind: str, tmp_path: Path
) -> None:
    done = scripts.run(REDIRECTED, tmp_path, kind)
    written = ["sample 0", "sample 1"]
    assert done.stdout.splitlines() == [*written, *written, "too deep"], done.stderr
    assert (tmp_path / "output.txt").read_text().splitlines() == written


@legacy
def test_the_default_dtype_reaches_new_workers() -> None:
    assert first(Whereabouts())["zeros"].dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert first(Whereabouts())["zeros"].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert first(Whereabouts())["zeros"].dtype is torch.float32


def test_filters_for_warnings_reach_new_workers() -> None:
    def warn(index: int) -> int:
        warnings.warn("sample is odd", UserWarning, stacklevel=1)
        return index

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="sample is odd"):
            first(Samples(warn))
        warnings.simplefilter("ignore")
        assert first(Samples(warn)) == 0


MODULE = """
import torch
class Dataset(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return {value}
"""


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the module changes within one second
    yield tmp_path
    for name in ("new_here", "edited_here"):
        sys.modules.pop(name, None)


def test_a_module_that_came_onto_the_path_later_is_found_by_workers(module_folder: Path) -> None:
    (module_folder / "new_here.py").write_text(MODULE.format(value=7))
    assert first(importlib.import_module("new_here").Dataset()) == 7


def test_a_module_that_was_edited_and_reloaded_runs_its_new_code(module_folder: Path) -> None:
    path = module_folder / "edited_here.py"
    path.write_text(MODULE.format(value=1))
    module = importlib.import_module("edited_here")
    assert first(module.Dataset()) == 1
    path.write_text(MODULE.format(value=22))
    importlib.reload(module)
    assert first(module.Dataset(), num_workers=0) == 22  # control: without workers
    assert first(module.Dataset()) == 22


# -- multiprocessing primitives --------------------------------------------------------------------


@pytest.fixture(scope="module")
def context() -> Any:
    """The spawn context. Its heap keeps one file open, so it is created before any test."""
    context = multiprocessing.get_context("spawn")
    context.Value("i", 0)
    return context


class Counting(Numbers):
    def __init__(self, lock: Any, value: Any) -> None:
        super().__init__(100)
        self.lock = lock
        self.value = value

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.value.value += 1
        return index


class Telling(Numbers):
    def __init__(self, queue: Any) -> None:
        super().__init__(10)
        self.queue = queue

    def __getitem__(self, index: int) -> int:
        self.queue.put(index)
        return index


class Asking(Numbers):
    def __init__(self, event: Any) -> None:
        super().__init__(4)
        self.event = event

    def __getitem__(self, index: int) -> bool:
        return bool(self.event.wait(120.0))


@legacy
def test_a_lock_and_a_value_are_shared_with_workers(context: Any) -> None:
    value = context.Value("i", 0, lock=False)
    loader = DataLoader(Counting(context.Lock(), value), batch_size=5, num_workers=3)
    assert len(collect(loader)) == 20
    assert value.value == 100


@legacy
@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])
def test_a_queue_brings_words_from_the_workers(kind: str, context: Any) -> None:
    queue = getattr(context, kind)()
    collect(DataLoader(Telling(queue), batch_size=5, num_workers=2))
    assert sorted(queue.get() for _ in range(10)) == list(range(10))
    queue.close()


def test_an_event_reaches_workers_that_run_already(context: Any) -> None:
    event = context.Event()
    iterator = iter(DataLoader(Asking(event), batch_size=4, num_workers=1))
    event.set()
    assert next(iterator).tolist() == [True] * 4


def test_a_shared_value_works_under_spawn_too(context: Any) -> None:
    value = context.Value("i", 0, lock=False)
    loader = DataLoader(
        Counting(context.Lock(), value),
        batch_size=5,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert len(collect(loader)) == 20
    assert value.value == 100


@legacy
@pytest.mark.parametrize("kind", ["Lock", "RLock", "Semaphore", "Event", "Condition", "Queue"])
def test_a_primitive_of_the_fork_context_is_refused_with_the_way_out(kind: str) -> None:
    dataset = Counting(getattr(multiprocessing.get_context("fork"), kind)(), None)
    with pytest.raises(CannotTravel) as info:
        iter(DataLoader(dataset, num_workers=1))
    text = str(info.value)
    assert "dataset.lock" in text
    assert "get_context('spawn')" in text
    assert "multiprocessing_context='fork'" in text


def test_a_lock_of_the_fork_context_works_when_fork_is_asked_for() -> None:
    context = multiprocessing.get_context("fork")
    value = context.Value("i", 0, lock=False)
    loader = DataLoader(
        Counting(context.Lock(), value), batch_size=5, num_workers=2, multiprocessing_context="fork"
    )
    assert len(collect(loader)) == 20
    assert value.value == 100


class Writing(Numbers):
    def __init__(self, tensor: Any) -> None:
        super().__init__(10)
        self.tensor = tensor

    def __getitem__(self, index: int) -> int:
        self.tensor[index] = index + 1
        return index


def test_a_shared_tensor_is_shared_and_a_plain_one_is_not() -> None:
    shared, plain, array = torch.zeros(10).share_memory_(), torch.zeros(10), np.zeros(10)
    for target in (shared, plain, array):
        collect(DataLoader(Writing(target), batch_size=5, num_workers=2))
    assert shared.tolist() == list(range(1, 11))
    assert plain.sum() == 0
    assert array.sum() == 0


def test_an_end_of_a_pipe_is_refused_and_a_queue_travels_in_its_place(context: Any) -> None:
    here, there = context.Pipe()
    with pytest.raises(CannotTravel, match="end of a pipe") as info:
        iter(DataLoader(Samples(lambda i: there.send(i) or i, 3), num_workers=1))
    assert info.value.path == "dataset.make.<closure there>"  # type: ignore[attr-defined]
    assert "a queue of multiprocessing.get_context('spawn')" in str(info.value)
    here.close()
    there.close()
    queue = context.SimpleQueue()
    collect(DataLoader(Samples(lambda i: queue.put(i) or i, 3), batch_size=3, num_workers=1))
    assert sorted(queue.get() for _ in range(3)) == [0, 1, 2]
    queue.close()
