"""penstock.rng() draws the same numbers in any worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import DataLoader, rng
from support.datasets import WAYS, Samples

pytestmark = pytest.mark.legacy


def ask() -> float:
    return float(rng().random())


@pytest.mark.parametrize("way", ["thread", "forkserver"])
def test_any_number_of_workers_draws_the_same(way: str) -> None:
    def epoch(late: bool, **arguments: Any) -> list[list[float]]:
        torch.manual_seed(0)
        dataset = Samples(lambda i: ask() if i >= 40 or not late else 0.0, 60)
        return [batch.tolist() for batch in DataLoader(dataset, batch_size=5, **arguments)]

    for late in (False, True):
        inline = epoch(late)
        assert len({value for batch in inline for value in batch}) == (21 if late else 60)
        assert epoch(late, **WAYS[way]) == inline


def test_a_collate_fn_has_one_of_its_own() -> None:
    def epoch(num_workers: int) -> list[Any]:
        torch.manual_seed(0)
        dataset = Samples(lambda i: ask(), 12)
        collate = lambda samples: [*samples, ask()]  # noqa: E731
        return list(DataLoader(dataset, 4, collate_fn=collate, num_workers=num_workers))

    alone = epoch(0)
    assert len({value for batch in alone for value in batch}) == 15
    assert epoch(2) == alone
