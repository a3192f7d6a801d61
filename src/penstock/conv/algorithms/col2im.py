"""Input gradients of convolutions with few input channels, by col2im.

One matrix product computes the gradient of the im2col columns: ``C * taps`` numbers for each
position of ``dy``. The phase algorithm reads ``O * taps / stride^2`` numbers, which is more in the
first layer of a network. The numbers are then added to their input positions tap by tap, or by one
Triton kernel (``triton_input_gradient``).

Error: a product of ``O`` terms, summed by torch's matrix product and rounded to the dtype. The sums
over the taps are in float32 and rounded once more.

Memory in addition to inputs and results: ``C * taps`` elements for each position of ``dy``, for as
many samples as the cap allows.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from math import prod
from typing import Any

import torch

from penstock.conv.algorithms.implicit_gemm import Prepared
from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, four, kernels, two
from penstock.conv.geometry import Geometry, empty, samples_under, sum_dtype

BLOCK = 256


def _sample_bytes(g: Geometry, dy: torch.Tensor) -> int:
    return g.in_channels * g.num_taps * g.num_positions * dy.element_size()


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx`` tap by tap."""
    weights = w.reshape(g.groups, g.group_out, g.group_in * g.num_taps).transpose(1, 2)
    inner = (slice(None), slice(None), *g.unpadded_slices)
    dx = dy.new_empty((g.batch, g.in_channels, *g.in_size))
    step = samples_under(cap_bytes, _sample_bytes(g, dy), g.batch)
    for start in range(0, g.batch, step):
        part = dy[start : start + step]
        num = part.shape[0]
        padded = dy.new_zeros((num, g.in_channels, *g.padded_size), dtype=sum_dtype(dy))
        errors = part.reshape(num, g.groups, g.group_out, g.num_positions).transpose(0, 1)
        errors = errors.transpose(1, 2).reshape(g.groups, g.group_out, -1)
        cells = torch.bmm(weights, errors).view(g.in_channels, *g.kernel, num, *g.out_size)
        for tap in g.taps():
            seen = (slice(None), slice(None), *g.tap_slices(tap))
            here: tuple[Any, ...] = (slice(None), *tap)
            padded[seen] += cells[here].transpose(0, 1)
        dx[start : start + step] = padded[inner]
    return dx


# -- Triton ----------------------------------------------------------------------------------------


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for one group and a kernel small enough to unroll."""
    return can_gather(g, dtype) and g.groups == 1 and g.num_taps <= 64


@functools.lru_cache(maxsize=4096)
def _prepare(g: Geometry, dtype: torch.dtype, device: torch.device) -> Prepared:
    make = empty(g, g.in_channels, g.in_size, dtype)
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


def triton_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> torch.Tensor:
    """Compute ``dx`` with one product and one kernel that sums the taps of each position."""
    step = samples_under(cap_bytes, _sample_bytes(g, dy), g.batch)
    if step == g.batch:
        return _prepare(g, dy.dtype, dy.device)(dy, w)
    dx = empty(g, g.in_channels, g.in_size, dy.dtype)(dy)
    for start in range(0, g.batch, step):
        part = dy[start : start + step]
        run = _prepare(replace(g, batch=part.shape[0]), dy.dtype, dy.device)
        dx[start : start + step] = run(part, w)
    return dx
