"""Caches of samples that draw, below samples that draw, while workers are killed.

A replacement worker finds cached results of the killed worker. Later draws must be the same as
in a run without kills.
"""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import DataLoader, cached

pytestmark = pytest.mark.fault

LENGTH = 40
DRAWS: dict[str, Callable[[Any], float]] = {
    "python": lambda source: random.random(),
    "normal": lambda source: random.gauss(0, 1),
    "numpy": lambda source: float(np.random.rand()),
    "torch": lambda source: float(torch.rand(())),
    "rng": lambda source: float(penstock.rng().random()),
    "own": lambda source: float(source.rng.random()),
}
Cache = Callable[[Any, Path], Any]


class Drawn:
    """Samples that draw from the generators named in ``program``, in that order."""

    def __init__(self, program: list[str]) -> None:
        self.program = program
        self.rng = np.random.default_rng(0) if "own" in program else None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index, *(DRAWS[name](self) for name in self.program)])


class Read(Drawn):
    """Samples that also read the ``below`` datasets, at the same or a different index.

    Args:
        traps: Folder of files named after samples. A worker that loads a sample with a file removes
            the file and is killed.
    """

    def __init__(self, program: list[str], below: list[Any], traps: Path | None = None) -> None:
        super().__init__(program)
        self.below, self.traps = below, traps

    def __getitem__(self, index: int) -> np.ndarray:
        values = [super().__getitem__(index)]
        for number, dataset in enumerate(self.below):
            values += [dataset[(index + 7 * number) % LENGTH], super().__getitem__(index)]
        if self.traps is not None and (self.traps / str(index)).exists():
            (self.traps / str(index)).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.concatenate(values)


def naively_cached(dataset: Any, folder: Path) -> Any:
    """A typical cache, as a control. Its draws depend on which worker computes a sample."""
    folder.mkdir()

    class Naive:
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> np.ndarray:
            file = folder / f"{index}.npy"
            if not file.exists():
                part = folder / f"part-{os.getpid()}.npy"
                np.save(part, dataset[index])
                part.rename(file)
            return np.load(file)

    return Naive()


def one_cache(traps: Path, folder: Path, cache: Cache) -> Any:
    return Read(["python"], [cache(Drawn(["python"]), folder / "only")], traps)


def random_caches(traps: Path, folder: Path, cache: Cache, number: int) -> Any:
    """One to three caches, some nested, and programs that draw from any generator."""
    choose = random.Random(number)

    def program() -> list[str]:
        return choose.choices(list(DRAWS), k=choose.randint(0, 3))

    below: list[Any] = []
    for place in range(choose.randint(1, 3)):
        inside = choose.sample(below, choose.randint(0, len(below)))
        source = Read(program(), inside) if inside else Drawn(program())
        below.append(cache(source, folder / f"cache-{place}"))
    return Read([*program(), "python"], below, traps)


def epochs(
    make: Any, folder: Path, kills: list[int], cache: Cache = cached, **keywords: Any
) -> Any:
    """Return the batches of two epochs and the number of replaced workers."""
    folder.mkdir()
    traps = folder / "traps"
    traps.mkdir()
    for index in kills:
        (traps / str(index)).touch()
    loader = DataLoader(make(traps, folder, cache), batch_size=4, seed=0, shuffle=True, **keywords)
    batches = [batch.tolist() for _ in range(2) for batch in loader]
    return batches, loader.num_restarts


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_killed_worker_changes_no_bit_behind_a_cache(tmp_path: Path) -> None:
    calm, _ = epochs(one_cache, tmp_path / "calm", [], num_workers=2)
    killed, num_restarts = epochs(one_cache, tmp_path / "killed", [5, 21], num_workers=2)
    assert num_restarts > 0
    assert killed == calm
    assert epochs(one_cache, tmp_path / "inline", [])[0] == calm


@pytest.mark.filterwarnings("ignore:a sample that was loaded twice")
def test_it_does_behind_a_cache_that_leaves_the_generators_to_who_computes(tmp_path: Path) -> None:
    calm, _ = epochs(one_cache, tmp_path / "calm", [], naively_cached, num_workers=2)
    killed, _ = epochs(one_cache, tmp_path / "killed", [5, 21], naively_cached, num_workers=2)
    assert killed != calm


@pytest.mark.parametrize("number", range(6))
def test_random_caches_give_the_same_bits_with_and_without_kills(
    number: int, tmp_path: Path
) -> None:
    def make(traps: Path, folder: Path, cache: Cache) -> Any:
        return random_caches(traps, folder, cache, number)

    kills = random.Random(number).sample(range(LENGTH), 3)
    inline, _ = epochs(make, tmp_path / "inline", [])
    killed, num_restarts = epochs(make, tmp_path / "killed", kills, num_workers=2)
    assert num_restarts > 0
    assert killed == inline
    threads, _ = epochs(make, tmp_path / "threads", [], num_workers=2, pool="thread")
    assert threads == inline
