"""A batch does not change in a process that the user forked while holding it."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import DataLoader
from penstock.engine.memory.fork_watch import process_forks
from penstock.engine.memory.ring import FIRST_SLOTS, Ring, Slot
from penstock.engine.memory.shared_file import PrivateFile, SharedFile
from support import scripts
from support.datasets import Numbers

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]

NUM_BYTES = 4096
WAIT_S = 60


class Child:
    """A forked process that waits on a pipe, does one thing, and exits.

    Args:
        work: Its result is the exit code.
    """

    def __init__(self, work: Callable[[], Any] = lambda: 0) -> None:
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 100
            try:
                os.close(self._tell)
                os.read(told, 1)
                code = int(work())
            finally:
                os._exit(code)
        os.close(told)

    def end(self) -> int:
        os.close(self._tell)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def by_fork(work: Callable[[], Any]) -> Callable[[], int]:
    return Child(work).end


def by_multiprocessing(work: Callable[[], Any]) -> Callable[[], int]:
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)

    def live() -> None:
        assert told.poll(WAIT_S)
        sys.exit(int(work()))

    process = context.Process(target=live)
    process.start()

    def end() -> int:
        tell.send(None)
        process.join(WAIT_S)
        code = process.exitcode
        process.close()
        told.close()
        tell.close()
        assert code is not None
        return code

    return end


WAYS: dict[str, dict[str, Any]] = {
    "fork server": {"num_workers": 2},
    "threads": {"num_workers": 2, "pool": "thread"},
    "forked workers": {"num_workers": 2, "multiprocessing_context": "fork"},
}


def batch_changes_under_a_child(start: Any, loader: Any) -> bool:
    """Return whether a batch changes in a child while the parent drops it and continues."""
    iterator = iter(loader)
    next(iterator)
    held = [next(iterator)[0].numpy()]  # NumPy, because OpenMP's threads do not survive a fork
    before = held[0].tolist()
    end = start(lambda: held[0].tolist() != before)
    held.clear()
    for _ in iterator:
        pass
    return bool(end())


@pytest.mark.parametrize("start", [by_fork, by_multiprocessing])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_does_not_change_under_a_forked_child(way: str, start: Any) -> None:
    loader = DataLoader(Numbers(400, (500,)), batch_size=4, **WAYS[way])
    assert not batch_changes_under_a_child(start, loader)


@pytest.mark.parametrize("way", WAYS)
def test_it_does_where_slots_are_not_parked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "_park_if_forked", lambda ring, slot: False)
    loader = DataLoader(Numbers(400, (500,)), batch_size=4, **WAYS[way])
    assert batch_changes_under_a_child(by_fork, loader)


@pytest.mark.parametrize("is_shared", [False, True])
def test_memory_of_a_loader_without_workers_is_copied_by_the_fork(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_shared:  # control: a fork does not copy shared memory

        def map_shared(file: Any, offset: int, num_bytes: int, **_: Any) -> mmap.mmap:
            return mmap.mmap(-1, num_bytes)

        monkeypatch.setattr(PrivateFile, "map", map_shared)
    loader = DataLoader(TensorDataset(torch.arange(4000.0).reshape(400, 10)), batch_size=4)
    assert batch_changes_under_a_child(by_fork, loader) == is_shared


# -- when a slot becomes free ----------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = make_ring()
    yield ring
    ring.close()


def make_ring() -> Ring:
    ring = Ring(SharedFile.create(), max_held_bytes=1 << 30)
    ring.fit(NUM_BYTES)
    return ring


def is_free(ring: Ring, slot: Slot) -> bool:
    ring._collect()
    return slot in ring._free


def wait_until_free(ring: Ring, slot: Slot) -> bool:
    """Wait for a slot. Pipes close shortly after a process exits. Only a hang times out."""
    for _ in range(WAIT_S * 100):
        if is_free(ring, slot):
            return True
        select.select([], [], [], 0.01)
    return False


def test_a_child_that_ends_frees_the_slot(ring: Ring) -> None:
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child()
    del root
    assert not is_free(ring, slot)
    assert child.end() == 0
    assert wait_until_free(ring, slot)


def test_a_child_that_calls_exec_frees_the_slot(ring: Ring) -> None:
    program = [sys.executable, "-c", "input()"]
    read_end, write_end = os.pipe()

    def run_program() -> None:
        os.dup2(read_end, 0)
        os.execv(sys.executable, program)

    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(run_program)
    os.close(read_end)
    del root
    assert not is_free(ring, slot)
    os.close(child._tell)
    assert wait_until_free(ring, slot)
    assert os.waitpid(child.pid, os.WNOHANG) == (0, 0)  # control: alive, as a different program
    os.write(write_end, b"\n")
    os.close(write_end)
    assert os.waitpid(child.pid, 0)[1] == 0


def test_a_child_of_the_child_keeps_the_slot(ring: Ring) -> None:
    told, tell = os.pipe()

    def leave_a_child() -> int:
        if os.fork() == 0:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
        return 0

    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(leave_a_child)
    del root
    assert child.end() == 0
    assert not is_free(ring, slot)
    os.close(told)
    os.close(tell)
    assert wait_until_free(ring, slot)


def test_a_child_with_a_ring_of_its_own_keeps_its_parent_s_slot(ring: Ring) -> None:
    said, say = os.pipe()

    def use_a_ring() -> int:
        own = make_ring()
        for _ in range(3):
            own.lend(own.take(), NUM_BYTES)
            os.waitpid(os.fork() or os._exit(0), 0)
            own._collect()
        os.write(say, b"x")
        return len(os.read(told, 1))

    told, tell = os.pipe()
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(use_a_ring)
    os.close(child._tell)
    del root
    assert os.read(said, 1) == b"x"
    assert not is_free(ring, slot)
    os.write(tell, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 1
    assert wait_until_free(ring, slot)
    for fd in (said, say, told, tell):
        os.close(fd)


def test_a_long_lived_child_keeps_only_what_it_can_see(ring: Ring) -> None:
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child()
    del root
    for _ in range(100):
        ring.lend(ring.take(), NUM_BYTES)
    assert ring.num_slots == FIRST_SLOTS
    assert not is_free(ring, slot)
    assert len(ring._parked) == 1
    assert child.end() == 0
    assert wait_until_free(ring, slot)


# -- long runs -------------------------------------------------------------------------------------


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def fork_and_end() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_fork_in_every_step_keeps_memory_and_descriptors_bounded() -> None:
    iterator = iter(DataLoader(Numbers(800, (50,)), batch_size=4, num_workers=2))
    held = [next(iterator)[1].numpy()]
    ring = iterator._producer.dispatcher.ring
    num_fds, most_fds, most_parked = count_fds(), 0, 0
    long_lived = Child(lambda: held[0].tolist() != [0, 1, 2, 3])
    held.clear()
    pids = []
    for step, (_, labels) in enumerate(iterator, 1):
        assert labels.tolist() == [4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3]
        pids.append(fork_and_end())
        if len(pids) > 3:
            os.waitpid(pids.pop(0), 0)
        most_fds = max(most_fds, count_fds())
        most_parked = max(most_parked, len(ring._parked))
        num_slots = ring.num_slots
    assert step == 199
    assert 1 <= most_parked <= 20
    assert num_slots <= 8 * FIRST_SLOTS
    assert most_fds - num_fds <= 20
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    assert long_lived.end() == 0


FORKING = """
import os
from penstock.engine.memory.ring import Ring
from penstock.engine.memory.shared_file import SharedFile

