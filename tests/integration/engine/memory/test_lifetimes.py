"""Batches stay valid when they are kept, when epochs are left, and with many iterators."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

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
    Slow,
    assert_same,
    collect,
    differences,
)

legacy = pytest.mark.legacy


def expected(length: int, batch_size: int) -> list[list[int]]:
    return [list(range(n, min(n + batch_size, length))) for n in range(0, length, batch_size)]


def values(batches: list[Any]) -> list[list[int]]:
    """Return the index of each sample in each batch, checked against every element."""
    found = []
    for image, label in batches:
        assert_same(image, label.to(image.dtype).reshape(-1, 1).expand_as(image).contiguous())
        found.append(label.tolist())
    return found


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("size", [3, 5000])
def test_a_list_of_all_batches_holds_distinct_and_correct_data(way: str, size: int) -> None:
    batches = list(DataLoader(Numbers(160, (size,)), batch_size=2, **WAYS[way]))
    assert values(batches) == expected(160, 2)
    assert len({image.data_ptr() for image, _ in batches}) == 80


def test_a_clobbered_batch_is_noticed() -> None:
    batches = list(DataLoader(Numbers(12), batch_size=2, num_workers=2))
    batches[1][0].copy_(batches[4][0])  # as if the slot had been reused
    with pytest.raises(AssertionError):
        values(batches)


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_memory_is_used_again_when_batches_are_dropped(way: str) -> None:
    places = set()
    for image, _ in DataLoader(Numbers(400, (5000,)), batch_size=2, **WAYS[way]):
        places.add(image.data_ptr())
    assert len(places) < 120  # 200 batches; each batch in flight needs its own slot


@legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_every_other_batch_kept_is_not_touched_by_the_rest(way: str) -> None:
    kept = []
    for number, batch in enumerate(DataLoader(Numbers(200, (500,)), batch_size=2, **WAYS[way])):
        if number % 2:
            kept.append((number, batch[0][1:], batch[1]))  # a slice of one tensor, all of the other
    for number, image, label in kept:
        assert label.tolist() == [2 * number, 2 * number + 1]
        assert image.unique().tolist() == [2 * number + 1]


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_batches_outlive_their_loader(way: str) -> None:
    loader = DataLoader(Numbers(20, (500,)), batch_size=2, **WAYS[way])
    batches = list(loader)
    del loader
    gc.collect()
    list(DataLoader(Numbers(60, (500,)), batch_size=2, **WAYS[way]))
    assert values(batches) == expected(20, 2)


def test_batches_may_be_written_to() -> None:
    batches = list(DataLoader(Numbers(20), batch_size=2, num_workers=2))
    for image, _ in batches:
        image += 1
    assert [image[0, 0].item() for image, _ in batches] == [2 * n + 1.0 for n in range(10)]


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is in a mapping of Penstock."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:penstock" in line
    return False


@pytest.mark.skipif(not leftovers.HAS_PROC, reason="looks into /proc")
def test_when_the_user_holds_too_much_batches_become_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = DataLoader(Numbers(80, (2000,)), batch_size=2, num_workers=2)
    assert all(in_shared_memory(image) for image, _ in list(loader))  # control: no copies
    monkeypatch.setattr("penstock.engine.parent.context.max_held_bytes", lambda: 10 * 16_064)
    batches = list(loader)
    assert values(batches) == expected(80, 2)
    assert [in_shared_memory(image) for image, _ in batches] == [True] * 10 + [False] * 30


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_an_epoch_left_half_way_is_left_cleanly(way: str) -> None:
    loader = DataLoader(Numbers(100), batch_size=2, **WAYS[way])
    for _ in range(3):
        for number, _ in enumerate(loader):
            if number == 3:
                break
    assert values(list(loader)) == expected(100, 2)


@legacy
@pytest.mark.parametrize("way", ["thread", "forkserver", "fork"])
def test_an_epoch_of_persistent_workers_left_half_way_does_not_spill_into_the_next(
    way: str,
) -> None:
    loader = DataLoader(Numbers(40), batch_size=2, persistent_workers=True, **WAYS[way])
    for stop in (0, 1, 7):
        for number, _ in enumerate(loader):
            if number == stop:
                break
        assert values(list(loader)) == expected(40, 2)
    loader.close()


class SlowBatches(Numbers):
    """Appends to a file for each batch it loads."""

    def __init__(self, length: int, log: Path) -> None:
        super().__init__(length)
        self.log = log

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(0.1)
        with self.log.open("a") as log:
            log.write(".")
        return [self[index] for index in indices]


@pytest.mark.parametrize("way", ["thread", "forkserver"])
def test_what_was_asked_for_in_an_epoch_that_was_left_is_not_loaded(
    way: str, tmp_path: Path
) -> None:
    arguments = {**WAYS[way], "num_workers": 1}
    dataset = SlowBatches(100, tmp_path / "log")
    loader = DataLoader(
        dataset, batch_size=2, prefetch_factor=30, persistent_workers=True, **arguments
    )
    next(iter(loader))  # 30 batches of 0.1 s are requested
    next(iter(loader))
    assert len(dataset.log.read_text()) < 30  # otherwise the whole first epoch came before
    loader.close()


@legacy
def test_persistent_workers_are_the_same_processes_in_every_epoch() -> None:
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
    pids = []
    for _ in range(3):
        list(loader)
        pids.append([worker.pid for worker in loader._iterator._workers])
    assert pids[0] == pids[1] == pids[2]
    loader.close()
    other = DataLoader(Numbers(8), batch_size=2, num_workers=2)
    iterators = [iter(other), iter(other)]  # control: separate processes
    assert not {w.pid for w in iterators[0]._workers} & {w.pid for w in iterators[1]._workers}


@pytest.mark.parametrize("way", ["thread", "forkserver"])
def test_persistent_workers_read_an_iterable_dataset_again_each_epoch(way: str) -> None:
    loader = DataLoader(Shards(20), batch_size=3, persistent_workers=True, **WAYS[way])
    for _ in range(3):
        assert sorted(torch.cat(collect(loader)).tolist()) == list(range(20))
    loader.close()


def test_persistent_without_processes_reads_an_iterable_dataset_again_each_epoch() -> None:
    loader = DataLoader(
        Shards(20), batch_size=3, num_workers=1, persistent_workers=True, pool="inline"
    )
    for _ in range(3):
        assert sorted(torch.cat(collect(loader)).tolist()) == list(range(20))


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_a_loader_ends_its_workers_and_it_can_be_used_again(persistent: bool) -> None:
    loader = DataLoader(Numbers(20), batch_size=2, num_workers=2, persistent_workers=persistent)
    batches = list(loader)
    loader.close()
    loader.close()
    assert values(batches) == expected(20, 2)
    assert values(list(loader)) == expected(20, 2)
    loader.close()


@legacy
@pytest.mark.parametrize("way", QUICK_WAYS)
def test_two_iterators_of_one_loader_go_side_by_side(way: str) -> None:
    loader = DataLoader(Numbers(20), batch_size=2, **WAYS[way])
    one, two = [], []
    for left, right in zip(loader, loader, strict=True):
        one.append(left)
        two.append(right)
    assert values(one) == values(two) == expected(20, 2)


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_an_iterator_may_be_dropped_at_any_moment(way: str) -> None:
    loader = DataLoader(Slow(40, sample_s=0.002), batch_size=2, **WAYS[way])
    for num_batches in (0, 1, 5):
        iterator = iter(loader)
        pids = [worker.pid for worker in iterator._workers] if way != "thread" else []
        found = [next(iterator).tolist() for _ in range(num_batches)]
        del iterator
        assert found == expected(40, 2)[:num_batches]
        assert leftovers.wait_until_gone(pids) == []


def test_an_iterator_in_a_reference_cycle_goes_with_the_garbage() -> None:
    iterator = iter(DataLoader(Numbers(20), batch_size=2, num_workers=2))
    next(iterator)
    pids = [worker.pid for worker in iterator._workers]
    iterator.me = iterator
    del iterator
    gc.collect()
    assert leftovers.wait_until_gone(pids) == []


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_iterators_in_reference_cycles_close_nothing_twice(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: complaints.append(raised.exc_value))
    loader = DataLoader(Samples(_raise, 8), batch_size=2, **WAYS[way])
    for _ in range(8):
        iterator = iter(loader)
        try:
            next(iterator)
        except LookupError as error:
            iterator.reason = error  # its traceback holds the frames, which hold the iterator
        del iterator
    gc.collect()
    assert complaints == []


def _raise(index: int) -> None:
    raise LookupError(index)


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_an_exhausted_iterator_says_so_again_and_again(way: str) -> None:
    iterator = iter(DataLoader(Numbers(4), batch_size=2, **WAYS[way]))
    assert len(list(iterator)) == 2
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@legacy
@pytest.mark.parametrize("way", WORKER_WAYS)
def test_a_loader_may_be_used_from_another_thread(way: str) -> None:
    with ThreadPoolExecutor(1) as executor:
        batches = executor.submit(list, DataLoader(Numbers(20), batch_size=2, **WAYS[way])).result()
    assert values(batches) == expected(20, 2)


def test_many_threads_may_each_use_a_loader_of_their_own() -> None:
    def load(number: int) -> list[Any]:
        return list(DataLoader(Numbers(20 + number), batch_size=2, num_workers=1))

    with ThreadPoolExecutor(4) as executor:
        for number, batches in enumerate(executor.map(load, range(8))):
            assert values(batches) == expected(20 + number, 2)


def test_an_iterator_begun_here_may_be_finished_in_another_thread() -> None:
    iterator = iter(DataLoader(Numbers(20), batch_size=2, num_workers=2))
    batches = [next(iterator)]
    with ThreadPoolExecutor(1) as executor:
        batches += executor.submit(list, iterator).result()
    assert values(batches) == expected(20, 2)


@pytest.mark.parametrize("way", WORKER_WAYS)
def test_several_threads_may_share_one_iterator_and_each_batch_comes_once(way: str) -> None:
    iterator = iter(DataLoader(Numbers(400), batch_size=2, **WAYS[way]))
    with ThreadPoolExecutor(4) as executor:
        shares = list(executor.map(lambda _: list(iterator), range(4)))
    found = sorted(values([batch for share in shares for batch in share]))
    assert found == expected(400, 2)


@pytest.mark.parametrize("way", ["thread", "forkserver"])
def test_batches_that_were_loaded_but_not_taken_give_their_memory_back(way: str) -> None:
    ways = {"persistent_workers": True, "prefetch_factor": 4, **WAYS[way]}
    loader = DataLoader(Numbers(200, (500,)), batch_size=2, **ways)
    for _ in range(60):
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.01)  # the workers load the requested batches
        next(iterator)  # receives their messages; the other batches are never taken
    # 8 batches are requested at a time. A busy machine may still load those of an earlier epoch.
    # Leaking six unused batches in each of 60 epochs would need 360 slots.
    assert loader._iterator._producer.dispatcher.ring.num_slots <= 64
    loader.close()


@pytest.mark.parametrize("way", PROCESS_WAYS)
def test_a_parent_with_running_threads_gets_its_batches(way: str) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.ones(100).sum()
            [object() for _ in range(100)]

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert values(list(DataLoader(Numbers(20), batch_size=2, **WAYS[way]))) == expected(
                20, 2
            )
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Nested(Numbers):
    """Each sample comes from a nested loader inside the worker."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(4)
        self.arguments = arguments

    def __getitem__(self, index: int) -> Any:
        inner = DataLoader(Numbers(4 + index), batch_size=2, **self.arguments)
        return torch.cat([label for _, label in inner]).sum()


