"""Real workers read shared data by reference, with one copy and without leaking descriptors."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from penstock import DataLoader, SharedDict, SharedList
from penstock.engine.pickling import pickler, shared_arrays
from support.datasets import WAYS
from support.scripts import run

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Names(Dataset):
    """Sample i: the length of name i, its label, and the private memory of this process."""

    def __init__(self, names: Any, labels: Any = None, length: int = 16) -> None:
        self.names = names
        self.labels = labels
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        name = self.names[index] if self.names else ""
        label = self.labels[name] if self.labels else 0
        touched = sum(len(name) for name in self.names)
        return touched, label, private_bytes()


def private_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")


def names(count: int) -> list[str]:
    return [f"folder/image-{number:09d}.jpg" for number in range(count)]


@needs_proc
@pytest.mark.legacy
@pytest.mark.parametrize("way", WAYS)
def test_workers_of_every_kind_read_shared_lists_and_dicts(way: str) -> None:
    plain = names(100)
    dataset = Names(SharedList(plain), SharedDict(zip(plain, range(100), strict=True)))
    for _ in range(1 if way == "spawn" else 2):  # spawned workers import torch in each epoch
        batches = list(DataLoader(dataset, batch_size=4, **WAYS[way]))
        assert [label for _, labels, _ in batches for label in labels.tolist()] == list(range(16))
        assert {n for touched, _, _ in batches for n in touched.tolist()} == {100 * 26}


@needs_proc
@pytest.mark.legacy
def test_torch_s_own_loader_shares_it_too_when_it_spawns() -> None:
    dataset = Names(SharedList(names(100)))
    loader = TorchDataLoader(dataset, batch_size=16, num_workers=1, multiprocessing_context="spawn")
    assert [touched[0].item() for touched, _, _ in loader] == [100 * 26]


@needs_proc
def test_a_worker_pays_for_a_plain_list_and_not_for_a_shared_one() -> None:
    def most_private(content: Any) -> int:
        # The smaller of two, because the pages touched by the collector and the allocator vary.
        return min(
            max(int(memory.max()) for _, _, memory in loader)
            for loader in [DataLoader(Names(content, length=4), 2, **WAYS["forkserver"])] * 2
        )

    plain = names(300_000)
    shared = SharedList(plain)
    nothing = most_private([])
    with_plain = most_private(plain)
    del plain
    gc.collect()
    assert most_private(shared) - nothing < 7e6
    assert with_plain - nothing > 15e6


@pytest.mark.slow
@needs_proc
@pytest.mark.legacy
def test_twenty_loaders_leave_no_descriptor_behind() -> None:
    dataset = Names(SharedList(names(50)), SharedDict((name, 0) for name in names(50)))
    list(DataLoader(dataset, batch_size=8, num_workers=1))  # opens the fork server's descriptors
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        list(DataLoader(dataset, batch_size=8, num_workers=1))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@needs_proc
@pytest.mark.legacy
def test_a_worker_gains_no_descriptor_from_epoch_to_epoch() -> None:
    class Counting(Dataset):
        def __init__(self) -> None:
            self.names = SharedList(names(50))

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return len(os.listdir("/proc/self/fd"))

    loader = DataLoader(Counting(), batch_size=4, num_workers=1, persistent_workers=True)
    counts = [batch.max().item() for _ in range(3) for batch in loader]
    loader.close()
    assert len(set(counts)) == 1


# -- handles ---------------------------------------------------------------------------------------


class Lazy(Dataset):
    """The documented pattern: the file is opened on first use, in the worker."""

    def __init__(self, path: Path, opened: Any) -> None:
        self.path = path
        self.open = opened
        self.handle: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if self.handle is None:
            self.handle = self.open(self.path)
        return read(self.handle, index)


class Eager(Lazy):
    """The file is opened in the constructor, as beginners write it."""

    def __init__(self, path: Path, opened: Any) -> None:
        super().__init__(path, opened)
        self.handle = opened(path)


def read(handle: Any, index: int) -> int:
    if type(handle).__name__ == "Environment":
        with handle.begin() as transaction:
            return int(transaction.get(str(index).encode()))
    return int(handle["x"][index])


def open_hdf5(path: Path) -> Any:
    import h5py

    return h5py.File(path, "r")


def open_lmdb(path: Path) -> Any:
    import lmdb

    return lmdb.open(str(path), readonly=True, lock=False)


def make_hdf5(path: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["x"] = range(12)
    return open_hdf5


def make_lmdb(path: Path) -> Any:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        for number in range(12):
            transaction.put(str(number).encode(), str(number).encode())
    return open_lmdb


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Lazy, Eager])
@pytest.mark.parametrize("make", [make_hdf5, make_lmdb])
def test_databases_are_read_in_two_epochs_by_two_workers(
    tmp_path: Path, make: Any, kind: Any, persistent: bool
) -> None:
    path = tmp_path / "data"
    dataset = kind(path, make(path))
    loader = DataLoader(dataset, batch_size=3, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert [x for batch in loader for x in batch.tolist()] == list(range(12))
    loader.close()
    if dataset.handle is not None:
        assert read(dataset.handle, 5) == 5  # the parent's handle is unchanged
        dataset.handle.close()


def test_an_open_hdf5_file_reaches_a_spawned_worker(tmp_path: Path) -> None:
    dataset = Eager(tmp_path / "data", make_hdf5(tmp_path / "data"))
    loader = DataLoader(dataset, batch_size=12, num_workers=1, multiprocessing_context="spawn")
    assert [batch.tolist() for batch in loader] == [list(range(12))]
    dataset.handle.close()


# -- large arrays ----------------------------------------------------------------------------------


class Rows(Dataset):
    """Sample i: the sum of the array without its first element, and that element."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(self.array[1:].sum()), int(self.array[0])


