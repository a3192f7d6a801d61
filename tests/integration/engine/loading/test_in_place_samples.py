"""Workers let a dataset write into the rows of the batch, which changes nothing but the speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import penstock
from penstock import DataLoader

pytestmark = pytest.mark.legacy


class Drawn:
    """Random tensors. The last number of a sample is whether it was written into an offered row.

    Args:
        bad: Index of a sample that writes half of its row and fails.
        wide: Index of a sample with a different shape.
    """

    def __init__(self, bad: int = -1, wide: int = -1) -> None:
        self.bad, self.wide = bad, wide

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return self.read_into(index, ())

    def read_into(self, index: int, rows: Sequence[Any]) -> Any:
        if index == self.wide:
            return torch.full((2, 3000), float(index)), index, 0
        row = rows[0] if rows else None
        tensor = torch.empty(3000) if row is None else torch.from_numpy(row)
        tensor[:1500] = float(penstock.rng().random())
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        tensor[1500:] = float(torch.rand(()))
        return tensor, index, int(row is not None)


class Overridden(Drawn):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def load(dataset: Any, num_workers: int, **keywords: Any) -> list[Any]:
    keywords = {"batch_size": 8, "shuffle": True, "seed": 3, **keywords}
    loader = DataLoader(dataset, num_workers=num_workers, **keywords)
    batches = list(loader)  # all are held, so no slot may be reused
    loader.close()
    return batches


def values(batches: list[Any]) -> list[Any]:
    return [(batch[0].tolist(), batch[1].tolist()) for batch in batches]


def num_placed(batches: list[Any]) -> int:
    return sum(int(batch[2].sum()) for batch in batches)


def test_samples_in_their_rows_are_the_same_bits_as_copied_ones() -> None:
    placed = load(Drawn(), 2)
    copied = load(Overridden(), 2)
    alone = load(Drawn(), 0)
    assert values(placed) == values(copied) == values(alone)
    assert num_placed(placed) >= 48 - 6 * 2, "all but the first of each part"
    assert num_placed(copied) == num_placed(alone) == 0


def test_threads_load_a_run_before_they_write_it_and_so_get_no_rows() -> None:
    batches = load(Drawn(), 2, pool="thread")
    assert values(batches) == values(load(Drawn(), 0))
    assert num_placed(batches) == 0


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_sample_that_fails_in_its_row_leaves_nothing_there(on_error: str) -> None:
    placed = load(Drawn(bad=11), 2, on_error=on_error)
    assert values(placed) == values(load(Overridden(bad=11), 2, on_error=on_error))
    indices = [index for batch in placed for index in batch[1].tolist()]
    assert 11 not in indices
    assert len(indices) == (47 if on_error == "skip" else 48)


def test_samples_of_another_form_are_refused_by_name_as_ever() -> None:
    with pytest.raises(penstock.errors.MismatchedSamples, match="sample 13"):
        load(Drawn(wide=13), 2, shuffle=False)


def test_they_are_kept_apart_where_the_user_collates_them() -> None:
    batches = load(Drawn(wide=13), 2, shuffle=False, collate_fn=list)
    assert [len(batch) for batch in batches] == [8] * 6
    assert batches[1][5][0].shape == (2, 3000)
