"""1x1 convolutions as a plain matrix product over the channels.

Error: sums of ``C`` products, summed by torch's matrix product. Memory in addition to inputs and
results: none in channels_last layout. Otherwise a weight gradient takes ``O * C`` elements for each
sample, or the size of x and dy if that is less, for as many samples at a time as the cap allows.
With a stride, the part of ``x`` that is read is copied.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

import torch

from penstock.conv.geometry import Geometry, empty, samples_under, sum_dtype


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``y``: every position of ``x`` is multiplied by the same matrix."""
    matrix = w.reshape(g.out_channels, g.in_channels)
    seen = _seen(g, x)
    if g.is_channels_last:
        rows = seen.movedim(1, -1).reshape(-1, g.in_channels)
        y = torch.mm(rows, matrix.t())
        return y.view(g.batch, *g.out_size, g.out_channels).movedim(-1, 1)
    columns = seen.reshape(g.batch, g.in_channels, g.num_positions)
    y = torch.bmm(matrix.expand(g.batch, -1, -1), columns)
    return y.view(g.batch, g.out_channels, *g.out_size)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx`` with the transposed matrix. Positions that the stride skips get zero."""
    matrix = w.reshape(g.out_channels, g.in_channels)
    if g.is_channels_last:
        rows = dy.movedim(1, -1).reshape(-1, g.out_channels)
        seen = torch.mm(rows, matrix).view(g.batch, *g.out_size, g.in_channels).movedim(-1, 1)
    else:
        columns = dy.reshape(g.batch, g.out_channels, g.num_positions)
        seen = torch.bmm(matrix.t().expand(g.batch, -1, -1), columns)
        seen = seen.view(g.batch, g.in_channels, *g.out_size)
    if g.in_size == g.out_size:
        return seen
    dx = empty(g, g.in_channels, g.in_size, dy.dtype)(dy).zero_()
    _seen(g, dx).copy_(seen)
    return dx


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dw`` by a product over all positions, with as many samples at a time as fit."""
    step = g.batch
    if not g.is_channels_last:
        places = (g.in_channels + g.out_channels) * g.num_positions
        each = g.in_channels * g.out_channels if _by_sample(g) else places
        step = samples_under(cap_bytes, each * x.element_size(), g.batch)
    total = _summed(g, x[:step], dy[:step])
    for start in range(step, g.batch, step):
        total += _summed(g, x[start : start + step], dy[start : start + step])
    return total.to(x.dtype).view(g.out_channels, g.in_channels, *g.kernel)


def _by_sample(g: Geometry) -> bool:
    """Return True if the products of a sample are smaller than a copy of the sample."""
    return max(g.in_channels, g.out_channels) <= g.num_positions


def _summed(g: Geometry, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return ``dw`` of some samples as a matrix, in float32 for half types."""
    seen, sums = _seen(g, x), sum_dtype(x)
    if not g.is_channels_last and _by_sample(g):
        columns = seen.reshape(len(x), g.in_channels, g.num_positions)
        errors = dy.reshape(len(x), g.out_channels, g.num_positions)
        return torch.bmm(errors, columns.transpose(1, 2)).sum(0, dtype=sums)
    rows = seen.movedim(1, -1).reshape(-1, g.in_channels)
    errors = dy.movedim(1, -1).reshape(-1, g.out_channels)
    return torch.mm(errors.t(), rows).to(sums)


def _seen(g: Geometry, x: torch.Tensor) -> torch.Tensor:
    """Return a view of the positions that the stride selects."""
    whole = (slice(None), slice(None), *g.tap_slices((0,) * g.num_dims))
    return x[whole]
