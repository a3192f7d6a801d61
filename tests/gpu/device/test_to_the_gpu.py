"""Pinned slots are reused only when no copy reads them, and batches reach the GPU intact."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.cuda_marks import needs_cuda
from support.scripts import run

pytestmark = [pytest.mark.gpu, needs_cuda]

PRELUDE = """
import gc, os, sys, time
import numpy as np
import torch
import penstock

class Numbered(torch.utils.data.Dataset):
    def __init__(self, length, width=100_000):
        self.length, self.width = length, width
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return np.full(self.width, index % 251, dtype=np.uint8)

def expected(number, rows):
    first = number * rows
    return (torch.arange(first, first + rows) % 251).to(torch.uint8)
"""
COPYING = (
    PRELUDE
    + """
from penstock.device import pinning
if {is_unsafe}:
    pinning.SlotPinner.fence = lambda self: lambda: True  # switch the fence off

num_batches, rows = {num_batches}, 4
stream = torch.cuda.Stream()
busy = torch.randn(2048, 2048, device="cuda")
loader = penstock.DataLoader(
    Numbered(num_batches * rows), batch_size=rows, num_workers=4, pin_memory=True
)
wrong, moved, number = 0, [], 0
for host in loader:
    assert host.is_pinned()
    with torch.cuda.stream(stream):  # not the current stream, whose events do not cover this copy
        if number % 16 == 0:
            for _ in range({num_products}):
                torch.mm(busy, busy)
        moved.append((number, host.cuda(non_blocking=True)))
    del host
    number += 1
    if len(moved) == 64:
        stream.synchronize()
        for which, batch in moved:
            wrong += int((batch[:, 0].cpu() != expected(which, rows)).any())
            wrong += int((batch != batch[:, :1]).any())
        moved.clear()
print(number, wrong, loader.plan.notes)
"""
)


def run_copying(tmp_path: Path, *, num_batches: int, is_unsafe: bool) -> tuple[int, int]:
    source = COPYING.format(num_batches=num_batches, is_unsafe=is_unsafe, num_products=8)
    result = run(source, tmp_path)
    assert result.returncode == 0, result.stderr
    number, wrong, notes = result.stdout.split(maxsplit=2)
    assert notes.strip() == "()"
    return int(number), int(wrong)


def test_slots_whose_copies_are_under_way_on_another_stream_are_left_alone(tmp_path: Path) -> None:
    assert run_copying(tmp_path, num_batches=10_000, is_unsafe=False) == (10_000, 0)


def test_without_the_fence_batches_are_corrupted(tmp_path: Path) -> None:
    _, wrong = run_copying(tmp_path, num_batches=2_000, is_unsafe=True)
    assert wrong > 0


def test_with_a_thread_that_waits_instead_of_the_driver_s_event_they_are_whole(
    tmp_path: Path,
) -> None:
    source = COPYING.format(num_batches=2_000, is_unsafe=False, num_products=8).replace(
        "num_batches, rows",
        "from penstock.device import fences\n"
        "pinning.choose_fence = fences.SynchronizingFence\n"
        "num_batches, rows",
        1,
    )
    result = run(source, tmp_path)
    assert result.stdout.split()[:2] == ["2000", "0"], result.stderr


def test_nothing_is_asked_of_the_gpu_while_a_graph_is_captured(tmp_path: Path) -> None:
    source = (
        PRELUDE
        + """
loader = penstock.DataLoader(Numbered(4000), batch_size=4, num_workers=2, pin_memory=True)
batches = iter(loader)
for _ in range(20):
    next(batches)
graph, counter = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
with torch.cuda.graph(graph):
    counter.add_(1)
    for _ in range(200):
        last = next(batches)
    del last, batches, loader
    gc.collect()
    time.sleep(0.2)
    counter.add_(1)
graph.replay()
print(counter[0].item())
"""
    )
    result = run(source, tmp_path)
    assert result.stdout == "2.0\n", result.stderr


def test_batches_of_a_device_loader_are_there_and_right_on_the_user_s_stream(
    tmp_path: Path,
) -> None:
    source = (
        PRELUDE
        + """
