"""Convolutions whose windows do not overlap, as one matrix product: 1x1, and patches of an image.

Error: sums of ``C * taps`` products, summed by torch's matrix product. Memory in addition to inputs
and results: none for 1x1 in channels_last layout with stride 1. Otherwise a copy of the windows,
which is at most the size of ``x``. In contiguous layout a weight gradient takes ``O * C * taps``
elements for each sample. If these exceed the sample or the cap, im2col computes it.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.conv.algorithms import im2col
from penstock.conv.geometry import Geometry, Prepared, Sizes, dense, empty, sum_dtype


def can(g: Geometry) -> bool:
    """Return True if no two windows overlap and nothing is padded.

    Example:
        >>> can(Geometry(batch=1, in_channels=3, out_channels=8, groups=1, in_size=(8, 8),
        ...              out_size=(2, 2), kernel=(4, 4), stride=(4, 4), padding=(0, 0),
        ...              dilation=(1, 1)))
        True
    """
    axes = zip(g.kernel, g.stride, g.dilation, strict=True)
    return (
        g.groups == 1
        and not any(g.padding)
        and all(k == 1 or (k <= s and d == 1) for k, s, d in axes)
    )


def prepare_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> Prepared:
    """Compute ``y``: every window of ``x`` is multiplied by the same matrix."""
    shape, strides = (g.batch, g.out_channels, *g.out_size), g.strides(g.out_channels, g.out_size)
    rows, matrix, multiply = _operands(g, _depth(g), is_forward=True)
    settle, settle_weights = _settle(g, x), _settle_weights(g, w)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = multiply(
            settle(x).as_strided(*rows), settle_weights(w).as_strided(*matrix)
        )
        return y.as_strided(shape, strides)

    return run


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` with the transposed matrix. Positions in no window get zero."""
    shape, strides = (g.batch, g.in_channels, *g.in_size), g.strides(g.in_channels, g.in_size)
    rows, matrix, multiply = _operands(g, g.out_channels, is_forward=False)
    settle, settle_weights = dense(g, dy, g.out_channels, g.out_size), _settle_weights(g, w)
    make, windows = empty(g, g.in_channels, g.in_size, dy.dtype), _windows(g, strides)
    is_whole = all(n == o * k for n, o, k in zip(g.in_size, g.out_size, g.kernel, strict=True))
    is_copied = not _is_plain(g)

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        cells: torch.Tensor = multiply(
            settle(dy).as_strided(*rows), settle_weights(w).as_strided(*matrix)
        )
        if not is_copied:
            return cells.as_strided(shape, strides)
        dx = make(dy) if is_whole else make(dy).zero_()
        dx.as_strided(*windows).copy_(cells.view(windows[0]))
        return dx

    return run


def _depth(g: Geometry) -> int:
    return g.in_channels * g.num_taps


def _is_plain(g: Geometry) -> bool:
    """Return True if the windows are the positions of ``x``."""
    return g.in_size == g.out_size


def _operands(g: Geometry, summed: int, *, is_forward: bool) -> tuple[Any, Any, Any]:
    """Return shape and strides of the positions and of the matrix, and their product."""
    depth = _depth(g)
    other = depth + g.out_channels - summed
    along = (1, depth) if is_forward else (depth, 1)  # of the matrix [O, depth]
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


def _windows(g: Geometry, strides: Sizes) -> tuple[Sizes, Sizes]:
    """Return shape and strides of the windows of ``x``, given its strides.

    The axes are samples, channels, taps and positions; in channels_last layout samples, positions,
    taps and channels.
    """
    sample, channel, *taps = strides
    places = [step * stride for step, stride in zip(taps, g.stride, strict=True)]
    if g.is_channels_last:
        shape = (g.batch, *g.out_size, *g.kernel, g.in_channels)
        return shape, (sample, *places, *taps, channel)
    return (g.batch, g.in_channels, *g.kernel, *g.out_size), (sample, channel, *taps, *places)


def _settle(g: Geometry, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies the windows, unless they are ``x`` itself."""
    if _is_plain(g):
        return dense(g, x, g.in_channels, g.in_size)
    windows = _windows(g, x.stride())
    return lambda x: x.as_strided(*windows).contiguous()


def _settle_weights(g: Geometry, w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies weights unless taps and channels are in the layout's order."""
    if (w.movedim(1, -1) if g.is_channels_last else w).is_contiguous():
        return lambda w: w
    return lambda w: (w.movedim(1, -1) if g.is_channels_last else w).contiguous()


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dw`` by a product over all positions, or for each sample if those are smaller."""
    depth, outputs, num = _depth(g), g.out_channels, g.num_positions
    is_last = g.is_channels_last
    if not is_last:
        by_sample_bytes = g.batch * depth * outputs * x.element_size()
        if max(depth, outputs) > num or by_sample_bytes > cap_bytes:
            return im2col.prepare_weight_gradient(g, x, dy, cap_bytes)
    shape, strides = (outputs, g.in_channels, *g.kernel), g.strides(g.in_channels, g.kernel)
    settle, settle_error = _settle(g, x), dense(g, dy, outputs, g.out_size)
    rows: tuple[Sizes, Sizes]
    errors: tuple[Sizes, Sizes]
    if is_last:
        rows = ((g.batch * num, depth), (depth, 1))
        errors = ((outputs, g.batch * num), (1, outputs))
    else:  # one product for each sample
        rows = ((g.batch, num, depth), (depth * num, 1, num))
        errors = ((g.batch, outputs, num), (outputs * num, num, 1))
    sums, dtype = sum_dtype(x), x.dtype

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        left, right = settle_error(dy).as_strided(*errors), settle(x).as_strided(*rows)
        if is_last:
            return torch.mm(left, right).as_strided(shape, strides)
        dw = torch.bmm(left, right).sum(0, dtype=sums)
        return dw.to(dtype).as_strided(shape, strides)

    return run
