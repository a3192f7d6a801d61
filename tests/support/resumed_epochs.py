"""Epochs that are stopped and resumed at random places, on several ranks and with any workers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import penstock

BATCH_SIZE = 4


class Case(NamedTuple):
    """How an epoch is loaded."""

    num_workers: int
    world_size: int
    is_block_order: bool

    def __str__(self) -> str:
        kind = "blocks" if self.is_block_order else "shuffled"
        return f"{kind}-{self.num_workers}workers-{self.world_size}ranks"


CASES = [
    Case(num_workers, world_size, is_block_order)
    for num_workers, world_size, is_block_order in (
        *((0, 1, False), (0, 3, True), (1, 2, False), (2, 1, True)),
        *((3, 3, False), (4, 1, True), (4, 2, True)),
    )
]
"""0 to 4 workers, 1 to 3 ranks, and both orders."""


def make_loader(dataset: Any, case: Case, rank: int, seed: int, num_workers: int) -> Any:
    keywords: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": num_workers}
    ranks = {"rank": rank, "world_size": case.world_size}
    if case.is_block_order:
        order = dataset.block_order(seed=seed, num_mixed=2, batch_size=BATCH_SIZE, **ranks)
        return penstock.DataLoader(dataset, sampler=order, seed=seed, **keywords)
    return penstock.DataLoader(dataset, shuffle=True, seed=seed, **ranks, **keywords)


def deliver_resumed(
    dataset: Any, case: Case, take: Callable[[Any], list[Any]], seed: int = 0
) -> list[Any]:
    """Load one epoch on every rank, each stopped and resumed at a random batch.

    Args:
        take: Returns the samples of a batch.
    """
    chance = random.Random(seed)
    samples: list[Any] = []
    for rank in range(case.world_size):
        loader = make_loader(dataset, case, rank, seed, case.num_workers)
        stop = chance.randrange(1, len(loader))
        batches = iter(loader)
        for _ in range(stop):
            samples += take(next(batches))
        state = json.dumps(loader.state_dict())
        del batches, loader
        resumed = make_loader(dataset, case, rank, seed, chance.choice([0, case.num_workers]))
        resumed.load_state_dict(json.loads(state))
        for batch in resumed:
            samples += take(batch)
    return samples


def lost_and_doubled(delivered: list[Any], expected: list[Any]) -> tuple[int, int]:
    """Return how many samples were not delivered, and how many were delivered again.

    Example:
        >>> lost_and_doubled([1, 1, 3], expected=[1, 2, 3, 4])
        (2, 1)
    """
    found, wanted = Counter(delivered), Counter(expected)
    return (wanted - found).total(), (found - wanted).total()
