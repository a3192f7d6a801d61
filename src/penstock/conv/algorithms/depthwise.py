"""Depthwise convolutions by shifted multiply-adds or Triton.

*Shifts*: for each tap of the kernel, a shifted view of the padded input is multiplied by one number
per channel and added to the result (in float32 for half types). Error: one rounding for each tap,
and one at the end. Memory in elements, in addition to inputs and results: the padded input, and for
half types twice the result.

*Triton*: one lane for each element. Error: sums in float32, rounded once. Memory in addition to
inputs and results: none, except ``parts * C * taps`` float32 sums for the weight gradient.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from penstock.conv.algorithms.implicit_gemm import MAX_PARTIAL_BYTES, Split
from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, four, two
from penstock.conv.geometry import Geometry, Prepared, Sizes, dense, empty, sum_dtype

BLOCK = 256
TILE = 2048
"""Elements in a tile of positions and channels."""
CELLS = {True: 8192, False: 2048}
"""Elements of ``dy`` that a program of a weight gradient holds at a time, in channels_last layout
and otherwise: the best of three on an H200, for three layers."""

MAX_DIRECT_TAPS = 25
"""With more taps, the weights are first copied so that those of neighboring channels are adjacent.
On an H200 this takes less time for 49 taps, and more for 25."""

# -- shifts ----------------------------------------------------------------------------------------


def _taps(g: Geometry, padded: torch.Tensor) -> Iterator[tuple[Sizes, torch.Tensor]]:
    """Yield each tap with the part of the padded input it reads, a view shaped like the output."""
    for tap in g.taps():
        whole = (slice(None), slice(None), *g.tap_slices(tap))
        yield tap, padded[whole]


def _pad(g: Geometry, x: torch.Tensor) -> torch.Tensor:
    pads = [amount for p in reversed(g.padding) for amount in (p, p)]
    return torch.nn.functional.pad(x, pads) if any(pads) else x


def _by_channel(g: Geometry, dy: torch.Tensor) -> torch.Tensor:
    """Return ``dy`` as ``[batch, channel, output of the channel, *positions]``."""
    return dy.reshape(dy.shape[0], g.in_channels, g.group_out, *dy.shape[2:])


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``y``. A group can have several outputs."""
    many = g.group_out
    padded = _pad(g, x)
    y = empty(g, g.out_channels, g.out_size, sum_dtype(x))(x).zero_()
    by_channel = y.view(g.batch, g.in_channels, many, *g.out_size)
    kernels = w.reshape(1, g.in_channels, many, *g.kernel, *(1,) * g.num_dims).to(sum_dtype(x))
    for place, seen in _taps(g, padded):
        by_channel.addcmul_(seen.unsqueeze(2), kernels[(slice(None),) * 3 + place])
    return y.to(x.dtype)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx``: each tap adds its gradient to the positions it read."""
    many = g.group_out
    padded = empty(g, g.in_channels, g.padded_size, sum_dtype(dy))(dy).zero_()
    errors = _by_channel(g, dy)
    kernels = w.reshape(1, g.in_channels, many, *g.kernel, *(1,) * g.num_dims).to(sum_dtype(dy))
    for place, seen in _taps(g, padded):
        kernel = kernels[(slice(None),) * 3 + place]
        if many == 1:
            seen.addcmul_(errors.squeeze(2), kernel.squeeze(2))
        else:
            seen.add_((errors * kernel).sum(2))
    whole = (slice(None), slice(None), *g.unpadded_slices)
    return padded[whole].to(dy.dtype)


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dw``: for each tap, the sum of the inputs it read times the output gradients."""
    padded = _pad(g, x)
    errors = _by_channel(g, dy)
    dw = x.new_empty((g.in_channels, g.group_out, *g.kernel), dtype=sum_dtype(x))
    axes = (0, *range(3, g.num_dims + 3))
    for place, seen in _taps(g, padded):
        dw[(slice(None),) * 2 + place] = (seen.unsqueeze(2) * errors).sum(axes, dtype=sum_dtype(x))
    return dw.to(x.dtype).view(g.out_channels, 1, *g.kernel)


