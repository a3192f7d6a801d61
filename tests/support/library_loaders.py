"""Loaders derived from torch's, as in other libraries, defined before any patch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as ImportedBefore

from support.datasets import Draws, collect


class SubclassedBefore(ImportedBefore):
    """A subclass defined before the patch, with attributes whose names Penstock also uses."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.seed, self.rank, self.pool, self.on_error = "mine", "mine", "mine", "mine"
        self._epoch_state = self._bad = self._work = self._options = "mine"


class RepeatSampler:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteLoader(ImportedBefore):
    """Like Ultralytics' loader: one iterator for all epochs, over an infinite batch sampler."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self) -> None:
        self.iterator = self._get_iterator()


class MultiEpochsLoader(ImportedBefore):
    """Like timm's loader: unlocked attributes, a repeating sampler, and its own __iter__."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._DataLoader__initialized = False
        self.batch_sampler = RepeatSampler(self.batch_sampler)  # type: ignore[assignment]
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


def make(cls: Any = ImportedBefore, num_workers: int = 0, **keywords: Any) -> Any:
    keywords = {"batch_size": 5, "shuffle": True, **keywords}
    return cls(Draws(24), num_workers=num_workers, **keywords)


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [batch for _ in range(count) for batch in collect(loader)]


def seeded(num_workers: int, cls: Any = ImportedBefore, **keywords: Any) -> list[Any]:
    torch.manual_seed(3)
    return epochs(make(cls, num_workers, **keywords))


def is_ours(loader: Any) -> bool:
    return type(iter(loader)).__module__.startswith("penstock.")
