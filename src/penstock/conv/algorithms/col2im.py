"""Input gradients by col2im: with a stride, or with few input channels.

One matrix product computes the gradient of the im2col columns: ``C * taps`` numbers for each
position of ``dy``. The numbers are then added to their input positions by torch's own col2im (1-d
and 2-d), tap by tap (3-d), or by a Triton kernel (``prepare_input_gradient``, 1-d and 2-d).

Error: a product of ``O`` terms, summed by torch's matrix product and rounded to the dtype. The sums
over the taps are in float32 and rounded once more.

Memory in addition to inputs and results: ``C * taps`` elements for each position of ``dy``, for as
many samples as the cap allows.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, four, kernels, two
from penstock.conv.geometry import (
    Geometry,
    Prepared,
    Sizes,
    dense,
    empty,
    output_size,
    samples_under,
    sum_dtype,
)

BLOCK = 256


def _sample_bytes(g: Geometry, dy: torch.Tensor) -> int:
    return g.in_channels * g.num_taps * g.num_positions * dy.element_size()


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx`` with one product."""
    weights = w.reshape(g.groups, g.group_out, -1).transpose(1, 2)
    dx = dy.new_empty((g.batch, g.in_channels, *g.in_size))
    step = samples_under(cap_bytes, _sample_bytes(g, dy), g.batch)
    for start in range(0, g.batch, step):
        part = dy[start : start + step]
        errors = part.reshape(len(part), g.groups, g.group_out, -1)
        cells = torch.matmul(weights, errors).view(len(part), -1, g.num_positions)
        folded = _fold(g, cells)
        if step == g.batch:
            return folded.view(dx.shape).to(dy.dtype)
        dx[start : start + step] = folded.view(dx[start : start + step].shape)
    return dx


def _fold(g: Geometry, cells: torch.Tensor) -> torch.Tensor:
    """Add ``[samples, C * taps, positions]`` to ``[samples, C, *in_size]``, in float32."""
    whole = output_size(g.in_size, g.kernel, g.stride, g.padding, g.dilation)
    if cells.is_complex() or g.num_dims > 2 or g.out_size != whole:
        parts = cells.view(len(cells), g.in_channels, *g.kernel, *g.out_size)
        dtype, both = sum_dtype(cells), (slice(None),) * 2
        padded = cells.new_zeros((*parts.shape[:2], *g.padded_size), dtype=dtype)
        for tap in g.taps():
            padded[both + g.tap_slices(tap)] += parts[both + tap]
        return padded[both + g.unpadded_slices]
    size, kernel, step, stride = (
        two(values, 1) for values in (g.in_size, g.kernel, g.dilation, g.stride)
    )
    padding = two(g.padding, 0)
    return torch.nn.functional.fold(cells.to(sum_dtype(cells)), size, kernel, step, padding, stride)


# -- Triton ----------------------------------------------------------------------------------------


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for one group and a kernel small enough to unroll."""
    return g.num_dims <= 2 and can_gather(g, dtype) and g.groups == 1 and g.num_taps <= 64


def _prepare(g: Geometry, dy: torch.Tensor) -> Prepared:
    make = empty(g, g.in_channels, g.in_size, dy.dtype)
    high, wide = two(g.kernel, 1)
    depth, places = g.in_channels * g.num_taps, g.num_positions
    cells = (places * depth, 1, depth) if g.is_channels_last else (depth * places, places, 1)
    num = g.batch * g.in_channels * prod(g.in_size)
    launch = Launch(
        kernels().fold,
        (-(-num // BLOCK),),
        (
            *(num, g.in_channels, *two(g.in_size, 1), *two(g.out_size, 1)),
            *(*two(g.stride, 1), *two(g.dilation, 1), *two(g.padding, 0)),
            *(*cells, *four(g.strides(g.in_channels, g.in_size))),
        ),
        {"R": high, "S": wide, "IS_LAST": g.is_channels_last, "BLOCK": BLOCK},
    )

    settle, is_last = dense(g, dy, g.out_channels, g.out_size), g.is_channels_last
    errors: tuple[Sizes, Sizes]
    matrix: tuple[Sizes, Sizes]
    if is_last:
        errors = ((g.batch * places, g.out_channels), (g.out_channels, 1))
        matrix = ((g.out_channels, depth), (depth, 1))
    else:
        errors = ((g.batch, g.out_channels, places), (g.out_channels * places, places, 1))
        matrix = ((g.batch, depth, g.out_channels), (0, 1, depth))

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        given, taps = settle(dy).as_strided(*errors), w.contiguous().as_strided(*matrix)
        dx = make(dy)
        launch(torch.mm(given, taps) if is_last else torch.bmm(taps, given), dx)
        return dx

    return run


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` with one product and one kernel that sums the taps of each position."""
    step = samples_under(cap_bytes, _sample_bytes(g, dy), g.batch)
    if step == g.batch:
        return _prepare(g, dy)
    make, kinds = empty(g, g.in_channels, g.in_size, dy.dtype), dict[int, Prepared]()
    for num in {step, g.batch % step or step}:
        kinds[num] = _prepare(replace(g, batch=num), dy[:num])

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = make(dy)
        for start in range(0, g.batch, step):
            part = dy[start : start + step]
            dx[start : start + step] = kinds[len(part)](part, w)
        return dx

    return run
