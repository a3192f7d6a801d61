"""One run of a loader without workers, hashed, captured, delayed and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from penstock.verify import hashed_run
from penstock.verify.hashed_run import CannotDelay, Extent, capture_batch, run_and_hash
from penstock.verify.settings import Setting

pytestmark = pytest.mark.legacy

PLAIN = Setting(name="as it is")


class Resumable:
    """A loader of numbers that counts those it has delivered."""

    seed = 0
    made: list[Resumable] = []  # noqa: RUF012 - all loaders of a test

    def __init__(self) -> None:
        self.place = 0
        self.is_closed = False
        self.made.append(self)

    def __iter__(self) -> Iterator[Any]:
        while self.place < 6:
            self.place += 1
            yield np.array([self.place])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def close(self) -> None:
        self.is_closed = True


def draws() -> DataLoader[Any]:
    return DataLoader([0, 1, 2, 3], collate_fn=lambda items: (items, random.random()))


def test_every_run_starts_from_the_same_generators_and_puts_them_back() -> None:
    random.seed(5)
    state = random.getstate()
    first, second = (run_and_hash(draws, PLAIN, Extent()) for _ in range(2))
    assert first.digest == second.digest
    assert (first.num_batches, len(first.epochs)) == (8, 2)
    assert run_and_hash(draws, PLAIN, Extent(seed=1)).digest != first.digest
    assert random.getstate() == state


def test_a_run_is_cut_after_some_batches_and_an_iterator_has_one_epoch() -> None:
    assert run_and_hash(draws, PLAIN, Extent(max_batches=3)).num_batches == 6
    assert run_and_hash(lambda: iter([1, 2]), PLAIN, Extent()).num_batches == 2


def test_a_batch_is_captured_as_its_samples() -> None:
    def make() -> Any:
        return DataLoader(range(6), batch_size=2)

    captured = capture_batch(make, PLAIN, Extent(), (1, 2))
    assert [int(sample) for sample in captured] == [4, 5]
    assert capture_batch(make, PLAIN, Extent(), (0, 9)) is None


def test_a_resumed_run_gives_the_rest_in_another_loader() -> None:
    Resumable.made.clear()
    whole = run_and_hash(Resumable, PLAIN, Extent())
    resumed = Setting(name="resumed", resumed_with={})
    assert run_and_hash(Resumable, resumed, Extent(stops=(2, 4))).epochs == whole.epochs
    assert len(Resumable.made) == 1 + 3
    assert all(loader.is_closed for loader in Resumable.made)


def test_samples_are_delayed_where_they_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(hashed_run.time, "sleep", slept.append)
    delayed = Setting(name="slow samples", delays="samples")

    def make() -> Any:
        return DataLoader(torch.arange(6), batch_size=2)

    assert (
        run_and_hash(make, delayed, Extent()).epochs == run_and_hash(make, PLAIN, Extent()).epochs
    )
    assert len(slept) == 12
    with pytest.raises(CannotDelay):
        run_and_hash(lambda: [1, 2], delayed, Extent())