@pytest.mark.parametrize("inner", ["inline", "thread", "forkserver"])
@pytest.mark.parametrize("outer", ["thread", "forkserver"])
def test_a_loader_works_inside_a_worker(outer: str, inner: str) -> None:
    arguments = dict(WAYS[inner])
    if inner == "forkserver":
        arguments["num_workers"] = 1  # each outer worker starts its own fork server
    loader = DataLoader(Nested(**arguments), batch_size=2, **{**WAYS[outer], "num_workers": 1})
    assert torch.cat(collect(loader)).tolist() == [sum(range(4 + n)) for n in range(4)]


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_batches_of_data_in_memory_may_be_kept_too(way: str) -> None:
    data = torch.arange(400).reshape(100, 4)
    batches = list(DataLoader(TensorDataset(data), batch_size=3, **WAYS[way]))
    assert torch.equal(torch.cat([batch[0] for batch in batches]), data)
    assert differences(batches[0], batches[1])


def test_a_result_that_refers_to_itself_comes_back_whole() -> None:
    def knot(samples: list[int]) -> list[Any]:
        tied: list[Any] = list(samples)
        tied.append(tied)
        return tied

    loader = DataLoader(Samples(lambda i: i, 4), batch_size=2, num_workers=1, collate_fn=knot)
    for batch in loader:
        assert batch[2] is batch


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": "auto", "persistent_workers": True},
        {"num_workers": "auto"},
        {"num_workers": 2, "seed": 0},
        {"num_workers": 2, "pool": "thread"},
    ],
)
def test_nothing_waits_for_the_garbage_collector(arguments: dict[str, Any]) -> None:
    def slow(index: int) -> int:
        time.sleep(0.002)
        return index

    gc.collect()
    gc.disable()
    try:
        loader = DataLoader(Samples(slow, 400), batch_size=4, **arguments)
        batches = iter(loader)
        for _ in range(60):
            next(batches)
        iterator = weakref.ref(batches)
        del batches, loader
        assert iterator() is None  # so its workers are stopped
    finally:
        gc.enable()
