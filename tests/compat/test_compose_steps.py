"""Running torchvision's Compose step by step, without modifying it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchvision")

import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from penstock import DataLoader, Tracing

pytestmark = pytest.mark.vision

COUNT = 12


class Images:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.arange(3 * 16 * 16, dtype=torch.uint8).reshape(3, 16, 16)
        result: torch.Tensor = self.transform(image)
        return result


def run(transform: Any, num_workers: int, steps: bool) -> tuple[list[Any], list[str]]:
    loader = DataLoader(
        Images(transform),
        batch_size=4,
        seed=5,
        num_workers=num_workers,
        trace=Tracing(steps=steps),
    )
    batches = [batch.tolist() for batch in loader]
    names = [
        span.name
        for lane in loader.timeline().lanes
        for span in lane.spans
        if span.kind == "transform" and (num_workers == 0 or lane.role == "worker")
    ]
    return batches, names


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_every_transform_is_a_span_and_no_bit_changes(kind: str, num_workers: int) -> None:
    library: Any = v1 if kind == "v1" else v2
    transform = library.Compose([library.RandomHorizontalFlip(), library.RandomCrop(8)])
    steps = list(transform.transforms)
    plain, none = run(transform, 2, steps=False)
    assert none == []
    traced, names = run(transform, num_workers, steps=True)
    assert traced == plain
    assert {"RandomHorizontalFlip", "RandomCrop"} <= set(names)
    assert names.count("RandomCrop") >= COUNT
    assert transform.transforms == steps
    assert repr(transform).startswith("Compose(")


def test_several_inputs_go_through_as_before() -> None:
    from penstock.trace.transform_spans import trace_steps

    trace_steps()
    image, box = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.ones(4)
    both = v2.Compose([v2.Identity(), v2.Identity()])(image, box)
    assert torch.equal(both[0], image)
    assert torch.equal(both[1], box)
