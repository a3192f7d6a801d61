"""Measures the memory of a parent and its workers after an epoch. Run in a fresh process.

    python benchmarks/memory_case.py DATA CONTENDER LENGTH full|empty     prints one line of JSON

DATA is "strings" or "array" (4 KiB per sample). CONTENDER is one of CONTENDERS. "empty" runs an
epoch of the same length without data, to measure the memory of everything else. The main guard is
needed because PyTorch's spawned workers import this file again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import psutil
import torch.utils.data

BATCH_SIZE = 1024
NUM_WORKERS = 4
ROW_BYTES = 4096
CONTENDERS = {
    "torch-fork": ("torch", "fork"),
    "torch-spawn": ("torch", "spawn"),
    "torch-spawn-shared-list": ("torch", "spawn"),
    "penstock-fork-server": ("penstock", None),
    "penstock-spawn": ("penstock", "spawn"),
    "penstock-fork-server-plain-list": ("penstock", None),
    "penstock-fork-server-one-copy": ("penstock", None),
}


class Strings:
    """Sample i is the length of string i."""

    def __init__(self, names: Any, length: int) -> None:
        self.names = names
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return len(self.names[index]) if self.names is not None else 0


class Rows:
    """Sample i is the sum of row i, or of the same row each time if there is no data."""

    def __init__(self, rows: np.ndarray, length: int) -> None:
        self.rows = rows
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index if len(self.rows) > 1 else 0].sum())


def name_of(number: int) -> str:
    return f"train/n{number % 1000:08d}/image-{number:09d}.JPEG"


def make_dataset(data: str, contender: str, length: int, is_empty: bool) -> tuple[Any, int, int]:
    """Return the dataset, the bytes of one flat copy of it, and the sum of one epoch."""
    if data == "array":
        rows = np.ones((1 if is_empty else length, ROW_BYTES), np.uint8)
        return Rows(rows, length), rows.nbytes, length * ROW_BYTES
    if is_empty:
        return Strings(None, length), 0, 0
    num_characters = length * len(name_of(0))
    names: Any = (name_of(number) for number in range(length))
    if contender in ("torch-fork", "torch-spawn", "penstock-fork-server-plain-list"):
        return Strings(list(names), length), num_characters + 8 * (length + 1), num_characters
    from penstock import SharedList

    shared = SharedList(names)
    return Strings(shared, length), shared.nbytes, num_characters


def family_pss() -> int:
    """Return the PSS of this process and its descendants. Shared pages count once."""
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_full_info().pss for member in family)


def measure(data: str, contender: str, length: int, is_empty: bool) -> dict[str, float]:
    """Run one shuffled epoch with persistent workers, then measure the memory."""
    loader_name, method = CONTENDERS[contender]
    make: Any = torch.utils.data.DataLoader
    if loader_name == "penstock":
        from penstock.loader import DataLoader as make
    if contender.endswith("one-copy"):
        os.environ["PENSTOCK_SHARE_ARRAYS"] = "1"
    start_s = time.perf_counter()
    dataset, one_copy, expected = make_dataset(data, contender, length, is_empty)
    made_s = time.perf_counter()
    loader = make(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        multiprocessing_context=method,
    )
    batches = iter(loader)
    total = int(next(batches).sum())
    first_s = time.perf_counter()
    total += sum(int(batch.sum()) for batch in batches)
    end_s = time.perf_counter()
    if total != expected:
        raise RuntimeError(f"{contender} delivered wrong data: {total} is not {expected}")
    return {
        "make_s": made_s - start_s,
        "first_batch_s": first_s - made_s,
        "epoch_s": end_s - made_s,
        "pss_bytes": family_pss(),
        "one_copy_bytes": one_copy,
    }


if __name__ == "__main__":
    _, chosen_data, chosen, chosen_length, content = sys.argv
    print(json.dumps(measure(chosen_data, chosen, int(chosen_length), content == "empty")))
