"""Async datasets: the same batches for any number in flight, with and without workers."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from penstock import DataLoader, rng
from penstock.engine.loading import async_limit
from penstock.errors import BadArgument, SharedDraw
from penstock.order.event_loop import loop_of_thread
from support.datasets import WAYS, Shards, assert_same, collect, differences

legacy = pytest.mark.legacy


@pytest.fixture(scope="module", autouse=True)
def event_loop_of_this_thread() -> None:
    """Create it before the first test, because it is kept."""
    loop_of_thread()


class Pages(Dataset):
    """Samples that wait for each other's turns, and draw random numbers before and after."""

    def __init__(self, length: int = 48) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def __getitem__(self, index: int) -> Any:
        first = rng().random()
        await asyncio.sleep(0.001 * (index * 7 % 5))
        return torch.full((3,), float(index)), first, rng().normal(size=2), index


class Plain(Pages):
    """The same samples, not async."""

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return torch.full((3,), float(index)), rng().random(), rng().normal(size=2), index


class PageBatches(Pages):
    async def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(await asyncio.gather(*(self.load(index) for index in indices)))

    async def load(self, index: int) -> Any:
        first, second = rng().random(), rng().normal(size=2)
        await asyncio.sleep(0.001 * (index * 7 % 5))
        return torch.full((3,), float(index)), first, second, index


class UnorderedBatches(PageBatches):
    """Draws after the request, in the order in which the answers arrive."""

    async def load(self, index: int) -> Any:
        return await self[index]


class Together(Pages):
    """Sample i waits until ``num_together`` samples of its process are in flight."""

    def __init__(self, num_together: int, length: int = 64) -> None:
        super().__init__(length)
        self.num_together, self.now, self.most = num_together, 0, 0

    async def __getitem__(self, index: int) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(20_000):
            if self.most >= self.num_together:
                break
            await asyncio.sleep(0.001)
        self.now -= 1
        return index, self.most


def batches(dataset: Any, **arguments: Any) -> list[Any]:
    return collect(
        DataLoader(dataset, **{"batch_size": 8, "shuffle": True, "seed": 3, **arguments})
    )


@legacy
@pytest.mark.parametrize("way", ["inline", "forkserver", "thread"])
def test_the_bits_do_not_depend_on_the_number_in_flight(way: str) -> None:
    expected = batches(Plain())
    for in_flight in (1, 8, 64, "auto"):
        assert_same(batches(Pages(), in_flight=in_flight, **WAYS[way]), expected)
    assert differences(batches(Pages(), seed=4, **WAYS[way]), expected)


@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_the_bits_do_not_depend_on_the_number_of_workers(num_workers: int) -> None:
    assert_same(batches(Pages(), num_workers=num_workers, in_flight=8), batches(Plain()))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_start_methods_give_the_same_bits(way: str) -> None:
    assert_same(batches(Pages(), **WAYS[way]), batches(Plain()))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": None},
        {"collate_fn": lambda samples: [sample[3] for sample in samples] + [random.random()]},
        {"drop_last": True, "batch_size": 7},
    ],
)
def test_without_batches_and_with_a_collate_fn(way: str, arguments: dict[str, Any]) -> None:
    found = batches(Pages(), in_flight=16, **arguments, **WAYS[way])
    assert_same(found, batches(Plain(), **arguments))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_async_getitems_loads_batches(way: str) -> None:
    found = batches(PageBatches(), in_flight=16, **WAYS[way])
    indices = [index for batch in found for index in batch[3].tolist()]
    assert indices == [index for batch in batches(Plain()) for index in batch[3].tolist()]
    assert_same(found, batches(PageBatches()))


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_async_getitems_that_draws_as_answers_arrive_is_an_error(way: str) -> None:
    with pytest.raises(SharedDraw, match=r"several tasks of async sample \["):
        batches(UnorderedBatches(), **WAYS[way])


@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_torch_wrappers_of_async_datasets_work(way: str) -> None:
    def wrap(data: Any) -> Any:
        return ConcatDataset([Subset(data, range(5, 30)), Subset(data, range(3))])

    assert_same(batches(wrap(Pages()), **WAYS[way]), batches(wrap(Plain())))


class Wrapper(Pages):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        return self.inner[index]


def test_a_wrapper_of_the_users_own_needs_a_number() -> None:
    assert_same(batches(Wrapper(Pages()), in_flight=4), batches(Plain()))
    with pytest.raises(BadArgument, match="cannot be awaited"):
        batches(Wrapper(Plain()), in_flight=4)


@legacy
def test_as_many_are_in_flight_as_requested_across_batches() -> None:
    for in_flight, num_workers in ((40, 1), (40, 2)):
        found = batches(Together(40, 160), in_flight=in_flight, num_workers=num_workers)
        assert max(int(batch[1].max()) for batch in found) == in_flight
    few = batches(Together(4, 32), in_flight=4, num_workers=1)
    assert max(int(batch[1].max()) for batch in few) == 4


