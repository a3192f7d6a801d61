"""Copies, graph captures and image finishing on a real GPU, without overwritten or wrong data."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import penstock
from penstock import DataLoader
from penstock.device import pinning
from penstock.device.pinning import SlotPinner
from support.datasets import Samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SHAPE = (3, 64, 64)
NUM_BATCHES, ROWS = 120, 16


def numbered(index: int) -> torch.Tensor:
    return torch.full(SHAPE, index, dtype=torch.int32)


def loader_of(num_batches: int = NUM_BATCHES, **arguments: Any) -> Any:
    data = Samples(numbered, length=num_batches * ROWS)
    return DataLoader(data, batch_size=ROWS, num_workers=2, **arguments)


def expected(number: int) -> torch.Tensor:
    rows = torch.arange(number * ROWS, (number + 1) * ROWS, dtype=torch.int32, device="cuda")
    return rows.view(ROWS, 1, 1, 1).expand(ROWS, *SHAPE)


def num_wrong(batches: list[torch.Tensor]) -> int:
    torch.cuda.synchronize()
    return sum(not torch.equal(batch, expected(number)) for number, batch in enumerate(batches))


@pytest.fixture(autouse=True)
def nothing_stays_pinned() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()
    until_s = time.monotonic() + 5
    while pinning._pinned and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not pinning._pinned


def copy_slowly(loader: Any, stream: Any, cycles: int = 2_000_000) -> list[torch.Tensor]:
    """Copy batches on a side stream, with a delay. The source is dropped immediately."""
    copies = []
    for batch in loader:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)  # two million are about a millisecond
            copies.append(batch.cuda(non_blocking=True))
        del batch
    return copies


def test_slots_are_pinned_and_copies_on_a_side_stream_are_right() -> None:
    loader = loader_of(pin_memory=True)
    assert next(iter(loader)).is_pinned()
    assert num_wrong(copy_slowly(loader, torch.cuda.Stream())) == 0
    assert loader.plan.notes == ()


def test_without_the_fence_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPinner, "fence", lambda self: lambda: True)
    # Even workers of a busy machine overwrite a slot within ten milliseconds.
    copies = copy_slowly(loader_of(pin_memory=True), torch.cuda.Stream(), cycles=20_000_000)
    assert num_wrong(copies) > 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_batches_brought_ahead_are_right_on_any_stream(depth: int) -> None:
    stream = torch.cuda.Stream()
    kept = []
    with torch.cuda.stream(stream):
        for batch in loader_of(device="cuda", device_prefetch=depth):
            torch.cuda._sleep(500_000)
            kept.append(batch + 0)
            del batch  # its memory must not be reused before the addition is done
    assert num_wrong(kept) == 0


def test_batches_of_any_iterable_are_right() -> None:
    host = [torch.full((1 << 20,), number) for number in range(40)]
    moved = [batch + 0 for batch in penstock.to_device(host, "cuda")]
    assert all(torch.equal(batch.cpu(), other) for batch, other in zip(moved, host, strict=True))


def test_a_capture_in_which_batches_are_taken_lives() -> None:
    batches = iter(loader_of(pin_memory=True))
    for _ in range(40):
        next(batches)
    static = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        for _ in range(3):
            next(batches)
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 4
    for _ in range(20):
        next(batches)


def test_a_loader_that_ends_before_a_capture_does_not_break_it() -> None:
    """A thread unpins the loader's memory while the graph is captured."""
    for _ in range(5):
        for batch in loader_of(10, pin_memory=True):
            del batch
        static = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                static.add_(1)
        graph.replay()
        assert static[0].item() == 200


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("is_last", [True, False])
def test_finishing_has_the_bits_of_the_cpu(
    dtype: torch.dtype, memory_format: torch.memory_format, is_last: bool
) -> None:
    images = torch.randint(0, 256, (7, 3, 37, 53), dtype=torch.uint8)
    if is_last:
        images = images.contiguous(memory_format=torch.channels_last)
    flags = torch.tensor([1, 0, 1, 1, 0, 0, 1])
    for flip in (None, 1):
        done = penstock.finish(
            mean=MEAN, std=STD, dtype=dtype, memory_format=memory_format, flip=flip
        )
        there = done((images.cuda(), flags.cuda()))[0]
        assert there.is_contiguous(memory_format=memory_format)
        assert torch.equal(there.cpu(), done((images, flags))[0])


def test_a_loader_finishes_on_the_gpu_what_it_finishes_on_the_cpu() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    normalise = penstock.finish(mean=MEAN, std=STD, memory_format=torch.channels_last)
    loader = DataLoader(TensorDataset(images), batch_size=8, device="cuda", finish=normalise)
    there = torch.cat([batch for (batch,) in loader])
    assert torch.equal(there.cpu(), normalise(images))


def test_memory_that_runs_out_is_said_and_the_workers_end() -> None:
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
    rest = torch.cuda.mem_get_info()[0]
    data = Samples(lambda index: torch.zeros(rest // 3 + (1 << 20), dtype=torch.uint8), length=8)
    batches = iter(DataLoader(data, batch_size=1, num_workers=1, device="cuda"))
    kept: list[torch.Tensor] = []
    with pytest.raises(torch.cuda.OutOfMemoryError, match="MiB to cuda:0 failed"):
        kept.extend(batches)
    assert not any(worker.is_alive() for worker in batches._workers)
    del hog, kept
    torch.cuda.empty_cache()
