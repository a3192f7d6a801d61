"""Measures the time to the next batch after resuming in the middle of a huge epoch.

    python benchmarks/first_resumed.py NAME WORKERS save FILE     loads half an epoch, saves the
                                                                  state and the next batch
    python benchmarks/first_resumed.py NAME WORKERS resume FILE   prints the seconds

Each command is a separate process. The clock runs from creating the loader to its first batch,
which must equal the saved one. NAME is one of MAKERS. "torch" has no state, so it loads the batches
that it skips.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, RandomSampler

from penstock import DataLoader

LENGTH, BATCH_SIZE = 20_000_000, 64
NUM_SKIPPED = 10_000_000 // BATCH_SIZE


class Tiny(Dataset):  # type: ignore[type-arg]
    """Samples that take no time, so that only the time to reach them is measured."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def make_penstock(num_workers: int, length: int = LENGTH) -> Any:
    return DataLoader(Tiny(length), BATCH_SIZE, shuffle=True, seed=0, num_workers=num_workers)


def make_stateful(num_workers: int, length: int = LENGTH) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Tiny(length), BATCH_SIZE, shuffle=True, num_workers=num_workers)


def make_torch(num_workers: int, length: int = LENGTH) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = Tiny(length)
    sampler = RandomSampler(data, generator=generator)
    return TorchDataLoader(data, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


MAKERS = {"penstock": make_penstock, "StatefulDataLoader": make_stateful, "torch": make_torch}


def save(name: str, num_workers: int, path: Path) -> None:
    """Load half of the epoch. Save the state and the next batch."""
    torch.manual_seed(0)
    loader = MAKERS[name](num_workers)
    batches = iter(loader)
    deque(itertools.islice(batches, NUM_SKIPPED), maxlen=0)
    state = loader.state_dict() if name != "torch" else None
    path.write_bytes(pickle.dumps((state, next(batches).tolist())))


def resume(name: str, num_workers: int, path: Path) -> float:
    """Return the seconds until the next batch."""
    state, expected = pickle.loads(path.read_bytes())
    next(
        iter(MAKERS[name](num_workers, 1000))
    )  # warm-up: lazy imports, and processes started on first use
    start_s = time.perf_counter()
    loader = MAKERS[name](num_workers)
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    if state is None:
        deque(itertools.islice(batches, NUM_SKIPPED), maxlen=0)
    batch = next(batches).tolist()
    elapsed_s = time.perf_counter() - start_s
    if batch != expected:
        raise RuntimeError(f"{name} resumed with a wrong batch")
    return elapsed_s


if __name__ == "__main__":
    name, num_workers, verb, file = sys.argv[1:]
    if verb == "save":
        save(name, int(num_workers), Path(file))
    else:
        print(resume(name, int(num_workers), Path(file)))