file = SharedFile.create()
ring = Ring(file, max_held_bytes=1 << 30)
ring.fit(4096)
pids, most_fds, most_parked = [], 0, 0
for step in range(2000):
    root = ring.lend(ring.take(), 4096)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pids.append(pid)
    del root
    if len(pids) > 3:
        os.waitpid(pids.pop(0), 0)
    most_fds = max(most_fds, len(os.listdir("/proc/self/fd")))
    most_parked = max(most_parked, len(ring._parked))
print(most_fds, most_parked, ring.num_slots, file.num_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_a_fork_in_each_of_two_thousand_steps_takes_one_segment(tmp_path: Path) -> None:
    """Runs without torch, which makes a fork ten times slower."""
    result = scripts.run(FORKING, tmp_path)
    most_fds, most_parked, num_slots, num_bytes = map(int, result.stdout.split())
    assert most_fds <= 20
    assert 1 <= most_parked <= FIRST_SLOTS  # at least one: the ring waited for children
    assert num_slots <= 2 * FIRST_SLOTS
    assert num_bytes <= 2 * FIRST_SLOTS * (1 << 16)


def test_epochs_with_forked_workers_leave_no_descriptors_and_no_slots() -> None:
    train = DataLoader(
        Numbers(400, (50,)),
        batch_size=4,
        num_workers=1,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    valid = DataLoader(
        Numbers(8, (50,)), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    iterator = iter(train)
    ring = iterator._producer.dispatcher.ring
    for _ in range(15):
        batch = next(iterator)
        before = batch[1].tolist()
        assert sum(len(labels) for _, labels in valid) == 8
        assert batch[1].tolist() == before
    assert len(ring._parked) <= 2
    assert len(process_forks.fds) <= 6


def test_a_fork_by_native_code_is_not_seen() -> None:
    before = process_forks.era()
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert process_forks.era() == before
    os.waitpid(fork_and_end(), 0)
    assert process_forks.era() != before  # control: a fork by Python counts
