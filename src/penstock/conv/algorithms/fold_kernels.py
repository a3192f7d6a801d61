"""Triton's side of input gradients with few channels: a lane collects what its taps gave.

Imported only where Triton is there; :mod:`penstock.conv.algorithms.folding` calls it.
"""

# Triton reads these functions as source of another language: Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from penstock.conv.algorithms.depthwise_kernels import place_of
from penstock.conv.algorithms.implicit_kernels import kernel


@kernel
def fold(
    cells,
    dx,
    num,
    channels,
    in_h,
    in_w,
    out_h,
    out_w,
    stride_h,
    stride_w,
    step_h,
    step_w,
    pad_h,
    pad_w,
    cell_n,
    cell_depth,
    cell_place,
    x_n,
    x_c,
    x_h,
    x_w,
    R: tl.constexpr,
    S: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dx`` from ``cells[n, (c, r, s), place]``: each element collects what its taps gave."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    sample, channel, h, v = place_of(index, in_h, in_w, channels, IS_LAST)
    at = cells + sample * cell_n + channel * (R * S) * cell_depth
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        at_h = h + pad_h - r * step_h
        o_h = at_h // stride_h
        is_row = is_here & (o_h * stride_h == at_h) & (at_h >= 0) & (o_h < out_h)
        for s in tl.static_range(S):
            at_w = v + pad_w - s * step_w
            o_w = at_w // stride_w
            is_hit = is_row & (o_w * stride_w == at_w) & (at_w >= 0) & (o_w < out_w)
            where = at + (r * S + s) * cell_depth + (o_h * out_w + o_w) * cell_place
            sums += tl.load(where, mask=is_hit, other=0.0).to(tl.float32)
    x_at = dx + sample * x_n + channel * x_c + h * x_h + v * x_w
    tl.store(x_at, sums.to(dx.dtype.element_ty), mask=is_here)
