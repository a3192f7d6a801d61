"""Arrays that the fork server inherited are not copied, and are never outdated."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from penstock.engine.pickling.inherited_arrays import MIN_BYTES, ServerMemory, find_arrays
from support import scripts

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is used on Linux"),
]
in_a_clean_program = pytest.mark.skipif(
    "COVERAGE_PROCESS_START" in os.environ, reason="the process is traced"
)

START = """
import gc, json, os, signal, time
from contextlib import suppress

import numpy as np
import psutil
import torch
from torch.utils.data import TensorDataset

import penstock
from penstock.engine.parent import fork_server

NUM_ROWS, WIDTH, BATCH = 4608, 4096, 64
FOUND = {}
DATA = np.arange(NUM_ROWS * WIDTH, dtype=np.int32).reshape(NUM_ROWS, WIDTH)  # 72 MiB


def is_old(place, batch):
    first = place * BATCH * WIDTH
    old = np.arange(first, first + BATCH * WIDTH, dtype=np.int32)
    return np.array_equal(batch[0].numpy().ravel(), old)


def load(dataset):
    # The number of slots, which shared_mib() counts, must not follow the time of a batch.
    return penstock.DataLoader(dataset, batch_size=BATCH, num_workers=2, prefetch_factor=2)


def server():
    return fork_server.current_fork_server()


def shared_mib():
    size = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with suppress(OSError):  # closed since, like the listing itself
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                size += os.stat(path).st_blocks * 512
    return size >> 20


def has_ended(pid):
    limit_s = time.monotonic() + 120
    while psutil.pid_exists(pid) and time.monotonic() < limit_s:
        time.sleep(0.01)
    return not psutil.pid_exists(pid)


def kill(*pids):
    os.kill(pids[0], signal.SIGKILL)  # the others end with it
    limit_s = time.monotonic() + 120
    while any(map(is_running, pids)) and time.monotonic() < limit_s:
        time.sleep(0.001)


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def memory_mib():
    # Without the pages of files, whose share depends on other programs that use torch.
    size_kib = 0
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with open(f"/proc/{one.pid}/smaps_rollup") as lines:
            size_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))
    return size_kib >> 10

"""

UNCHANGED = (
    START
    + """
class Rows:
    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        self.array[index] += 1  # in the worker's own copy of the page
        return (self.array[index] - 1,)


def two_epochs(name, dataset):
    fork_server.close_fork_server()
    loader = load(dataset)
    FOUND[name, "why fresh"] = server().why_fresh
    FOUND[name, "plan"] = loader.plan.start_method.reason
    pids = [server().pid]
    right = []
    for _ in range(2):
        for place, batch in enumerate(loader):
            right.append(is_old(place, batch))
        pids.append(server().pid)
    FOUND[name, "right"] = len(right) == 2 * NUM_ROWS // BATCH and all(right)
    FOUND[name, "one server"] = len(set(pids)) == 1
    iterator = iter(loader)
    next(iterator)
    FOUND[name, "MiB"] = shared_mib()


