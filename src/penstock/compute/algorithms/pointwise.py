"""Kernels of one place (1x1): a plain matrix product over the channels.

Error: sums of ``C`` products, as torch's matrix product sums them. Memory beside inputs and
results: none with the channels innermost; otherwise a weight gradient takes ``min(batch * O * C,
size of x and dy)`` elements. A stride copies the part of ``x`` that is seen.
"""

from __future__ import annotations

import torch

from penstock.compute.geometry import Geometry


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``y``: every place of ``x`` times the same matrix."""
    matrix = w.reshape(g.out_channels, g.in_channels)
    seen = _seen(g, x)
    if g.is_channels_last:
        rows = seen.movedim(1, -1).reshape(-1, g.in_channels)
        y = torch.mm(rows, matrix.t())
        return y.view(g.batch, *g.out_size, g.out_channels).movedim(-1, 1)
    columns = seen.reshape(g.batch, g.in_channels, g.num_positions)
    y = torch.bmm(matrix.expand(g.batch, -1, -1), columns)
    return y.view(g.batch, g.out_channels, *g.out_size)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``dx``: the transposed matrix; places that a stride leaves out get zero."""
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
    if g.is_channels_last:
        dx = dy.new_zeros((g.batch, *g.in_size, g.in_channels)).movedim(-1, 1)
    else:
        dx = dy.new_zeros((g.batch, g.in_channels, *g.in_size))
    _seen(g, dx).copy_(seen)
    return dx


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """``dw``: one product over all places of all samples."""
    seen = _seen(g, x)
    num, sums = g.batch * g.num_positions, torch.float32 if x.element_size() == 2 else x.dtype
    is_small = g.batch * g.out_channels <= num and g.batch * g.in_channels <= num
    if not g.is_channels_last and is_small:
        columns = seen.reshape(g.batch, g.in_channels, g.num_positions)
        errors = dy.reshape(g.batch, g.out_channels, g.num_positions)
        dw = torch.bmm(errors, columns.transpose(1, 2)).sum(0, dtype=sums)
    else:
        rows = seen.movedim(1, -1).reshape(num, g.in_channels)
        dw = torch.mm(dy.movedim(1, -1).reshape(num, g.out_channels).t(), rows)
    return dw.to(x.dtype).view(g.out_channels, g.in_channels, *g.kernel)


def _seen(g: Geometry, x: torch.Tensor) -> torch.Tensor:
    """The places that the stride leads to, as a view."""
    spans = (slice(0, (n - 1) * s + 1, s) for n, s in zip(g.out_size, g.stride, strict=True))
    whole = (slice(None), slice(None), *spans)
    return x[whole]
