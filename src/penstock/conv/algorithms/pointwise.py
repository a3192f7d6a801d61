"""1x1 convolutions as a plain matrix product over the channels.

Error: sums of ``C`` products, summed by torch's matrix product. Memory in addition to inputs and
results: none in channels_last layout. Otherwise a weight gradient takes ``O * C`` elements for each
sample, or the size of x and dy if that is less, for as many samples at a time as the cap allows.
With a stride, the part of ``x`` that is read is copied.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.conv.geometry import Geometry, Prepared, Sizes, dense, empty, samples_under, sum_dtype


def prepare_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> Prepared:
    """Compute ``y``: every position of ``x`` is multiplied by the same matrix."""
    shape, strides = (g.batch, g.out_channels, *g.out_size), g.strides(g.out_channels, g.out_size)
    rows, matrix, multiply = _operands(g, g.in_channels, is_forward=True)
    settle = _settle(g, x)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = multiply(settle(x).as_strided(*rows), w.contiguous().as_strided(*matrix))
        return y.as_strided(shape, strides)

    return run


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` with the transposed matrix. Positions that the stride skips get zero."""
    shape, strides = (g.batch, g.in_channels, *g.out_size), g.strides(g.in_channels, g.out_size)
    rows, matrix, multiply = _operands(g, g.out_channels, is_forward=False)
    settle = dense(g, dy, g.out_channels, g.out_size)
    make, is_whole = empty(g, g.in_channels, g.in_size, dy.dtype), g.in_size == g.out_size

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        matrices = settle(dy).as_strided(*rows), w.contiguous().as_strided(*matrix)
        seen: torch.Tensor = multiply(*matrices).as_strided(shape, strides)
        if is_whole:
            return seen
        dx = make(dy).zero_()
        _seen(g, dx).copy_(seen)
        return dx

    return run


def _operands(g: Geometry, summed: int, *, is_forward: bool) -> tuple[Any, Any, Any]:
    """Return shape and strides of the positions and of the matrix, and their product."""
    other = g.in_channels + g.out_channels - summed
    along = (1, g.in_channels) if is_forward else (g.in_channels, 1)  # of the matrix [O, C]
    if g.is_channels_last:
        return (
            ((g.batch * g.num_positions, summed), (summed, 1)),
            ((summed, other), along),
            torch.mm,
        )
    size = summed * g.num_positions
    return (
        ((g.batch, summed, g.num_positions), (size, g.num_positions, 1)),
        ((g.batch, other, summed), (0, *along[::-1])),
        lambda columns, matrix: torch.bmm(matrix, columns),
    )


def _settle(g: Geometry, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies the positions that the stride selects, if it skips any."""
    if g.in_size == g.out_size:
        return dense(g, x, g.in_channels, g.in_size)
    make = empty(g, g.in_channels, g.out_size, x.dtype)
    return lambda x: make(x).copy_(_seen(g, x))


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dw`` by a product over all positions, with as many samples at a time as fit."""
    inputs, outputs, num = g.in_channels, g.out_channels, g.num_positions
    is_last = g.is_channels_last
    if not is_last and (
        not _by_sample(g) or g.batch * inputs * outputs * x.element_size() > cap_bytes
    ):
        return lambda x, dy: weight_gradient(g, x, dy, cap_bytes)
    shape, strides = (outputs, inputs, *g.kernel), g.strides(inputs, g.kernel)
    settle, settle_error = _settle(g, x), dense(g, dy, outputs, g.out_size)
    rows: tuple[Sizes, Sizes]
    errors: tuple[Sizes, Sizes]
    if is_last:
        rows = ((g.batch * num, inputs), (inputs, 1))
        errors = ((outputs, g.batch * num), (1, outputs))
    else:  # one product for each sample
        rows = ((g.batch, num, inputs), (inputs * num, 1, num))
        errors = ((g.batch, outputs, num), (outputs * num, num, 1))
    sums, dtype = sum_dtype(x), x.dtype

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        left, right = settle_error(dy).as_strided(*errors), settle(x).as_strided(*rows)
        if is_last:
            return torch.mm(left, right).as_strided(shape, strides)
        dw = torch.bmm(left, right).sum(0, dtype=sums)
        return dw.to(dtype).as_strided(shape, strides)

    return run


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dw`` in contiguous layout."""
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
    if _by_sample(g):
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