two_epochs("tensors", TensorDataset(torch.from_numpy(DATA)))
two_epochs("array", Rows(DATA))
FOUND["array", "unchanged here"] = all(
    is_old(place, (torch.from_numpy(DATA[place * BATCH : (place + 1) * BATCH]),))
    for place in range(NUM_ROWS // BATCH)
)


def free():
    global DATA
    fork_server.close_fork_server()
    dataset = TensorDataset(torch.from_numpy(DATA))
    del DATA
    loader = load(dataset)
    pid = server().pid
    next(iter(loader))
    del loader
    gc.collect()
    FOUND["freed", "loader only"] = psutil.pid_exists(pid) and server().pid == pid
    before = memory_mib()
    del dataset
    gc.collect()
    FOUND["freed", "server is gone"] = has_ended(pid)
    FOUND["freed", "MiB"] = before - memory_mib()
    loader = load(range(BATCH))
    FOUND["freed", "next"] = [batch.tolist() for batch in loader] == [[*range(BATCH)]]


free()
print(json.dumps([[*key, value] for key, value in FOUND.items()]))
"""
)

CHANGED = (
    START
    + """
def begin(name):
    fork_server.close_fork_server()
    DATA[:] = np.arange(NUM_ROWS * WIDTH, dtype=np.int32).reshape(NUM_ROWS, WIDTH)
    loader = load(TensorDataset(torch.from_numpy(DATA)))
    FOUND[name, "why fresh"] = server().why_fresh
    return loader, server().pid


loader, pid = begin("during")
iterator = iter(loader)
right = [is_old(0, next(iterator))]
DATA[:] = 0
kill(iterator._workers[0].pid)
right += [is_old(1 + place, batch) for place, batch in enumerate(iterator)]
FOUND["during", "right"] = len(right) == NUM_ROWS // BATCH and all(right)
FOUND["during", "same server"] = server().pid == pid
FOUND["during", "next epoch"] = all(not batch[0].numpy().any() for batch in loader)
iterator = None
gc.collect()
FOUND["during", "then replaced"] = server().pid != pid and has_ended(pid)

loader, pid = begin("killed")
iterator = iter(loader)
right = [is_old(0, next(iterator))]
FOUND["killed", "MiB before"] = shared_mib()
kill(pid, *(worker.pid for worker in iterator._workers))  # so that the epoch needs another server
right += [is_old(1 + place, batch) for place, batch in enumerate(iterator)]
FOUND["killed", "right"] = len(right) == NUM_ROWS // BATCH and all(right)
FOUND["killed", "fresh"] = server().why_fresh is not None
iterator = iter(loader)
next(iterator)
FOUND["killed", "MiB after"] = shared_mib()
print(json.dumps([[*key, value] for key, value in FOUND.items()]))
"""
)


def run(program: str, folder: Path) -> dict[tuple[str, str], Any]:
    result = scripts.run(program, folder)
    assert result.returncode == 0, result.stderr
    return {(name, key): value for name, key, value in json.loads(result.stdout)}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return run(UNCHANGED, tmp_path_factory.mktemp("unchanged"))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return run(CHANGED, tmp_path_factory.mktemp("changed"))


@in_a_clean_program
@pytest.mark.parametrize("kind", ["tensors", "array"])
def test_workers_use_the_arrays_of_the_fork_server(
    kind: str, unchanged: dict[tuple[str, str], Any]
) -> None:
    assert unchanged[kind, "why fresh"] is None
    assert unchanged[kind, "right"]
    assert unchanged[kind, "one server"]
    assert unchanged[kind, "MiB"] < 72
    assert "and keeps 75 MB of its dataset" in unchanged[kind, "plan"]


@in_a_clean_program
def test_a_worker_that_writes_changes_only_its_own_copy(
    unchanged: dict[tuple[str, str], Any],
) -> None:
    assert unchanged["array", "unchanged here"]


@in_a_clean_program
def test_the_fork_server_ends_with_the_dataset_that_it_keeps(
    unchanged: dict[tuple[str, str], Any],
) -> None:
    assert unchanged["freed", "loader only"], "another loader of the same dataset can use it"
    assert unchanged["freed", "server is gone"]
    assert unchanged["freed", "MiB"] > 64
    assert unchanged["freed", "next"]


@in_a_clean_program
@pytest.mark.slow
def test_changes_reach_the_workers_of_the_next_epoch_only(
    changed: dict[tuple[str, str], Any],
) -> None:
    assert changed["during", "why fresh"] is None
    assert changed["during", "right"], "also in the worker that replaces a killed one"
    assert changed["during", "same server"]
    assert changed["during", "next epoch"]
    assert changed["during", "then replaced"]


@in_a_clean_program
@pytest.mark.slow
def test_arrays_are_copied_for_the_next_fork_server(
    changed: dict[tuple[str, str], Any],
) -> None:
    assert changed["killed", "why fresh"] is None
    assert changed["killed", "right"]
    assert changed["killed", "fresh"]
    assert changed["killed", "MiB before"] < 72 <= changed["killed", "MiB after"], "the control"


LARGE = MIN_BYTES // 4


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_large_tensors_and_arrays_of_a_dataset_are_found() -> None:
    tensor, array = torch.ones(LARGE), np.ones((2, LARGE), dtype=np.float32)
    arrays = find_arrays(Subset(TensorDataset(tensor), [0])).arrays  # type: ignore[arg-type]
    assert [one is tensor for one in arrays] == [True]
    found = find_arrays(Holder([array, tensor]))
    assert {id(one) for one in found.arrays} == {id(array), id(tensor)}
    assert set(found.ranges) == {
        (array.ctypes.data, array.nbytes),
        (tensor.data_ptr(), tensor.numel() * 4),
    }
    # Edges of the arrays share a page with other objects.
    assert 0 <= array.nbytes + MIN_BYTES - found.own_bytes <= 4 * os.sysconf("SC_PAGESIZE")


def test_only_plain_private_memory_is_inherited(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data", dtype=np.uint8, mode="w+", shape=(MIN_BYTES,))
    others: list[Any] = [
        torch.ones(LARGE - 1),
        torch.ones(LARGE).share_memory_(),
        torch.ones(LARGE, 2).t(),
        torch.ones(LARGE, device="meta"),
        torch.ones(LARGE).to_sparse(),
        np.ones((LARGE, 2))[:, 1],
        np.full(LARGE, None),
        mapped,
        np.asarray(mapped).view(np.ndarray),
        bytes(MIN_BYTES),
    ]
    for other in others:
        assert find_arrays(Holder(other)).arrays == (), type(other)
    assert find_arrays(None).arrays == find_arrays([torch.ones(LARGE)]).arrays == ()


def test_memory_that_was_not_written_does_not_count() -> None:
    unused = np.zeros(64 * MIN_BYTES, dtype=np.uint8)
    assert find_arrays(Holder(unused)).own_bytes < MIN_BYTES
    unused[:] = 1
    assert find_arrays(Holder(unused)).own_bytes > 63 * MIN_BYTES


def test_a_fork_server_that_has_ended_holds_nothing() -> None:
    array = np.ones(MIN_BYTES, dtype=np.uint8)
    views = [memoryview(b"small"), memoryview(array)]
    spans = [(array.ctypes.data, array.nbytes)]
    here = ServerMemory(os.getpid(), spans)  # this process has its own bytes
    assert here.find(views) == {1: array.ctypes.data}
    assert ServerMemory(os.getpid(), []).find(views) == {}
    gone = ServerMemory(2**22 + 1, spans)
    assert gone.find(views) == {}
    assert not gone.is_outdated, "only a change is a reason to replace it"