@pytest.mark.parametrize("in_flight", ["auto", 64])
def test_auto_goes_beyond_64_with_leases_for_all_and_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, in_flight: int | str
) -> None:
    # Each raise counts as faster, so the number depends on the number of samples alone.
    monkeypatch.setattr(async_limit, "FASTER", 0.0)
    monkeypatch.setattr(async_limit, "FULL_SHARE", 0.0)
    monkeypatch.setattr(async_limit, "max_fds", lambda: None)
    data = {"shuffle": True, "seed": 3}
    ways: Any = {"num_workers": 1, "pool": "thread", "in_flight": in_flight}
    ways["prefetch_factor"] = 2  # without it, the depth also follows the time of a batch
    loader = DataLoader(Pages(2_000), 16, **ways, **data)
    iterator: Any = iter(loader)
    found = [next(iterator)]
    depth = iterator._producer.dispatcher._depth
    assert depth.depth == 2 * 64 // 16
    found += iterator
    assert depth.depth == (2 * 256 // 16 if in_flight == "auto" else 2 * 64 // 16)
    assert_same(collect(found), collect(DataLoader(Plain(2_000), 16, **data)))


class Drawing(Pages):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.noise = kind, np.random.default_rng(0)

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        if index == 13:
            {"python": random.random, "torch": lambda: torch.rand(1), "own": self.noise.random}[
                self.kind
            ]()
        return index


@legacy
@pytest.mark.parametrize("way", ["inline", "forkserver", "thread"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("python", "Python's random module"),
        ("torch", "torch's default generator"),
        ("own", "dataset.noise"),
    ],
)
def test_a_draw_from_a_shared_generator_is_an_error_that_names_it(
    way: str, kind: str, name: str
) -> None:
    with pytest.raises(SharedDraw, match=f"async sample 13 drew from {name}"):
        batches(Drawing(kind), on_error="skip", **WAYS[way])
    assert len(batches(Drawing(kind), randomness="worker", **WAYS[way])) == 6


class Failing(Pages):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0.001)
        if index % 16 == 5:
            raise ValueError(f"sample {index} is truncated")
        return index


class PlainFailing(Pages):
    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        if index % 16 == 5:
            raise ValueError(f"sample {index} is truncated")
        return index


@legacy
@pytest.mark.parametrize("way", ["inline", "forkserver"])
def test_an_exception_reaches_the_caller(way: str) -> None:
    with pytest.raises(ValueError, match="sample 5 is truncated") as caught:
        batches(Failing(), shuffle=False, **WAYS[way])
    if way != "inline":
        assert "while loading sample 5" in str(getattr(caught.value, "__notes__", caught.value))


@legacy
@pytest.mark.parametrize("way", ["inline", "forkserver"])
@pytest.mark.parametrize("on_error", ["skip", "replace", lambda index, error: -index])
def test_bad_samples_are_treated_as_without_async(way: str, on_error: Any) -> None:
    loader = DataLoader(Failing(), 8, shuffle=True, seed=3, on_error=on_error, **WAYS[way])
    plain = DataLoader(PlainFailing(), 8, shuffle=True, seed=3, on_error=on_error)
    assert_same(collect(loader), collect(plain))
    shown = [(bad.index, bad.error) for bad in loader.bad_samples]
    assert shown == [(bad.index, bad.error) for bad in plain.bad_samples]
    assert shown


class Cleaning(Pages):
    """Samples after the first batch wait forever. Each writes a line when it is cancelled."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    async def __getitem__(self, index: int) -> Any:
        try:
            if index >= 8:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            (self.folder / str(index)).touch()
            raise
        return index


def wait_for(is_true: Any) -> None:
    limit_s = time.monotonic() + 240
    while not is_true() and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert is_true()


@pytest.mark.parametrize("persistent", [False, True])
def test_samples_in_flight_are_cancelled_at_the_end_of_an_epoch(
    tmp_path: Path, persistent: bool
) -> None:
    loader = DataLoader(
        Cleaning(tmp_path), 8, num_workers=1, in_flight=16, persistent_workers=persistent
    )
    iterator = iter(loader)
    assert next(iterator).tolist() == list(range(8))
    if persistent:
        assert next(iter(loader)).tolist() == list(range(8))  # the next epoch
    del iterator
    loader.close()
    wait_for(lambda: len(list(tmp_path.iterdir())) >= 8)


def test_an_epoch_in_a_running_event_loop_works() -> None:
    async def notebook_cell() -> list[Any]:
        await asyncio.sleep(0)
        return batches(Pages())

    assert_same(asyncio.run(notebook_cell()), batches(Plain()))


class Session(Pages):
    """Keeps an object that belongs to the event loop in which it was created."""

    lock: Any = None

    async def __getitem__(self, index: int) -> Any:
        if self.lock is None:
            self.lock = asyncio.get_running_loop().create_future()
            self.lock.set_result(os.getpid())
        return index, await self.lock


@pytest.mark.parametrize("way", ["inline", "forkserver", "thread"])
def test_what_belongs_to_the_event_loop_can_be_kept_for_the_next_epoch(way: str) -> None:
    loader = DataLoader(Session(), 8, in_flight=4, **WAYS[way])
    assert_same([len(list(loader)) for _ in range(2)], [6, 6])


def test_iterable_datasets_are_not_async() -> None:
    with pytest.raises(BadArgument, match="in_flight=4 applies to datasets with async"):
        list(DataLoader(Shards(), in_flight=4))


def test_a_resumed_epoch_continues_with_the_same_samples() -> None:
    loader = DataLoader(Pages(), 8, shuffle=True, seed=3, num_workers=1, in_flight=32)
    iterator = iter(loader)
    head = [next(iterator) for _ in range(2)]
    other = DataLoader(Pages(), 8, shuffle=True, seed=3, num_workers=2, in_flight=4)
    other.load_state_dict(loader.state_dict())
    assert_same([*head, *other], batches(Plain()))


def test_auto_chooses_workers_for_an_async_dataset_too() -> None:
    loader = DataLoader(Pages(2_000), 8, shuffle=True, seed=3, num_workers="auto")
    assert_same(collect(loader), batches(Plain(2_000)))
    loader = DataLoader(Pages(), 8, num_workers=4, pool="thread")
    list(loader)
    assert loader.plan.num_workers.value == 1
    assert "one event loop" in loader.plan.num_workers.reason
