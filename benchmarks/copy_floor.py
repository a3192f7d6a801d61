"""Creates the samples of case (a) and copies each once to shared memory, without a loader.

    python benchmarks/copy_floor.py WINDOW_S      prints "ready", waits for a line, prints samples/s

A worker process does at least this. Run by cases.py, one process for each worker.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time

import numpy as np
import torch

from datasets import Pictures
from penstock.engine.memory.shared_file import SharedFile

NUM_ROWS = 3 * 64
"""Three batches: two in flight, as with the loader's prefetch depth, and one held by the user."""


def copy_samples(data: Pictures, window_s: float) -> float:
    """Copy samples to the rows in turn. Returns the samples per second."""
    num_bytes = data[0].numel()
    file = SharedFile.create()
    memory = file.map(file.grow(NUM_ROWS * num_bytes), NUM_ROWS * num_bytes)
    rows = np.frombuffer(memory, np.uint8)
    rows[:] = 0  # touches all pages
    start = rows.ctypes.data
    print("ready", flush=True)
    sys.stdin.readline()
    now = start_s = time.perf_counter()
    for index in itertools.count():
        if index % 64 == 0:
            now = time.perf_counter()
            if now - start_s > window_s:
                break
        sample = data[index]
        place = start + index % NUM_ROWS * num_bytes
        ctypes.memmove(place, sample.data_ptr(), num_bytes)
        del sample  # frees its memory for the next sample, while it is in the cache
    return index / (now - start_s)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in a worker
    print(copy_samples(Pictures(), float(sys.argv[1])))
