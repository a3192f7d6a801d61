"""Samples of different shapes under the default collate are named in the error, in every pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import DataLoader
from penstock.errors import MismatchedSamples
from support.datasets import QUICK_WAYS, WAYS, Samples, collect

pytestmark = pytest.mark.legacy


def refuse(make: Any, way: str, **arguments: Any) -> Any:
    loader = DataLoader(Samples(make, 32), **{"batch_size": 8, **WAYS[way], **arguments})
    with pytest.raises(MismatchedSamples) as info:
        collect(loader)
    return info.value


@pytest.mark.parametrize("way", QUICK_WAYS)
@pytest.mark.parametrize("odd", [3, 7, 13, 31])
@pytest.mark.parametrize("size", [2, 3000])
def test_index_field_and_shapes_are_named(way: str, odd: int, size: int) -> None:
    error = refuse(lambda i: {"image": torch.zeros(size + (i == odd)), "label": i}, way)
    assert error.sample_index == odd
    assert error.field == "['image']"
    assert f"({size},)" in error.expected
    assert f"({size + 1},)" in error.found
    for part in (f"sample {odd} has", f"({size},)", f"({size + 1},)", "collate_fn"):
        assert part in str(error)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_the_first_batch_is_named_right_although_several_workers_load_it(num_workers: int) -> None:
    for odd in range(1, 8):
        error = refuse(
            lambda i, odd=odd: (torch.zeros(2 + (i == odd)), i),
            "forkserver",
            num_workers=num_workers,
        )
        assert error.sample_index == odd
        assert error.field == "[0]"


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_the_names_are_indices_and_not_places_when_the_order_is_another(way: str) -> None:
    error = refuse(
        lambda i: torch.zeros(3 if i == 20 else 2), way, sampler=[5, 9, 20, 1], batch_size=4
    )
    assert error.sample_index == 20
    assert "sample 5 has" in str(error)


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_the_batches_after_a_ragged_one_still_come(way: str) -> None:
    dataset = Samples(lambda i: torch.zeros(3 if i == 5 else 2), 16)
    iterator = iter(DataLoader(dataset, batch_size=4, **WAYS[way]))
    shapes: list[Any] = []
    for _ in range(4):
        try:
            shapes.append(tuple(next(iterator).shape))
        except MismatchedSamples:
            shapes.append("mismatched")
    assert shapes == [(4, 2), "mismatched", (4, 2), (4, 2)]


@pytest.mark.parametrize("way", QUICK_WAYS)
def test_shapes_that_differ_between_batches_only_are_fine(way: str) -> None:
    loader = DataLoader(Samples(lambda i: torch.zeros(2 + i // 8), 32), batch_size=8, **WAYS[way])
    assert [tuple(batch.shape) for batch in loader] == [(8, 2), (8, 3), (8, 4), (8, 5)]
