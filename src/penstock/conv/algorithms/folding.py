"""Input gradients with few channels by Triton: one product, then one collecting.

For the first layer of a network, where the columns' gradients are smaller than what phases read.

Error: a product of ``O`` terms as torch's matrix product sums them, rounded to the type; then sums
over the taps in float32, rounded once more.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from math import prod
from typing import Any

import torch

from penstock.conv.algorithms.implicit_gemm import Ready
from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, empty, four, two
from penstock.conv.geometry import Geometry


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    from penstock.conv.algorithms import fold_kernels

    return fold_kernels


def can(g: Geometry, dtype: torch.dtype) -> bool:
    """One group, and a kernel small enough to be unrolled."""
    return can_gather(g, dtype) and g.groups == 1 and g.num_taps <= 64


@functools.lru_cache(maxsize=4096)
def _prepare_fold(g: Geometry, dtype: torch.dtype, device: torch.device) -> Ready:
    make = empty(g, g.in_channels, g.in_size, dtype)
    high, wide = two(g.kernel, 1)
    depth, places = g.in_channels * g.num_taps, g.num_positions
    cells = (places * depth, 1, depth) if g.is_channels_last else (depth * places, places, 1)
    num = g.batch * g.in_channels * prod(g.in_size)
    launch = Launch(
        _kernels().fold,
        (-(-num // 256),),
        (
            *(num, g.in_channels, *two(g.in_size, 1), *two(g.out_size, 1)),
            *(*two(g.stride, 1), *two(g.dilation, 1), *two(g.padding, 0)),
            *(*cells, *four(make(torch.empty(0, device="meta")).stride())),
        ),
        {"R": high, "S": wide, "IS_LAST": g.is_channels_last, "BLOCK": 256},
    )

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        matrix = w.reshape(g.out_channels, depth)
        if g.is_channels_last:
            errors = dy.movedim(1, -1).reshape(g.batch * places, g.out_channels)
            given = torch.mm(errors, matrix)
        else:
            errors = dy.reshape(g.batch, g.out_channels, places)
            given = torch.bmm(matrix.t().expand(g.batch, -1, -1), errors)
        dx = make(dy)
        launch(given, dx)
        return dx

    return run


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dx`` for few input channels: what every tap gives by one product, then one collecting.

    Memory beside inputs and results: ``C * taps`` elements for each place of ``dy``, for as many
    samples as the cap allows. Half types are rounded once more, before they are collected.
    """
    sample_bytes = g.in_channels * g.num_taps * g.num_positions * dy.element_size()
    step = max(1, cap_bytes // sample_bytes)
    if step >= g.batch:
        return _prepare_fold(g, dy.dtype, dy.device)(dy, w)
    dx = empty(g, g.in_channels, g.in_size, dy.dtype)(dy)
    for start in range(0, g.batch, step):
        part = dy[start : start + step]
        fold = _prepare_fold(replace(g, batch=part.shape[0]), dy.dtype, dy.device)
        dx[start : start + step] = fold(part, w)
    return dx
