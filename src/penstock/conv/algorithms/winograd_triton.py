"""Winograd F(4x4) in float32 with transforms that read once and write once (Triton).

The same mathematics, error bound and products as :mod:`penstock.conv.algorithms.winograd`; what
differs is that a tile is never written before it is transformed.

Memory beside inputs and results, in elements: ``36 * P * (C + O)`` for the ``P`` tiles of a chunk
of samples, under the cap or one sample; ``36 * C * O`` for the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from penstock.conv.algorithms import implicit_gemm as implicit
from penstock.conv.algorithms.implicit_gemm import Ready, Strides
from penstock.conv.algorithms.triton_launch import Launch, empty
from penstock.conv.algorithms.winograd import can as can_winograd
from penstock.conv.algorithms.winograd import turned
from penstock.conv.geometry import Geometry

LANES = 128
Stage = Callable[[torch.Tensor], torch.Tensor]


@functools.lru_cache(maxsize=1)
def _kernels() -> Any:
    from penstock.conv.algorithms import winograd_kernels

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


def _launch(kernel: Any, num: int, *numbers: int, **constants: bool) -> Launch:
    """A lane for each of ``num`` tiles and channels."""
    return Launch(kernel, (-(-num // LANES),), (num, *numbers), {**constants, "BLOCK": LANES})


# -- stages ----------------------------------------------------------------------------------------


def _transform(g: Geometry, channels: int, strides: Strides, *, is_error: bool) -> Stage:
    """To ``[36, channels, tiles]``, or ``[36, tiles, channels]`` with the channels innermost."""
    high, wide = _tiles(g)
    tiles = g.batch * high * wide
    shape = (36, tiles, channels) if g.is_channels_last else (36, channels, tiles)
    kernel = _kernels().transform_error if is_error else _kernels().transform_input
    size = g.out_size if is_error else (*g.in_size, *g.padding)
    launch = _launch(kernel, tiles * channels, channels, tiles, high, wide, *size, *strides,
                     IS_LAST=g.is_channels_last)  # fmt: skip

    def run(x: torch.Tensor) -> torch.Tensor:
        v = x.new_empty(shape)
        launch(x, v)
        return v

    return run


def _transform_weights(g: Geometry, strides: Strides, *, is_turned: bool) -> Stage:
    """To ``[36, O, C]`` of ``g``. Turned: from the weights of the one whose gradient ``g`` is."""
    output, channel, row, column = strides
    first = 0
    if is_turned:
        output, channel, row, column = channel, output, -row, -column
        first = -2 * (row + column)
    shape = (36, g.out_channels, g.in_channels)
    num = g.out_channels * g.in_channels
    numbers = (g.in_channels, first, output, channel, row, column)
    launch = _launch(_kernels().transform_weights, num, *numbers)

    def run(w: torch.Tensor) -> torch.Tensor:
        u = w.new_empty(shape)
        launch(w, u)
        return u

    return run


def _transform_back(g: Geometry) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The products of a chunk, back into its part of ``y``."""
    (high, wide), strides = _tiles(g), _strides(g)
    tiles = g.batch * high * wide
    numbers = (g.out_channels, tiles, high, wide, *g.out_size, *strides)
    launch = _launch(_kernels().transform_output, tiles * g.out_channels, *numbers,
                     IS_LAST=g.is_channels_last)  # fmt: skip

    def run(m: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        launch(m, y)
        return y

    return run


def _strides(g: Geometry) -> Strides:
    make = empty(g, g.out_channels, g.out_size, torch.float32)
    return make(torch.empty(0, device="meta")).stride()


# -- passes ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _prepare(
    g: Geometry, device: torch.device, x: Strides, w: Strides, step: int, is_turned: bool
) -> Ready:
    weights = _transform_weights(g, w, is_turned=is_turned)
    make = empty(g, g.out_channels, g.out_size, torch.float32)
    chunks = []
    for start in range(0, g.batch, step):
        part = replace(g, batch=min(step, g.batch - start))
        chunks.append((slice(start, start + step),
                       _transform(part, g.in_channels, x, is_error=False),
                       _transform_back(part)))  # fmt: skip

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        u = weights(w)
        u = u.transpose(1, 2) if g.is_channels_last else u
        y = make(x)
        for samples, transform, transform_back in chunks:
            v = transform(x if len(chunks) == 1 else x[samples])
            m = torch.bmm(v, u) if g.is_channels_last else torch.bmm(u, v)
            transform_back(m, y if len(chunks) == 1 else y[samples])
        return y

    return run


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``y`` as ``[batch, O, *out_size]``, laid out as the geometry says."""
    return _prepare(g, x.device, x.stride(), w.stride(), _step(g, cap_bytes), False)(x, w)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dx``: the same with the taps in reverse and the channels exchanged."""
    g = turned(g)
    return _prepare(g, dy.device, dy.stride(), w.stride(), _step(g, cap_bytes), True)(dy, w)


@functools.lru_cache(maxsize=4096)
def _prepare_weight_gradient(
    g: Geometry, device: torch.device, x: Strides, dy: Strides, step: int
) -> Ready:
    chunks = []
    for start in range(0, g.batch, step):
        part = replace(g, batch=min(step, g.batch - start))
        chunks.append((slice(start, start + step),
                       _transform(part, g.in_channels, x, is_error=False),
                       _transform(part, g.out_channels, dy, is_error=True)))  # fmt: skip
    make = empty(replace(g, batch=g.out_channels), g.in_channels, g.kernel, torch.float32)
    strides = make(torch.empty(0, device="meta")).stride()
    num = g.in_channels * g.out_channels
    gather = _launch(_kernels().gather_weights, num, g.out_channels, *strides)

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for samples, transform, transform_error in chunks:
            v, e = transform(x[samples]), transform_error(dy[samples])
            pair = (v.transpose(1, 2), e) if g.is_channels_last else (v, e.transpose(1, 2))
            total = torch.bmm(*pair) if total is None else total.baddbmm_(*pair)
        assert total is not None
        dw = make(total)
        gather(total, dw)
        return dw

    return run


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dw``: both transforms, the product over the tiles, and back."""
    step = _step(g, cap_bytes)
    return _prepare_weight_gradient(g, x.device, x.stride(), dy.stride(), step)(x, dy)
