"""Six training loops, each with one known bottleneck."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import default_collate, get_worker_info

from penstock import DataLoader, Timeline

NUM_SAMPLES, FEW_SAMPLES = 1200, 480  # each run takes over a second after start-up
BATCH_SIZE = 8
PIXELS = torch.zeros(3, 32, 32)


def compute(seconds: float) -> None:
    """Keep a core busy for this much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples:
    """A dataset of a given length that runs a function for each sample."""

    def __init__(self, work: Callable[[int], None], count: int = NUM_SAMPLES) -> None:
        self._work = work
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        self._work(index)
        return PIXELS


class ThrottledReads:
    """Reads files at a limited rate, like a network share."""

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self._path = path
        self._bytes_per_s = bytes_per_s

    def __call__(self, index: int) -> None:
        with self._path.open("rb") as file:
            while piece := file.read(4096):
                time.sleep(len(piece) / self._bytes_per_s)


def computing_collate(samples: list[Any]) -> Any:
    compute(0.02)
    return default_collate(samples)


def slow_where_worker_is_one(index: int) -> None:
    info = get_worker_info()
    assert info is not None
    time.sleep(0.02 if info.id == 1 else 0.001)


def copy_slowly(batch: torch.Tensor) -> torch.Tensor:
    """Simulate a slow transfer: the batch arrives 15 ms later."""
    time.sleep(0.015)
    return batch.clone()


class Others:
    """The share of all cores that other programs use."""

    share = 0.0


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep some cores busy within a ``with`` block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def count_others() -> Iterator[Others]:
    """Measure how busy other programs keep the cores within a ``with`` block."""
    others = Others()
    start_s, all_s, own_s = time.monotonic(), _all_cpu_s(), sum(os.times()[:4])
    yield others
    took_s = (time.monotonic() - start_s) * (os.cpu_count() or 1)
    others.share = (_all_cpu_s() - all_s - (sum(os.times()[:4]) - own_s)) / took_s


def _all_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def _run(dataset: Any, step_s: float, **arguments: Any) -> Timeline:
    next(iter(DataLoader(range(1), num_workers=1)))  # a busy machine starts the first one slowly
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, **arguments)
    for _ in loader:
        time.sleep(step_s)
    return loader.timeline()


def decode(folder: Path) -> Timeline:
    return _run(Samples(lambda index: compute(0.003)), 0.001, num_workers=2)


def collate(folder: Path) -> Timeline:
    samples = Samples(lambda index: compute(0.0002))
    return _run(samples, 0.001, num_workers=2, collate_fn=computing_collate)


def storage(folder: Path) -> Timeline:
    path = folder / "sample.bin"
    path.write_bytes(os.urandom(16384))
    return _run(Samples(ThrottledReads(path, 4e6)), 0.001, num_workers=2)


def transfer(folder: Path) -> Timeline:
    samples = Samples(lambda index: compute(0.0002))
    return _run(samples, 0.001, num_workers=2, device="cpu", finish=copy_slowly)


def slow_worker(folder: Path) -> Timeline:
    return _run(Samples(slow_where_worker_is_one, FEW_SAMPLES), 0.001, num_workers=3)


def step(folder: Path) -> Timeline:
    """Run a step that is long compared with handing over a batch on a busy machine."""
    return _run(Samples(lambda index: compute(0.0002), FEW_SAMPLES), 0.06, num_workers=2)


CASES: dict[str, Callable[[Path], Timeline]] = {
    "decode": decode,
    "collate": collate,
    "storage": storage,
    "transfer": transfer,
    "slow worker": slow_worker,
    "step": step,
}
"""Training loops by the cause that the verdict must name."""
