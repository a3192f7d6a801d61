"""Measures the time until the first batch. Run in a fresh process for each measurement.

    python benchmarks/first_batch.py NAME      prints the seconds; NAME is one of CONTENDERS

The clock starts before the loader is created. At that point, torch and the loader's own modules are
already imported, as in any training script. The main guard is needed because PyTorch's spawned
workers import this file again. For the same reason, Penstock is imported inside a function, so that
those workers do not pay for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch.utils.data

from datasets import Pictures

BATCH_SIZE = 64
NUM_WORKERS = 4
CONTENDERS = ("torch-spawn", "torch-fork", "penstock-cold", "penstock-warm")


def _maker(name: str) -> Callable[[], Any]:
    data: Any = Pictures()
    if name.startswith("torch"):
        return lambda: torch.utils.data.DataLoader(
            data,
            batch_size=BATCH_SIZE,
            num_workers=NUM_WORKERS,
            multiprocessing_context=name.removeprefix("torch-"),
        )
    from penstock.loader import DataLoader

    return lambda: DataLoader(data, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS)


def measure(name: str) -> float:
    """Return the seconds from creating the loader to its first batch."""
    make = _maker(name)
    if name == "penstock-warm":
        next(iter(make()))  # an earlier loader of the program starts the fork server
    start_s = time.perf_counter()
    batches = iter(make())
    batch = next(batches)
    elapsed_s = time.perf_counter() - start_s
    if batch[:, 0, 0, 0].tolist() != [index % 256 for index in range(BATCH_SIZE)]:
        raise RuntimeError(f"{name} delivered wrong data")
    return elapsed_s


if __name__ == "__main__":
    print(measure(sys.argv[1]))
