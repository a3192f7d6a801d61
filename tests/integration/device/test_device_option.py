"""DataLoader(device=) gives the same batches and counts each when it is delivered, in every pool.

These tests need no GPU. A prefetcher that runs ahead is derived from the one for the CPU. Pinned
slots use runtime calls that are only recorded.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data._utils import pin_memory as torch_pinning

from penstock import DataLoader, finish
from penstock.device import pinning
from penstock.device import prefetcher as prefetching
from penstock.device.fences import SynchronizingFence
from penstock.device.pinning import SlotPinner
from penstock.errors import DeviceFailed, NoSuchDevice
from support import fake_gpu
from support.datasets import WAYS, Draws, Numbers, Samples, Shards, assert_same, collect, snapshot
from support.fake_gpu import PretendGpu
from support.worker_faults import Fateful, Log, ResumableStream

legacy = pytest.mark.legacy

DEPTH = 3
LOADING: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": WAYS["thread"],
    "workers": WAYS["forkserver"],
    "auto": {"num_workers": "auto"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


class Ahead(prefetching.DevicePrefetcher):
    """Runs ahead, although this has no benefit on the CPU, and records how far."""

    made: ClassVar[list[Ahead]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._depth = DEPTH
        self.furthest = 0
        self.made.append(self)

    def next(self, take: Any, is_ready: Any) -> Any:
        batch = super().next(take, is_ready)
        self.furthest = max(self.furthest, len(self._sent))
        return batch


@pytest.fixture
def is_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ahead]]:
    monkeypatch.setattr(prefetching, "DevicePrefetcher", Ahead)
    monkeypatch.setattr(Ahead, "made", [])
    yield Ahead.made
    Ahead.made.clear()


def make(dataset: Any = None, **arguments: Any) -> Any:
    arguments = {"batch_size": 4, "shuffle": True, "seed": 3, **arguments}
    return DataLoader(Draws(30) if dataset is None else dataset, **arguments)


def batches_of(loader: Any, count: int, pause_s: float = 0.0) -> list[Any]:
    taken = []
    for batch in itertools.islice(loader, count):
        taken.append(snapshot(batch))
        time.sleep(pause_s)  # a step, during which workers get ahead
    return taken


@legacy
@pytest.mark.parametrize("way", LOADING)
def test_batches_are_the_same_as_without_a_device(way: str) -> None:
    plain, placed = make(), make(device="cpu", **LOADING[way])
    for _ in range(2):
        assert_same(collect(placed), collect(plain))
    placed.close()


@legacy
@pytest.mark.parametrize("way", LOADING)
def test_being_ahead_changes_no_batch_in_any_epoch(way: str, is_ahead: list[Ahead]) -> None:
    plain, placed = make(), make(device="cpu", **LOADING[way])
    for _ in range(3):
        assert_same(batches_of(placed, 99, pause_s=0.002), collect(plain))
    placed.close()
    if way != "auto":  # "auto" times steps until it has chosen
        assert max(prefetcher.furthest for prefetcher in is_ahead) > 0, (
            "the prefetcher was not ahead"
        )


@legacy
@pytest.mark.parametrize("way", LOADING)
def test_a_state_in_the_middle_counts_what_was_handed_out_not_what_lies_ahead(
    way: str, is_ahead: list[Ahead]
) -> None:
    whole = collect(make())
    for count in (1, 4):
        loader = make(device="cpu", **LOADING[way])
        assert_same(batches_of(loader, count, pause_s=0.005), whole[:count])
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        other = make()
        other.load_state_dict(state)
        assert_same(collect(other), whole[count:])


def test_a_loader_that_counted_what_lies_ahead_would_be_noticed(
    is_ahead: list[Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine.parent.iterator import LoaderIterator

    take = LoaderIterator._take

    def counting_take(self: Any) -> Any:
        taken = take(self)
        self._progress.count(1)
        return taken

    monkeypatch.setattr(LoaderIterator, "_take", counting_take)
    loader = make(device="cpu")
    batches_of(loader, 2)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert len(collect(other)) < len(make()) - 2


class Stream(ResumableStream):
    def __init__(self, folder: Path) -> None:
        super().__init__({}, Log(folder / "log"), Log(folder / "seen"), length=23)


@legacy
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_with_a_state_resumes_where_batches_were_handed_out(
    num_workers: int, is_ahead: list[Ahead], tmp_path: Path
) -> None:
    def loader(**arguments: Any) -> Any:
        return DataLoader(Stream(tmp_path), batch_size=2, num_workers=num_workers, **arguments)

    whole = collect(loader())
    first = loader(device="cpu")
    assert_same(batches_of(first, 3, pause_s=0.02), whole[:3])
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    other = loader(device="cpu")
    other.load_state_dict(state)
    assert_same(collect(other), whole[3:])


def test_iterable_datasets_are_shared_out_as_without_a_device(is_ahead: list[Ahead]) -> None:
    for way in ("inline", "workers", "threads"):
        arguments = {"batch_size": 3, **LOADING[way]}
        placed = DataLoader(Shards(20), device="cpu", **arguments)
        assert_same(collect(placed), collect(DataLoader(Shards(20), **arguments)))


def break_some(index: int) -> torch.Tensor:
    if index in (4, 5, 6, 7, 9, 12, 13, 14, 15):
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


@legacy
@pytest.mark.parametrize("way", ["inline", "workers", "threads"])
def test_batches_of_which_nothing_is_left_keep_their_place_in_the_count(
    way: str, is_ahead: list[Ahead]
) -> None:
    def loader(**arguments: Any) -> Any:
        data = Samples(break_some, length=24)
        return DataLoader(data, batch_size=4, seed=0, on_error="skip", **arguments)

    whole = collect(loader())
    assert len(whole) == 4, "two of six have nothing left"
    for count in (1, 2, 3):
        first = loader(device="cpu", **LOADING[way])
        assert_same(batches_of(first, count, pause_s=0.01), whole[:count])
        state = first.state_dict()
        known = (state.get("bad") or {}).get("positions", [])
        assert all(position < state["position"] for position in known)
        other = loader()
        other.load_state_dict(state)
        assert_same(collect(other), whole[count:])
        assert len(other.bad_samples) + len(known) == 9
        first.close()


def break_one(index: int) -> int:
    return index if index != 9 else 1 // 0


@legacy
@pytest.mark.parametrize("way", ["inline", "workers", "threads"])
def test_an_error_of_a_sample_comes_after_the_batches_before_it_and_then_it_goes_on(
    way: str, is_ahead: list[Ahead]
) -> None:
    data = Samples(break_one, length=24)
    batches = iter(DataLoader(data, batch_size=4, device="cpu", **LOADING[way]))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert next(batches).tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("way", ["workers", "threads"])
@pytest.mark.parametrize(
    "data", [Shards(60), Samples(break_some, length=60)], ids=["stream", "map"]
)
def test_an_iterator_that_nobody_keeps_ends_its_workers_without_the_garbage_collector(
    way: str, data: Any, is_ahead: list[Ahead]
) -> None:
    loader = DataLoader(data, batch_size=2, device="cpu", on_error="skip", **LOADING[way])
    gc.collect()
    gc.disable()
    try:
        batches = iter(loader)
        next(batches)
        time.sleep(0.03)
        next(batches)
        workers = batches._workers
        del batches
        is_ahead.clear()
        until_s = time.monotonic() + 120
        while any(worker.is_alive() for worker in workers) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_persistent_workers_are_the_same_over_epochs_that_are_left_half_way(
    is_ahead: list[Ahead],
) -> None:
    plain = make(**LOADING["persistent"])
    placed = make(device="cpu", **LOADING["persistent"])
    batches_of(plain, 3)
    batches_of(placed, 3, pause_s=0.01)
    pids = {worker.pid for worker in placed._iterator._workers}
    for _ in range(2):
        assert_same(collect(placed), collect(plain))
    assert {worker.pid for worker in placed._iterator._workers} == pids
    plain.close()
    placed.close()


@pytest.mark.fault
def test_a_worker_that_is_killed_costs_a_retry(is_ahead: list[Ahead], tmp_path: Path) -> None:
    def loader(fates: dict[int, str], **arguments: Any) -> Any:
        return make(Fateful(fates, Log(tmp_path / "log"), length=30), **arguments)

    placed = loader({11: "SIGKILL"}, device="cpu", num_workers=2)
    assert_same(batches_of(placed, 99, pause_s=0.002), collect(loader({})))
    assert placed.num_restarts == 1


@pytest.mark.fault
def test_workers_killed_from_outside_while_batches_lie_ahead(is_ahead: list[Ahead]) -> None:
    placed = make(device="cpu", num_workers=2)
    batches, taken = iter(placed), []
    for number in range(8):
        if number == 2:
            os.kill(batches._workers[0].pid, signal.SIGKILL)
        taken.append(snapshot(next(batches)))
    assert_same(taken, collect(make()))


def test_a_device_that_fails_ends_the_workers_and_says_so_each_time(
    is_ahead: list[Ahead], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(device="cpu", num_workers=2)
    batches = iter(loader)
    first = snapshot(next(batches))

    def send(self: Any, batch: Any, finish: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prefetching._DirectCopier, "send", send)
    num_before = 1 + len(is_ahead[0]._sent)
    for _ in range(num_before - 1):
        next(batches)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        next(batches)
    assert isinstance(caught.value, DeviceFailed)
    assert num_before <= 1 + DEPTH
    assert not any(worker.is_alive() for worker in batches._workers)
    with pytest.raises(DeviceFailed):
        next(batches)  # not StopIteration
    monkeypatch.undo()
    assert_same(snapshot(next(iter(make(device="cpu")))), first)
    assert loader.state_dict()["position"] == 4 * num_before


def test_finish_is_applied_to_every_batch_and_its_mistakes_are_its_own() -> None:
    images = torch.arange(8 * 3 * 4 * 4).view(8, 3, 4, 4).to(torch.uint8)
    labels = torch.arange(8)
    normalise = finish(mean=[0.5], std=[0.25], memory_format=torch.channels_last)
    loader = DataLoader(TensorDataset(images, labels), batch_size=4, device="cpu", finish=normalise)
    whole = torch.cat([x for x, _ in loader])
    assert torch.equal(whole, normalise(images))

    def mistake(batch: Any) -> Any:
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake") as caught:
        next(iter(DataLoader(range(4), device="cpu", finish=mistake)))
    assert type(caught.value) is RuntimeError


def test_batches_without_tensors_pass(is_ahead: list[Ahead]) -> None:
    def whole(samples: list[Any]) -> Any:
        return samples

    texts = [f"text {index}" for index in range(6)]
    for arguments in ({}, {"num_workers": 1}):
        loader = DataLoader(texts, batch_size=2, device="cpu", **arguments)
        assert list(loader) == [texts[:2], texts[2:4], texts[4:]]
        own = DataLoader(texts, batch_size=2, device="cpu", collate_fn=whole, **arguments)
        assert list(own) == [texts[:2], texts[2:4], texts[4:]]


# -- pinned slots, with runtime calls that are only recorded ---------------------------------------


@pytest.fixture(params=["cuda", "hip"])
def gpu(request: pytest.FixtureRequest) -> Iterator[PretendGpu]:
    with fake_gpu.pretended(request.param) as gpu:
        yield gpu
        assert gpu.wait_until_unpinned(), "something is left pinned"
        assert not gpu.unmapped


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Types of batches passed to torch's pin_memory, replaced because it needs a GPU."""
    seen: list[str] = []

    def pin_memory(batch: Any, device: Any = None) -> Any:
        seen.append(type(batch).__name__)
        return batch

    monkeypatch.setattr(torch_pinning, "pin_memory", pin_memory)
    return seen


