"""The two verdicts of ``penstock.verify``. test_comparison.py tests all causes (soak)."""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from support.datasets import Draws


def test_a_loader_with_the_same_bits_is_acquitted_and_another_convicted() -> None:
    def ours(num_workers: int = 0) -> Any:
        return penstock.DataLoader(Draws(20), 5, shuffle=True, seed=1, num_workers=num_workers)

    def theirs(num_workers: int = 0) -> Any:
        random.seed(0)
        return TorchDataLoader(Draws(20), 5, num_workers=num_workers)

    assert penstock.verify(ours, epochs=1)
    verdict = penstock.verify(theirs, epochs=1)
    assert not verdict
    assert verdict.difference is not None
