"""Winograd F(4x4) in float32 with transforms that read once and write once (Triton).

The same mathematics, error bound and products as :mod:`penstock.compute.algorithms.winograd`; what
differs is that a tile is never written before it is transformed.

Memory beside inputs and results, in elements: ``36 * P * (C + O)`` for the ``P`` tiles of a chunk
of samples, under the cap or one sample; ``36 * C * O`` for the weights.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from penstock.compute.algorithms import implicit
from penstock.compute.algorithms.winograd import (
    F4,
    gather_weights,
    transform_weights,
    turned,
)
from penstock.compute.algorithms.winograd import can as can_winograd
from penstock.compute.geometry import Geometry

LANES = 128


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    from penstock.compute.algorithms import winograd_kernels

    return winograd_kernels


def can(g: Geometry, dtype: torch.dtype) -> bool:
    """3x3, stride 1, float32, and padding that the input gradient can mirror."""
    is_fit = can_winograd(g) and all(p <= 2 for p in g.padding)
    return is_fit and dtype == torch.float32 and implicit.can(g, dtype)


def _tiles(g: Geometry) -> tuple[int, int]:
    return -(-g.out_size[0] // 4), -(-g.out_size[1] // 4)


def _step(g: Geometry, cap_bytes: int) -> int:
    high, wide = _tiles(g)
    sample_bytes = 36 * high * wide * (g.in_channels + g.out_channels) * 4
    most = (1 << 31) // (high * wide * max(g.in_channels, g.out_channels))
    return max(1, min(g.batch, cap_bytes // sample_bytes, most))


def _transform(g: Geometry, x: torch.Tensor, channels: int, *, is_error: bool) -> torch.Tensor:
    """``[36, channels, tiles]``, or ``[36, tiles, channels]`` with the channels innermost."""
    high, wide = _tiles(g)
    tiles = x.shape[0] * high * wide
    num = tiles * channels
    shape = (36, tiles, channels) if g.is_channels_last else (36, channels, tiles)
    v = x.new_empty(shape)
    size = g.out_size if is_error else g.in_size
    kernel = _kernels().transform_error if is_error else _kernels().transform_input
    kernel[(-(-num // LANES),)](
        *(x, v, num, channels, tiles, high, wide, *size, *(() if is_error else g.padding)),
        *x.stride(),
        IS_LAST=g.is_channels_last,
        BLOCK=LANES,
    )
    return v


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``y`` as ``[batch, O, *out_size]``, laid out as the geometry says."""
    u = transform_weights(F4, w)
    high, wide = _tiles(g)
    if g.is_channels_last:
        y = x.new_empty((g.batch, *g.out_size, g.out_channels)).permute(0, 3, 1, 2)
    else:
        y = x.new_empty((g.batch, g.out_channels, *g.out_size))
    step = _step(g, cap_bytes)
    for start in range(0, g.batch, step):
        part, out = x[start : start + step], y[start : start + step]
        v = _transform(g, part, g.in_channels, is_error=False)
        m = torch.bmm(v, u.transpose(1, 2)) if g.is_channels_last else torch.bmm(u, v)
        tiles = part.shape[0] * high * wide
        num = tiles * g.out_channels
        _kernels().transform_output[(-(-num // LANES),)](
            *(m, out, num, g.out_channels, tiles, high, wide, *g.out_size, *out.stride()),
            IS_LAST=g.is_channels_last,
            BLOCK=LANES,
        )
    return y


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dx``: the same with the taps in reverse and the channels exchanged."""
    return forward(turned(g), dy, w.flip((2, 3)).transpose(0, 1), cap_bytes)


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dw``: both transforms, the product over the tiles, and back."""
    total = x.new_zeros((36, g.in_channels, g.out_channels))
    step = _step(g, cap_bytes)
    for start in range(0, g.batch, step):
        v = _transform(g, x[start : start + step], g.in_channels, is_error=False)
        e = _transform(g, dy[start : start + step], g.out_channels, is_error=True)
        if g.is_channels_last:
            total.baddbmm_(v.transpose(1, 2), e)
        else:
            total.baddbmm_(v, e.transpose(1, 2))
    return gather_weights(F4, total)