@legacy
@pytest.mark.parametrize("way", ["workers", "threads", "persistent"])
def test_pinned_slots_carry_every_batch_of_real_workers(
    way: str, gpu: PretendGpu, copied: list[str]
) -> None:
    loader = make(Numbers(60, shape=(3, 100)), pin_memory=True, **LOADING[way])
    plain = make(Numbers(60, shape=(3, 100)))
    for _ in range(2):
        expected = collect(plain)
        for batch, other in zip(loader, expected, strict=True):
            address = batch[0].data_ptr()
            assert any(first <= address < first + size for first, size in gpu.registered.items())
            assert_same(snapshot(batch), other)
            del batch
    assert copied == [], "no batch was copied a second time"
    assert gpu.devices_of("register") == {0}
    assert loader.plan.notes == ()
    loader.close()
    assert gpu.wait_until_unpinned()


def test_slots_are_pinned_without_workers_too(gpu: PretendGpu, copied: list[str]) -> None:
    data = TensorDataset(torch.arange(4000).view(40, 100))
    loader = DataLoader(data, batch_size=8, pin_memory=True)
    for (batch,) in loader:
        assert batch.data_ptr() in gpu.registered
        del batch
    assert copied == []
    assert gpu.wait_until_unpinned()


def test_where_pinning_is_refused_batches_go_through_torchs_buffers_and_the_plan_says_so(
    gpu: PretendGpu, copied: list[str]
) -> None:
    gpu.refusal = 801
    loader = make(Numbers(40), pin_memory=True, num_workers=2)
    plain = collect(make(Numbers(40)))
    assert_same(collect(loader), plain)
    assert len(copied) == len(plain)
    (note,) = loader.plan.notes
    assert note.startswith("slots cannot be pinned (")
    assert "HostRegister returned 801" in note
    assert gpu.names().count("register") == 1


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_slot_with_a_copy_under_way_is_not_given_to_a_worker(
    is_safe: bool, gpu: PretendGpu, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user copies with non_blocking=True and drops the batch. No worker may write to its slot.

    Control: with fences that are over immediately, a worker does.
    """
    if not is_safe:
        monkeypatch.setattr(SlotPinner, "fence", lambda self: lambda: True)
    loader = make(Numbers(400, shape=(3, 100)), pin_memory=True, num_workers=2)
    batches = iter(loader)
    batch = next(batches)
    address, before = batch[0].data_ptr(), batch[0].clone()
    gpu.begin_copy()
    slot = next(iter(batches._producer.dispatcher.ring._held))
    del batch
    for _ in range(30):
        next(batches)
    now = torch.frombuffer(slot.view(before.numel() * 4), dtype=torch.float32)
    assert slot.view(1).ctypes.data <= address
    assert torch.equal(now, before.view(-1)) is is_safe
    gpu.finish_all()


def test_an_epoch_left_half_way_leaves_nothing_pinned(gpu: PretendGpu, copied: list[str]) -> None:
    kept = next(iter(make(Numbers(60), pin_memory=True, num_workers=2)))
    until_s = time.monotonic() + 5
    while len(gpu.registered) > 1 and time.monotonic() < until_s:
        time.sleep(0.005)
    assert set(gpu.registered) <= {kept[0].data_ptr()} or len(gpu.registered) == 1
    assert_same(snapshot(kept), collect(make(Numbers(60)))[0])
    del kept
    assert gpu.wait_until_unpinned()


def test_an_exception_in_the_loop_leaves_nothing_pinned(gpu: PretendGpu, copied: list[str]) -> None:
    data = Samples(lambda i: torch.tensor(1 // (i - 30)), length=60)
    loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=2)
    try:
        for batch in loader:
            del batch
    except ZeroDivisionError as error:
        error.__traceback__ = None
    else:
        raise AssertionError("it should have raised")
    assert gpu.wait_until_unpinned()


def test_batches_taken_while_a_graph_is_captured_ask_nothing(
    gpu: PretendGpu, copied: list[str]
) -> None:
    loader = make(Numbers(200), pin_memory=True, num_workers=2)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    fence = pinning._gpus[0]._fence
    while isinstance(fence, SynchronizingFence) and fence.thread.is_running:
        time.sleep(0.001)  # like torch.cuda.synchronize() before a capture; see docs/gpu.md
    gpu.is_capturing = True
    before = gpu.names()
    for _ in range(5):
        next(batches)
    assert gpu.names() == before
    gpu.is_capturing = False
    del batches


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_on_a_machine_without_one_is_said_before_any_worker_starts() -> None:
    loader = DataLoader(range(4), device="cuda", num_workers=2)
    with pytest.raises(
        NoSuchDevice, match="device='cuda' does not exist on this machine"
    ) as caught:
        iter(loader)
    assert "device='cpu'" in str(caught.value)
    assert caught.value.device == "cuda"
