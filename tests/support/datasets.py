"""Datasets, samples and comparisons that many tests share.

Workers can import everything here, like a user's own module.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    label: Any


# -- datasets --------------------------------------------------------------------------------------


class Numbers(Dataset):
    """Sample i is a tensor filled with i, and i itself."""

    def __init__(self, length: int = 20, shape: tuple[int, ...] = (3,)) -> None:
        self.length = length
        self.shape = shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full(self.shape, float(index)), int(index)


class Samples(Dataset):
    """Sample i is ``make(i)``. The function can be a lambda or a closure."""

    def __init__(self, make: Callable[[int], Any], length: int = 16) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Draws(Dataset):
    """Sample i is drawn from the three global generators, like an augmentation without image."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return draw(index)


def draw(index: int) -> tuple[Any, ...]:
    for _ in range(index % 3):  # unequal amounts, so that a leak would shift the next sample
        random.random(), np.random.rand(), torch.rand(1)
    return (
        index,
        random.random(),
        random.gauss(0.0, 1.0),
        np.random.standard_normal(3),
        torch.rand(2),
    )


class Batched(Dataset):
    """Provides ``__getitems__`` only. Indexing single samples fails."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ should have been used")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(torch.full((2,), float(index)), index) for index in indices]


class Shards(IterableDataset):
    """Numbers from 0 on. Each worker yields its own share."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __repr__(self) -> str:
        return f"Shards({self.length})"

    def __iter__(self) -> Any:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([torch.tensor(number) for number in range(start, self.length, step)])


class Unequal(IterableDataset):
    """Worker k yields 3 * (k + 1) numbers, so shards end at different times."""

    def __repr__(self) -> str:
        return "Unequal()"

    def __iter__(self) -> Any:
        info = get_worker_info()
        number = 0 if info is None else info.id
        return iter([torch.tensor([number, place]) for place in range(3 * (number + 1))])


class Slow(Dataset):
    """Each sample takes ``sample_s``. Index ``stuck`` takes far longer."""

    def __init__(
        self, length: int = 64, sample_s: float = 0.0, stuck: int = -1, stuck_s: float = 60.0
    ) -> None:
        self.stuck_s = stuck_s
        self.length = length
        self.sample_s = sample_s
        self.stuck = stuck

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.stuck_s if index == self.stuck else self.sample_s)
        return int(index)


class Whereabouts(Dataset):
    """Sample i describes the process that loads it and its environment."""

    def __init__(self, variable: str = "HOME", length: int = 8) -> None:
        self.variable = variable
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "value": os.environ.get(self.variable, ""),
            "folder": os.getcwd(),
            "zeros": torch.zeros(1),
        }


# -- comparing -------------------------------------------------------------------------------------


def differences(ours: Any, theirs: Any, path: str = "batch") -> list[str]:
    """List the differences of two values: class, dtype, shape, bits, nesting."""
    if type(ours) is not type(theirs):
        return [f"{path}: {type(ours).__qualname__} is not {type(theirs).__qualname__}"]
    if isinstance(ours, torch.Tensor):
        return _tensor_differences(ours, theirs, path)
    if isinstance(ours, np.ndarray):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if not same or ours.tobytes() != theirs.tobytes():
            return [f"{path}: {ours!r} is not {theirs!r}"]
        return []
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{path}: keys {list(ours)} are not {list(theirs)}"]
        pairs = [(f"{path}[{key!r}]", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} items are not {len(theirs)}"]
        pairs = [(f"{path}[{n}]", a, b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif dataclasses.is_dataclass(ours):
        names = [field.name for field in dataclasses.fields(ours)]
        pairs = [(f"{path}.{n}", getattr(ours, n), getattr(theirs, n)) for n in names]
    else:
        same = ours == theirs or (isinstance(ours, float) and math.isnan(ours) and ours != theirs)
        return [] if same else [f"{path}: {ours!r} is not {theirs!r}"]
    return [line for where, a, b in pairs for line in differences(a, b, where)]


def _tensor_differences(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> list[str]:
    for name in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(ours, name) != getattr(theirs, name):
            return [f"{path}.{name}: {getattr(ours, name)} is not {getattr(theirs, name)}"]
    if ours.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    mine, other = (_raw(tensor) for tensor in (ours, theirs))
    return [] if mine == other else [f"{path}: {ours} is not {theirs}"]


def _raw(tensor: torch.Tensor) -> bytes:
    """Return the bits, so that NaN equals itself and -0.0 differs from 0.0."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(ours: Any, theirs: Any) -> None:
    """Fail with the location unless both have the same bits and classes."""
    found = differences(ours, theirs)
    assert not found, "\n".join(found[:10])


def snapshot(value: Any) -> Any:
    """Return a copy that shares no memory with ``value``."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(snapshot, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(snapshot, value))
    return value


def collect(loader: Any) -> list[Any]:
    """Return all batches, each copied on arrival, as seen by a loop that keeps no batch."""
    return [snapshot(batch) for batch in loader]


# -- ways of loading -------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "pool": "thread"},
    "forkserver": {"num_workers": 2},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}
QUICK_WAYS = ["inline", "thread", "forkserver", "fork"]
"""Spawn starts an interpreter per worker (2 to 4 s), so only a few tests use it, with one worker.

Tests with two spawned workers are in test_same_bits.py, test_without_posix.py and test_starved.py.
"""
WORKER_WAYS = ["thread", "forkserver", "fork"]
PROCESS_WAYS = ["forkserver", "fork"]
