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

from collections.abc import Callable
from math import prod

import torch

from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch, kernels, two
from penstock.conv.geometry import Geometry, Prepared, output_size, samples_under, sum_dtype

BLOCK = 256
Fold = Callable[[Geometry, torch.Tensor], torch.Tensor]


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


def input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int, fold: Fold = _fold
) -> torch.Tensor:
    """Compute ``dx`` with one product. ``fold`` adds its results to their input positions."""
    weights = w.reshape(g.groups, g.group_out, -1).transpose(1, 2)
    dx = dy.new_empty((g.batch, g.in_channels, *g.in_size))
    sample_bytes = g.in_channels * g.num_taps * g.num_positions * dy.element_size()
    step = samples_under(cap_bytes, sample_bytes, g.batch)
    for start in range(0, g.batch, step):
        part = dy[start : start + step]
        errors = part.reshape(len(part), g.groups, g.group_out, -1)
        cells = torch.matmul(weights, errors).view(len(part), -1, g.num_positions)
        folded = fold(g, cells)
        if step == g.batch:
            return folded.view(dx.shape).to(dy.dtype)
        dx[start : start + step] = folded.view(dx[start : start + step].shape)
    return dx


# -- Triton ----------------------------------------------------------------------------------------


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for one group and a kernel small enough to unroll."""
    return g.num_dims <= 2 and can_gather(g, dtype) and g.groups == 1 and g.num_taps <= 64


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` with one product and one kernel that sums the taps of each position."""
    taps = dict(zip("RS", two(g.kernel, 1), strict=True))
    sizes = (*two(g.in_size, 1), *two(g.out_size, 1))
    steps = (*two(g.stride, 1), *two(g.dilation, 1), *two(g.padding, 0))
    launches = dict[int, Launch]()

    def fold(g: Geometry, cells: torch.Tensor) -> torch.Tensor:
        num = len(cells) * g.in_channels * prod(g.in_size)
        if num not in launches:
            constants = {**taps, "BLOCK": BLOCK}
            grid = (-(-num // BLOCK),)
            launches[num] = Launch(kernels().fold, grid, (num, *sizes, *steps), constants)
        dx = cells.new_empty((len(cells), g.in_channels, *g.in_size))
        launches[num](cells, dx)
        return dx

    return lambda dy, w: input_gradient(g, dy, w, cap_bytes, fold)
