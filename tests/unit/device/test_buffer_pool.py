"""Buffers are reused, but never while a reference to them exists."""

from __future__ import annotations

import pickle

import pytest
import torch

from penstock.device.buffer_pool import MAX_KEPT, BufferPool

pytestmark = pytest.mark.legacy

SHAPE = (8, 3, 128, 128)
IMAGES = torch.zeros(SHAPE, dtype=torch.uint8)


def take(pool: BufferPool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pool.empty_like(IMAGES, dtype, torch.preserve_format)


def test_what_was_dropped_is_used_again() -> None:
    pool = BufferPool()
    first = take(pool).data_ptr()
    assert take(pool).data_ptr() == first


@pytest.mark.parametrize("view", ["whole", "row", "numpy", "detached", "slice"])
def test_what_somebody_holds_is_not(view: str) -> None:
    pool = BufferPool()
    tensor = take(pool).fill_(7)
    held = {
        "whole": tensor,
        "row": tensor[3],
        "numpy": tensor.numpy(),
        "detached": tensor.detach().view(-1),
        "slice": tensor[1:5, :, ::2],
    }[view]
    del tensor
    others = [take(pool).fill_(9) for _ in range(2 * MAX_KEPT)]
    assert (torch.as_tensor(held) == 7).all()
    assert len({other.data_ptr() for other in others}) == 2 * MAX_KEPT


def test_no_more_is_kept_than_a_loop_needs() -> None:
    pool = BufferPool()
    held = [take(pool) for _ in range(10)]
    del held
    assert len(pool._buffers) == MAX_KEPT
    small = pool.empty_like(IMAGES[:4], torch.float32, torch.preserve_format)
    assert small.shape == (4, *SHAPE[1:])
    assert len(pool._buffers) <= MAX_KEPT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_tensor_is_as_torch_would_make_it(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    made = BufferPool().empty_like(IMAGES, dtype, memory_format)
    plain = torch.empty_like(IMAGES, dtype=dtype, memory_format=memory_format)
    assert (made.shape, made.stride(), made.dtype) == (plain.shape, plain.stride(), plain.dtype)


def test_it_travels_empty() -> None:
    pool = BufferPool()
    take(pool)
    assert pickle.loads(pickle.dumps(pool))._buffers == []
