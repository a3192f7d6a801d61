"""GPU measurements: rates, times between events, and utilization."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from measure import Pace

busy_percent: dict[str, list[float]] = {}
"""Utilization reported by nvidia-smi, by contender."""


def rate_of(call: Callable[[], Any], pace: Pace, watched: str | None = None) -> float:
    """Return calls per second, including the GPU's work. With a name, also run nvidia-smi."""
    with _watched(watched) as begin:
        call()  # start-up is not measured
        run_for(call, max(1.0, pace.warm_up_s))
        torch.cuda.synchronize()
        begin()
        start_s = time.perf_counter()
        count = run_for(call, max(pace.window_s, 0.5) * 2)
        torch.cuda.synchronize()
        return count / (time.perf_counter() - start_s)


def run_for(call: Callable[[], Any], limit_s: float) -> int:
    count, until_s = 0, time.perf_counter() + limit_s
    while time.perf_counter() < until_s:
        call()
        count += 1
    return count


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@contextmanager
def fresh() -> Iterator[None]:
    """Hide CUDA tensors from the garbage collector of PyTorch's forked workers.

    A forked worker that collects a CUDA tensor dies.
    """
    gc.collect()
    torch.cuda.empty_cache()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


@contextmanager
def _watched(name: str | None) -> Iterator[Callable[[], None]]:
    """Record nvidia-smi's utilization, starting when the yielded function is called."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as said:
        sizes = [0]
        try:
            process = subprocess.Popen([*command, "-lms", "100"], stdout=said) if name else None
        except OSError:
            process = None
        try:
            yield lambda: sizes.append(os.fstat(said.fileno()).st_size)
        finally:
            if process:
                process.terminate()
                process.wait(timeout=10)
        said.seek(sizes[-1])
        seen = [float(line) for line in said.read().split() if line.isdecimal()]
    if name and seen:
        busy_percent.setdefault(name, []).append(statistics.mean(seen))


def timed(call: Callable[[], Any], count: int) -> float:
    """Return the seconds of a call on the GPU, between two events."""
    for _ in range(20):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()  # type: ignore[no-untyped-call]
    for _ in range(count):
        call()
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count  # type: ignore[no-untyped-call]
