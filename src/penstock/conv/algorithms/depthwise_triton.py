"""One channel for each group by Triton: a lane for each element.

Error: sums in float32, rounded once. Memory beside inputs and results: none, but for the weight
gradient, which takes ``parts * C * taps`` sums in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from penstock.conv.algorithms.implicit_gemm import Ready, Strides
from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.split_reduction import Split
from penstock.conv.algorithms.triton_launch import Launch, empty, four, power, two
from penstock.conv.geometry import Geometry

LANES = 256
TILE = 2048
"""Elements of a tile of places and channels."""
CELLS = 4096
"""Sums that a program of a weight gradient holds."""


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    from penstock.conv.algorithms import depthwise_kernels

    return depthwise_kernels


def can(g: Geometry, dtype: torch.dtype) -> bool:
    """One output for each channel, and a kernel small enough to be unrolled."""
    return can_gather(g, dtype) and g.is_depthwise and g.group_out == 1 and g.num_taps <= 64


def _steps(g: Geometry) -> tuple[int, ...]:
    return (*two(g.stride, 1), *two(g.dilation, 1), *two(g.padding, 0))


def _fitting(channels: int) -> int:
    """Channels of a tile: many, and few beyond the last."""
    return min((64, 32, 16), key=lambda block: (-(-channels // block) * block, -block))


@functools.lru_cache(maxsize=4096)
def _prepare(
    g: Geometry, dtype: torch.dtype, device: torch.device, seen: Strides, is_forward: bool
) -> Ready:
    size, other = (g.out_size, g.in_size) if is_forward else (g.in_size, g.out_size)
    make = empty(g, g.in_channels, size, dtype)
    like = make(torch.empty(0, device="meta"))
    high, wide = two(g.kernel, 1)
    shapes = (g.in_channels, *two(size, 1), *two(other, 1), *_steps(g))
    strides = (*four(seen), *four(like.stride()))
    taps = {"R": high, "S": wide}
    if g.is_channels_last:
        rows, block_c = like.numel() // g.in_channels, _fitting(g.in_channels)
        block_m = TILE // block_c
        launch = Launch(
            _kernels().depthwise_tile,
            (-(-rows // block_m), -(-g.in_channels // block_c)),
            (rows, *shapes, *strides),
            {**taps, "IS_FORWARD": is_forward, "BLOCK_M": block_m, "BLOCK_C": block_c},
        )
    else:
        kernel = _kernels().depthwise_forward if is_forward else _kernels().depthwise_input_gradient
        launch = Launch(
            kernel,
            (-(-like.numel() // LANES),),
            (like.numel(), *shapes, *strides),
            {**taps, "IS_LAST": False, "BLOCK": LANES},
        )

    def run(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = make(a)
        launch(a, w.contiguous(), result)
        return result

    return run


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``y``, each element by one lane."""
    return _prepare(g, x.dtype, x.device, x.stride(), is_forward=True)(x, w)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``dx``, each element by one lane."""
    return _prepare(g, dy.dtype, dy.device, dy.stride(), is_forward=False)(dy, w)


@functools.lru_cache(maxsize=4096)
def _prepare_weight_gradient(
    g: Geometry, dtype: torch.dtype, device: torch.device, x: Strides, dy: Strides
) -> Ready:
    high, wide = two(g.kernel, 1)
    rows, taps = g.batch * g.num_positions, power(wide)
    cells = max(64, CELLS // taps)
    block_c = min(32, _fitting(g.in_channels)) if g.is_channels_last else 1
    block_m = max(1, cells // block_c)
    blocks = -(-g.in_channels // block_c)
    split = Split.of(rows, blocks * high, block_m, 4 * g.in_channels * g.num_taps)
    launch = Launch(
        _kernels().depthwise_weight_gradient,
        (blocks, split.num, high),
        (
            *(rows, split.size, g.in_channels, *two(g.out_size, 1), *two(g.in_size, 1)),
            *(*_steps(g), *four(x), *four(dy)),
        ),
        {
            "S": wide,
            "NUM_TAPS": g.num_taps,
            "TAPS": taps,
            "BLOCK_M": block_m,
            "BLOCK_C": block_c,
        },
        num_warps=4,
    )
    collect = split.collect(g, dtype)

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        partial = split.room(g.in_channels * g.num_taps, x.device)
        launch(x, dy, partial)
        return collect(partial)

    return run


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """``dw``: some parts of the places, all taps at once, then their sum."""
    return _prepare_weight_gradient(g, x.dtype, x.device, x.stride(), dy.stride())(x, dy)
