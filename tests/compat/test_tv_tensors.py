"""Batches of torchvision's tensor classes match those of torch's default_collate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from penstock import DataLoader
from support.collate_cases import compare, outcomes
from support.datasets import WAYS, Samples

pytestmark = pytest.mark.vision
tv_tensors = pytest.importorskip("torchvision.tv_tensors")

ROWS = 4


def boxes(row: int, size: int) -> Any:
    corners = torch.arange(size * 4).reshape(size, 4) + row
    return tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(9, 9))


KINDS: dict[str, Any] = {
    "images": lambda row, size: tv_tensors.Image(torch.full((3, size, 4), row / 7)),
    "masks": lambda row, size: tv_tensors.Mask(torch.full((size, 16), row)),
    "boxes": boxes,
}


@pytest.mark.parametrize("special", [range(ROWS), [0], [2], [3]], ids=str)
@pytest.mark.parametrize("size", [2, 600])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["inline", "thread", "fork"])
def test_a_batch_is_torch_s(way: str, name: str, size: int, special: Any) -> None:
    def make(row: int) -> Any:
        value = KINDS[name](row, size)
        return value if row in special else value.as_subclass(torch.Tensor)

    (ours,) = outcomes(DataLoader(Samples(make, ROWS), batch_size=ROWS, **WAYS[way]))
    assert not compare(ours, default_collate([make(row) for row in range(ROWS)]))


@pytest.mark.parametrize("name", KINDS)
def test_a_result_of_a_collate_fn_keeps_its_class_and_attributes(name: str) -> None:
    def make(row: int) -> Any:
        return KINDS[name](row, 600)

    loader = DataLoader(Samples(make, ROWS), batch_size=ROWS, collate_fn=list, **WAYS["fork"])
    (ours,) = outcomes(loader)
    assert not compare(ours, [make(row) for row in range(ROWS)])
    assert [vars(one) for one in ours] == [vars(make(row)) for row in range(ROWS)]


def test_a_lost_class_would_be_noticed() -> None:
    """Control for the comparison."""
    image = KINDS["images"](1, 2)
    assert compare(image.as_subclass(torch.Tensor), image)
