"""Hashes the stream of a loader, whole or in pieces, to compare runs bit by bit."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

import penstock

GOLDEN = "a944804c4ae65799"
"""Order and drawn numbers of 3 epochs of :func:`make`.

The value is the same for Python 3.10 to 3.13 and torch 1.13.1 to 2.13. A different value breaks the
reproducibility of published results.
"""
NUM_EPOCHS = 3
WORKERS = (1, 2, 4, 7)
POOLS: dict[str, dict[str, Any]] = {
    "thread": {"pool": "thread"},
    "forkserver": {},
    "spawn": {"multiprocessing_context": "spawn"},
}
PREFETCH = (1, 4)

Make = Callable[..., Any]


class Augmented(Dataset):
    """Sample i is i and an augmentation's draws: integers, and floats as their bits.

    No value passes through a logarithm, so the draws do not depend on the platform.
    """

    def __init__(self, length: int = 60) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        for _ in range(index % 3):  # unequal amounts, so that a leak would shift the next sample
            random.random(), np.random.rand(), torch.rand(1)
        drawn = [
            index,
            random.getrandbits(62),
            random.randrange(1000),
            int(random.random() * 2**53),
            int(np.random.randint(0, 1000)),
            int(np.random.rand() * 2**53),
            int(torch.randint(0, 1000, (1,))),
            int(torch.rand(1).item() * 2**24),
            int(penstock.rng().integers(0, 1000)),
        ]
        return torch.tensor(drawn, dtype=torch.int64)


def make(dataset: Any = None, **arguments: Any) -> Any:
    """Return the loader of the constant. The arguments must not affect its stream."""
    dataset = Augmented() if dataset is None else dataset
    return penstock.DataLoader(dataset, batch_size=7, shuffle=True, seed=11, **arguments)


def numbers_of(batch: Any) -> bytes:
    """Return the bits of a batch with its shape, independent of the byte order."""
    if isinstance(batch, (list, tuple)):
        return b"".join(numbers_of(part) for part in batch)
    array = batch.numpy()
    return str(array.shape).encode() + array.astype(array.dtype.newbyteorder("<")).tobytes()


def hashed(batches: Any) -> str:
    """Return one hash of batches, in order."""
    state = hashlib.sha256()
    for batch in batches:
        state.update(numbers_of(batch))
    return state.hexdigest()[:16]


def whole(loader: Any) -> Iterator[Any]:
    """Yield all epochs of a loader in sequence."""
    for _ in range(NUM_EPOCHS):
        yield from loader


def interrupted(make: Make, ways: Iterator[dict[str, Any]], chance: random.Random) -> Iterator[Any]:
    """Yield the same epochs, killed at random positions and resumed by a new loader each time.

    Args:
        make: Makes a loader.
        ways: The arguments of each of the loaders.
        chance: Chooses the positions.
    """
    loader = make(**next(ways))
    num_over = 0
    while num_over < NUM_EPOCHS:
        batches = iter(loader)
        num_left = chance.randrange(0, len(loader) + 2)
        yield from itertools.islice(batches, num_left)
        state = json.dumps(loader.state_dict())
        kill(batches)
        del batches
        loader.close()
        num_over = json.loads(state)["epoch"]
        loader = make(**next(ways))
        loader.load_state_dict(json.loads(state))


def kill(batches: Any) -> None:
    """Kill the loading processes, as the operating system would."""
    family = {child.pid for child in psutil.Process().children(recursive=True)}
    for worker in getattr(batches, "_workers", ()):
        if worker.pid in family:
            os.kill(worker.pid, signal.SIGKILL)


def grid(pools: tuple[str, ...] = tuple(POOLS)) -> dict[str, dict[str, Any]]:
    """Yield every combination of worker count, pool and prefetch depth."""
    return {
        f"{num_workers} workers, {pool}, prefetch {depth}": {
            "num_workers": num_workers,
            "prefetch_factor": depth,
            **POOLS[pool],
        }
        for pool in pools
        for num_workers in WORKERS
        for depth in PREFETCH
    }


def quick_grid() -> dict[str, dict[str, Any]]:
    """Return half of the combinations without spawn: one prefetch depth for each of the others."""
    ways = grid(("thread", "forkserver"))
    return dict(way for number, way in enumerate(ways.items()) if number % 4 in (0, 3))
