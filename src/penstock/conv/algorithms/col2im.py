"""Input gradients by col2im: with a stride, or with few input channels.

One matrix product computes the gradient of the im2col columns: ``C * taps`` numbers for each
position of ``dy``. The numbers are then added to their input positions by torch's own col2im (1-d
and 2-d) or tap by tap (3-d).

Error: a product of ``O`` terms, summed by torch's matrix product and rounded to the dtype. The sums
over the taps are in float32 and rounded once more.

Memory in addition to inputs and results: ``C * taps`` elements for each position of ``dy``, for as
many samples as the cap allows.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

import torch

from penstock.conv.algorithms.triton_launch import two
from penstock.conv.geometry import Geometry, output_size, samples_under, sum_dtype

SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16) if hasattr(torch, "compile") else ()
"""Half types that torch's col2im takes on a GPU. It sums them in float32."""


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
    if not cells.is_cuda or cells.dtype not in SUMMED_IN_FLOAT32:
        cells = cells.to(sum_dtype(cells))
    return torch.nn.functional.fold(cells, size, kernel, step, two(g.padding, 0), stride)