class Pair(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return {"x": np.full(50_000, index % 251, dtype=np.uint8), "y": index, "name": str(index)}

stream, wrong, kept = torch.cuda.Stream(), 0, []
loader = penstock.DataLoader(Pair(), batch_size=4, num_workers=4, device="cuda")
for number, batch in enumerate(loader):
    assert batch["x"].is_cuda and batch["y"].is_cuda
    assert batch["name"] == [str(4 * number + row) for row in range(4)]
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        kept.append((number, batch["x"].clone()))
    batch["x"].record_stream(stream)
    del batch
torch.cuda.synchronize()
for number, images in kept:
    wrong += int((images[:, 0].cpu() != expected(number, 4)).any()) + int(
        (images != images[:, :1]).any())
print(len(kept), wrong)
"""
    )
    assert run(source, tmp_path).stdout == "1000 0\n"


def test_bytes_are_finished_on_the_gpu_to_the_last_bit_as_on_the_cpu(tmp_path: Path) -> None:
    source = (
        PRELUDE
        + """
images = torch.randint(0, 256, (8, 3, 37, 51), dtype=torch.uint8)
mirrored = torch.rand(8) < 0.5
for form in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        finish = penstock.finish(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225],
                                 dtype=dtype, memory_format=form, flip=1)
        for start in (images, images.to(memory_format=torch.channels_last)):
            there = finish((start.cuda(), mirrored.cuda()))[0]
            here = finish((start, mirrored))[0]
            assert torch.equal(there.cpu(), here) and there.stride() == here.stride()
print("equal")
"""
    )
    result = run(source, tmp_path)
    assert result.stdout == "equal\n", result.stderr


def test_a_gpu_that_is_full_is_named_and_nothing_stays_pinned(tmp_path: Path) -> None:
    source = (
        PRELUDE
        + """
from penstock.device import pinning
pinners, init = [], pinning.SlotPinner.__init__
def noting(self, *args, **keywords):
    init(self, *args, **keywords)
    pinners.append(self)
pinning.SlotPinner.__init__ = noting
torch.cuda.set_per_process_memory_fraction(0.002)
kept = []
loader = penstock.DataLoader(Numbered(4000, 1_000_000), batch_size=16, num_workers=2, device="cuda")
try:
    for batch in loader:
        kept.append(batch)
except torch.cuda.OutOfMemoryError as error:
    print(type(error).__name__, isinstance(error, penstock.errors.PenstockError))
    print(str(error).splitlines()[-1].strip())
kept.clear()
deadline = time.monotonic() + 20
while sum(pinner.num_pinned for pinner in pinners) and time.monotonic() < deadline:
    gc.collect(); time.sleep(0.1)
print(sum(pinner.num_pinned for pinner in pinners), torch.cuda.is_available())
import psutil
print(len(psutil.Process().children(recursive=True)) <= 1)  # the fork server, no worker
"""
    )
    result = run(source, tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0] == "DeviceFailed True", result.stderr
    assert "device_prefetch=1" in lines[1]
    assert lines[2:] == ["0 True", "True"]


def test_other_loaders_batches_come_to_the_gpu_too(tmp_path: Path) -> None:
    source = (
        PRELUDE
        + """
from torch.utils.data import DataLoader
seen = 0
for number, batch in enumerate(penstock.to_device(DataLoader(Numbered(400), 4), "cuda")):
    assert batch.is_cuda and torch.equal(batch[:, 0].cpu(), expected(number, 4))
    seen += 1
print(seen)
"""
    )
    assert run(source, tmp_path).stdout == "100\n"


def test_the_memory_checker_finds_nothing(tmp_path: Path) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    program = tmp_path / "program.py"
    program.write_text(
        PRELUDE
        + """
finish = penstock.finish(mean=[0.5], std=[0.5], memory_format=torch.channels_last)
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return np.full((3, 17, 19), index, dtype=np.uint8)
total = 0.0
shared = {"batch_size": 4, "num_workers": 2}
for batch in penstock.DataLoader(Images(), **shared, device="cuda", finish=finish):
    total += batch.sum().item()
for batch in penstock.DataLoader(Images(), **shared, pin_memory=True):
    total += batch.cuda(non_blocking=True).sum().item()
print("done")
"""
    )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "7", sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "done" in result.stdout
