"""Input gradients by col2im: with a stride, or with few input channels.

One matrix product computes the gradient of the im2col columns: ``C * taps`` numbers for each
position of ``dy``. The numbers are then added to their input positions by torch's own col2im (1-d
and 2-d), tap by tap (3-d), or by a Triton kernel (``prepare_folded_input_gradient``, 1-d and 2-d).

Error: a product of ``O`` terms, summed by torch's matrix product and rounded to the dtype. The sums
over the taps are in float32 and rounded once more.

Memory in addition to inputs and results: ``C * taps`` elements for each position of ``dy``, for as
many samples as the cap allows.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from math import prod

import torch

from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, kernels, two
from penstock.conv.geometry import (
    Geometry,
    Prepared,
    Step,
    empty,
    output_size,
    samples_under,
    sum_dtype,
)

BLOCK = 256


def _prepare_fold(g: Geometry, dtype: torch.dtype) -> Step:
    """Return what adds columns ``[samples, C * taps, positions]`` to ``[samples, C, *in_size]``.

    This is torch's own col2im, or additions tap by tap. Both sum in float32.
    """
    whole = output_size(g.in_size, g.kernel, g.stride, g.padding, g.dilation)
    if not dtype.is_complex and g.num_dims <= 2 and g.out_size == whole:
        size, kernel, step, stride = (
            two(values, 1) for values in (g.in_size, g.kernel, g.dilation, g.stride)
        )
        padding, fold = two(g.padding, 0), torch.nn.functional.fold
        return lambda cells: fold(
            cells.to(sum_dtype(cells)), size, kernel, step, padding, stride
        ).view(-1, g.in_channels, *g.in_size)
    both = (slice(None),) * 2
    taps = [(both + g.tap_slices(tap), both + tap) for tap in g.taps()]
    inside = both + g.unpadded_slices

    def add_taps(cells: torch.Tensor) -> torch.Tensor:
        parts = cells.view(len(cells), g.in_channels, *g.kernel, *g.out_size)
        padded = cells.new_zeros((*parts.shape[:2], *g.padded_size), dtype=sum_dtype(cells))
        for place, tap in taps:
            padded[place].add_(parts[tap])
        return padded[inside]

    return add_taps


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` with one product, and add its results to their input positions."""
    return _prepare(g, dy, cap_bytes, _prepare_fold(g, dy.dtype))


def _prepare(g: Geometry, dy: torch.Tensor, cap_bytes: int, fold: Step) -> Prepared:
    depth, places = g.num_taps * g.group_in, g.num_positions
    step = samples_under(cap_bytes, g.groups * depth * places * dy.element_size(), g.batch)
    make, dtype = empty(g, g.in_channels, g.in_size, dy.dtype), dy.dtype
    matrix, shape = (g.groups, g.group_out, depth), (-1, g.groups, g.group_out, places)

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        weights = w.reshape(matrix).transpose(1, 2)
        if step == g.batch:
            cells = torch.matmul(weights, dy.reshape(shape))
            return fold(cells.view(g.batch, -1, places)).to(dtype)
        dx = make(dy)
        for start in range(0, g.batch, step):
            cells = torch.matmul(weights, dy[start : start + step].reshape(shape))
            dx[start : start + step] = fold(cells.view(len(cells), -1, places))
        return dx

    return run


# -- Triton ----------------------------------------------------------------------------------------


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for one group and a kernel small enough to unroll."""
    return g.num_dims <= 2 and can_gather(g, dtype) and g.groups == 1 and g.num_taps <= 64


def prepare_folded_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` with one product and one kernel that sums the taps of each position."""
    taps = dict(zip("RS", two(g.kernel, 1), strict=True))
    sizes = (*two(g.in_size, 1), *two(g.out_size, 1))
    steps = (*two(g.stride, 1), *two(g.dilation, 1), *two(g.padding, 0))
    launches = dict[int, Launch]()

    def fold(cells: torch.Tensor) -> torch.Tensor:
        num = len(cells) * g.in_channels * prod(g.in_size)
        if num not in launches:
            constants = {**taps, "BLOCK": BLOCK}
            grid = (-(-num // BLOCK),)
            launches[num] = Launch(kernels().fold, grid, (num, *sizes, *steps), constants)
        dx = cells.new_empty((len(cells), g.in_channels, *g.in_size))
        launches[num](cells, dx)
        return dx

    return _prepare(g, dy, cap_bytes, fold)
