"""Input gradients of convolutions with few input channels, by col2im.

One matrix product computes the gradient of the im2col columns: ``C * taps`` numbers for each
position of ``dy``. The phase algorithm reads ``O * taps / stride^2`` numbers, which is more in the
first layer of a network. The numbers are then added to their input positions by torch's own col2im
(for each tap along the first axis of a 3-d convolution), or by a Triton kernel
(``triton_input_gradient``).

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

import torch

from penstock.conv.algorithms.implicit_gemm import Prepared
from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, four, kernels, two
from penstock.conv.geometry import Geometry, empty, samples_under, sum_dtype

BLOCK = 256


def _sample_bytes(g: Geometry, dy: torch.Tensor) -> int:
    return g.in_channels * g.num_taps * g.num_positions * dy.element_size()


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx`` with torch's col2im, once for each tap along the first of three axes."""
    is_deep = g.num_dims == 3
    weights = w.reshape(g.groups, g.group_out, g.group_in, g.num_taps).permute(0, 2, 3, 1)
    weights = weights.reshape(g.groups, g.group_in, g.kernel[0] if is_deep else 1, -1, g.group_out)
    dx = dy.new_empty((g.batch, g.in_channels, *g.in_size))
    step = samples_under(cap_bytes, _sample_bytes(g, dy), g.batch)
    for start in range(0, g.batch, step):
        part = dy[start : start + step]
        planes = part.transpose(1, 2).flatten(0, 1) if is_deep else part
        errors = planes.reshape(len(planes), g.groups, g.group_out, -1)
        padded = dx.new_zeros(0)
        for number, taps in enumerate(weights.unbind(2)):
            matrix = taps.reshape(g.groups, -1, g.group_out)
            cells = torch.matmul(matrix, errors).view(len(planes), -1, errors.shape[-1])
            folded = _fold(g, cells)
            if not is_deep:
                dx[start : start + step] = folded.view(dx[start : start + step].shape)
                continue
            if not number:
                shape = (len(part), g.in_channels, g.padded_size[0], *g.in_size[1:])
                padded = folded.new_zeros(shape)
            folded = folded.view(len(part), -1, *folded.shape[1:]).transpose(1, 2)
            padded[:, :, g.tap_slices((number, 0, 0))[0]] += folded
        if is_deep:
            dx[start : start + step] = padded[:, :, g.unpadded_slices[0]]
    return dx


def _fold(g: Geometry, cells: torch.Tensor) -> torch.Tensor:
    """Add ``[planes, C * taps, positions]`` to ``[planes, C, height, width]``, in float32."""
    if cells.is_complex():
        return torch.complex(_fold(g, cells.real), _fold(g, cells.imag))
    size, kernel, step, stride = (
        two(values[-2:], 1) for values in (g.in_size, g.kernel, g.dilation, g.stride)
    )
    padding = two(g.padding[-2:], 0)
    return torch.nn.functional.fold(cells.to(sum_dtype(cells)), size, kernel, step, padding, stride)


# -- Triton ----------------------------------------------------------------------------------------


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for one group and a kernel small enough to unroll."""
    return g.num_dims <= 2 and can_gather(g, dtype) and g.groups == 1 and g.num_taps <= 64


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