class Scribbling(Rows):
    def __getitem__(self, index: int) -> tuple[int, int]:
        self.array[len(self.array) // 2] = -1
        return super().__getitem__(index)


def family_bytes(loader_iterator: Any) -> int:
    """Return the memory of all processes, without files, which other programs share too."""
    total = 0
    for pid in (os.getpid(), *(worker.pid for worker in loader_iterator._workers)):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "_busy_threads", list)


@needs_proc
@pytest.mark.legacy
@pytest.mark.usefixtures("one_thread")
def test_a_large_array_exists_twice_and_once_where_a_copy_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory_with(array: Any) -> int:
        batches = iter(DataLoader(Rows(array), batch_size=1, num_workers=2))
        for _ in range(4):
            next(batches)
        total = family_bytes(batches)
        del batches
        return total

    num_bytes = 192 << 20
    nothing = memory_with(np.zeros(8, np.uint8))
    array = np.ones(num_bytes, np.uint8)
    twice = (memory_with(array) - nothing) / num_bytes
    assert 1.9 < twice < 2.2
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: 100 << 20)
    once = (memory_with(array) - nothing) / num_bytes
    assert 0.9 < once < 1.15


@pytest.mark.slow
@needs_proc
@pytest.mark.legacy
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("way", "fits"), [("forkserver", True), ("forkserver", False), ("spawn", False)]
)
def test_writes_on_either_side_stay_there_and_the_next_epoch_sees_ours(
    way: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: 1 << (40 if fits else 20))
    array = np.ones(pickler.LARGE_BYTES // 8 + 1000, np.int64)
    for epoch in range(2):
        array[0] = 10 + epoch
        loader = DataLoader(Scribbling(array), batch_size=2, **WAYS[way])
        batches = iter(loader)
        assert any("is not copied" in note for note in loader.plan.notes) != fits
        first = next(batches)
        array[1] = 1000  # the workers have their own
        second = next(batches)
        array[1] = 1
        assert (array[0], array.min()) == (10 + epoch, 1)
        for sums, firsts in (first, second):
            assert sums.tolist() == [len(array) - 3] * 2
            assert firsts.tolist() == [10 + epoch] * 2
        del batches


CLASSES = """
import multiprocessing, pickle, sys
from penstock import SharedList

class Box:
    pass

def look(boxes):
    assert type(boxes[0]) is Box, (type(boxes[0]), Box)
    assert boxes[1](1) == 2

if __name__ == "__main__":
    if sys.argv[1] == "make":
        boxes = SharedList([Box(), lambda x: x + 1])
        process = multiprocessing.get_context("spawn").Process(target=look, args=(boxes,))
        process.start()
        process.join()
        pickle.dump(boxes, open("boxes", "wb"))
        sys.exit(process.exitcode)
    look(pickle.load(open("boxes", "rb")))
"""


def test_where_the_script_runs_again_elements_have_its_own_classes(tmp_path: Path) -> None:
    for what in ("make", "load"):
        done = run(CLASSES, tmp_path, what)
        assert done.returncode == 0, done.stderr
