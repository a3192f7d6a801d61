"""default_collate inside a user's collate_fn stacks directly into the slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from penstock.engine.loading import slot_collate
from penstock.engine.loading.default_collate import STANDARD_COLLATORS
from support.datasets import assert_same

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Install the patch as in a worker, and remove it after the test."""
    before = torch_collate.default_collate_fn_map[torch.Tensor]
    slot_collate.install_slot_collate()
    yield
    torch_collate.default_collate_fn_map[torch.Tensor] = before
    STANDARD_COLLATORS[torch.Tensor] = before


def collate_into(allocator: slot_collate.SlotAllocator, samples: list[Any]) -> Any:
    with slot_collate.collating_into(allocator):
        return default_collate(samples)


def lies_in(tensor: torch.Tensor, buffer: np.ndarray) -> bool:
    start = buffer.ctypes.data
    return start <= tensor.data_ptr() < start + buffer.nbytes


SAMPLES = [{"x": torch.full((3, 4), float(n)), "y": (torch.tensor(n), n)} for n in range(5)]


def test_tensors_lie_in_the_slot_and_equal_torch_s() -> None:
    buffer = np.zeros(1 << 16, np.uint8)
    allocator = slot_collate.SlotAllocator(buffer)
    batch = collate_into(allocator, SAMPLES)
    assert lies_in(batch["x"], buffer)
    assert lies_in(batch["y"][0], buffer)
    assert allocator.used > 0
    assert_same(batch, default_collate(SAMPLES))  # outside a slot: torch's own memory


def test_outside_of_a_collate_fn_nothing_lies_in_the_slot() -> None:
    buffer = np.zeros(1 << 16, np.uint8)
    collate_into(slot_collate.SlotAllocator(buffer), SAMPLES)
    assert not lies_in(default_collate(SAMPLES)["x"], buffer)


def test_what_does_not_fit_any_more_lies_in_memory_of_its_own() -> None:
    buffer = np.zeros(256, np.uint8)
    allocator = slot_collate.SlotAllocator(buffer)
    small = [torch.ones(8) for _ in range(4)]  # 128 bytes
    first, second, third = (collate_into(allocator, small) for _ in range(3))
    assert lies_in(first, buffer)
    assert lies_in(second, buffer)
    assert not lies_in(third, buffer)
    assert_same(third, torch.ones(4, 8))


def test_two_batches_in_one_slot_do_not_overlap() -> None:
    allocator = slot_collate.SlotAllocator(np.zeros(1 << 16, np.uint8))
    first = collate_into(allocator, [torch.ones(3), torch.ones(3)])
    second = collate_into(allocator, [torch.zeros(3), torch.zeros(3)])
    assert first.sum() == 6
    assert second.sum() == 0


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(2, dtype=torch.float64)],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
        [torch.ones(2), torch.ones(2, requires_grad=True)],
        [torch.zeros(0), torch.zeros(0)],
        [torch.ones(2, dtype=torch.bfloat16)] * 2,
    ],
    ids=["two dtypes", "gradients first", "gradients later", "no element", "bfloat16"],
)
def test_odd_lists_give_what_torch_gives(samples: list[torch.Tensor]) -> None:
    allocator = slot_collate.SlotAllocator(np.zeros(1 << 16, np.uint8))
    assert_same(collate_into(allocator, samples), torch.stack(samples))


def test_samples_of_different_shapes_raise_what_torch_raises() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        collate_into(
            slot_collate.SlotAllocator(np.zeros(1 << 16, np.uint8)), [torch.ones(2), torch.ones(3)]
        )


def test_an_error_inside_leaves_the_next_batch_unharmed() -> None:
    buffer = np.zeros(1 << 16, np.uint8)
    allocator = slot_collate.SlotAllocator(buffer)
    with pytest.raises(RuntimeError):
        collate_into(allocator, [torch.ones(2), torch.ones(3)])
    assert not lies_in(default_collate([torch.ones(2)]), buffer)