# -- Triton ----------------------------------------------------------------------------------------


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for one output per channel and a kernel small enough to unroll."""
    is_flat = g.num_dims <= 2 and g.is_depthwise and g.group_out == 1
    is_easy = all(s == 1 or d == 1 for s, d in zip(g.stride, g.dilation, strict=True))
    return is_flat and is_easy and can_gather(g, dtype) and g.num_taps <= 64


def _steps(g: Geometry) -> tuple[int, ...]:
    return (*two(g.stride, 1), *two(g.dilation, 1), *two(g.padding, 0))


def _fitting(channels: int) -> int:
    """Return the number of channels per tile: the least padding first, then the largest tile."""
    return min((64, 32, 16), key=lambda block: (-(-channels // block) * block, -block))


def _unit(g: Geometry, *strides: tuple[int, ...]) -> int:
    """Return 8 if channels and strides, without those of the channels, are multiples of it."""
    steps = (step for n, _, h, w in map(four, strides) for step in (n, h, w))
    return 8 if g.is_channels_last and not any(n % 8 for n in (g.in_channels, *steps)) else 1


def _prepare_lanes(g: Geometry, a: torch.Tensor, *, is_forward: bool) -> Prepared:
    from penstock.conv.algorithms import depthwise_kernels

    size, other = (g.out_size, g.in_size) if is_forward else (g.in_size, g.out_size)
    make = empty(g, g.in_channels, size, a.dtype)
    num = g.batch * g.in_channels * prod(size)
    high, wide = two(g.kernel, 1)
    shapes = (*two(size, 1), *two(other, 1), *_steps(g))
    constants = {"R": high, "S": wide, "IS_FORWARD": is_forward}
    settle = dense(g, a, g.in_channels, other)
    strides = [four(g.strides(g.in_channels, each)) for each in (other, size)]
    is_copied = g.is_channels_last and g.num_taps > MAX_DIRECT_TAPS
    if g.is_channels_last:
        rows, block_c = num // g.in_channels, _fitting(g.in_channels)
        block_m, unit = TILE // block_c, _unit(g, *strides)
        steps = (step // unit for n, _, h, w in strides for step in (n, h, w))
        launch = Launch(
            depthwise_kernels.depthwise_tile,
            (-(-rows // block_m), -(-g.in_channels // block_c)),
            (
                *(rows, g.in_channels // unit, *shapes, *steps),
                *((1, g.in_channels) if is_copied else (g.num_taps, 1)),
            ),
            {**constants, "BLOCK_M": block_m, "BLOCK_C": block_c, "UNIT": unit},
        )
    else:
        down, across = (1, 1) if is_forward else two(g.stride, 1)
        step = g.dilation if is_forward else tuple(-d for d in g.dilation)
        shapes = (*shapes[:6], *two(step, 1), *shapes[8:])
        constants |= {"NUM_R": -(-high // down), "NUM_S": -(-wide // across)}
        launch = Launch(
            depthwise_kernels.depthwise_lanes,
            (-(-num // BLOCK),),
            (num, g.in_channels, *shapes, *strides[0], *strides[1]),
            {**constants, "BLOCK": BLOCK},
        )
    flat = (g.in_channels, g.num_taps)

    def run(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = make(a)
        taps = w.reshape(flat).t() if is_copied else w
        launch(settle(a), taps.contiguous(), result)
        return result

    return run


def prepare_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> Prepared:
    """Compute ``y``, one lane for each element."""
    return _prepare_lanes(g, x, is_forward=True)


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx``, one lane for each element."""
    return _prepare_lanes(g, dy, is_forward=False)


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dw`` for parts of the positions, and sum the parts."""
    from penstock.conv.algorithms import depthwise_kernels

    rows, unit = g.batch * g.num_positions, _unit(g, x.stride(), dy.stride())
    block_c = min(32, _fitting(g.in_channels)) if g.is_channels_last else 1
    block_m = CELLS[g.is_channels_last] // block_c
    bytes_each = 4 * g.in_channels * g.num_taps
    split = Split.of_blocks(rows, block_m, bytes_each, min(cap_bytes, MAX_PARTIAL_BYTES))
    x_n, x_c, x_h, x_w = four(x.stride())
    y_n, y_c, y_h, y_w = four(dy.stride())
    launch = Launch(
        depthwise_kernels.depthwise_weight_gradient,
        (-(-g.in_channels // block_c), split.num),
        (
            *(rows, split.size, g.in_channels // unit, *two(g.out_size, 1), *two(g.in_size, 1)),
            *(*_steps(g), x_n // unit, x_c, x_h // unit, x_w // unit),
            *(y_n // unit, y_c, y_h // unit, y_w // unit),
        ),
        {
            "S": two(g.kernel, 1)[1],
            "NUM_TAPS": g.num_taps,
            "BLOCK_M": block_m,
            "BLOCK_C": block_c,
            "UNIT": unit,
        },
    )
    return split.prepare(launch, g, x.dtype)
