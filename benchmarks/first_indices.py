"""Measures the time and memory of a shuffle until its first batch of indices.

    python benchmarks/first_indices.py NAME LENGTH     prints seconds and megabytes

Run in a fresh process for each measurement, because memory freed by an earlier shuffle would hide
the memory of the next one. NAME is one of SHUFFLES.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
from torch.utils.data import RandomSampler

from penstock.order.samplers import SeededOrder

BATCH_SIZE = 64
SHUFFLES: dict[str, Callable[[int], Iterable[Any]]] = {
    "penstock": lambda length: SeededOrder(length, seed=0),
    "torch": lambda length: RandomSampler(range(length)),
}


def measure(name: str, length: int) -> tuple[float, float]:
    """Return seconds and megabytes from creating the sampler to the first batch of indices."""
    next(iter(SHUFFLES[name](10)))  # warm-up: lazy imports
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    start_s = time.perf_counter()
    indices = iter(SHUFFLES[name](length))
    batch = list(itertools.islice(indices, BATCH_SIZE))
    elapsed_s = time.perf_counter() - start_s
    held_bytes = (
        process.memory_info().rss - before_bytes
    )  # while the iterator is alive, as in an epoch
    if len(set(batch)) != BATCH_SIZE or not all(0 <= index < length for index in batch):
        raise RuntimeError(f"{name} gave wrong indices")
    return elapsed_s, held_bytes / 1e6


if __name__ == "__main__":
    print(*measure(sys.argv[1], int(sys.argv[2])))
