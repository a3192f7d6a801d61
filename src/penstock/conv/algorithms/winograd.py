"""Winograd convolution: 3x3 kernels with stride 1 in fewer multiplications.

The input is cut into overlapping tiles. Each tile and the weights are transformed, the transformed
tiles are multiplied by the weights over the channels (one product for each position in a tile), and
the results are transformed back::

    tiles [36, C, P]  --B-->  V   U @ V = M   M  --A-->  y, 16 positions for each tile

F(4x4): tiles of 6x6, 4 times fewer multiplications, for float32 and float64.

Error: the transforms add and subtract values of different sizes, which loses digits. Each element
is off by at most 256 eps, relative to the largest sum of absolute products ``|x| * |w|`` in the
result (``|x| * |dy|`` for a weight gradient). The largest error seen was 26 eps for random values,
and 143 eps with a hundredth of them 1,000 times larger. Small results beside large ones lose more
of their digits: relative to the sum at the same position, these errors were 171 and 40,000 eps.

The transforms are matrix products (:data:`BY_PRODUCTS`), or Triton kernels for float32
(:data:`FUSED`). Those read and write each value once: a tile is not stored before it is
transformed.

Memory in addition to inputs and results, in elements: ``36 * P * 2 * (C + O)`` for the ``P`` tiles
of a chunk of samples, and half of it in Triton. Tiles have 2.25 times as many elements as
positions. The chunk size is chosen so that this stays under the cap, or is one sample. The weights
take ``36 * C * O``.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch
from penstock.conv.geometry import Geometry, Prepared, Step, empty, samples_under, turned

Matrix = tuple[tuple[float, ...], ...]
INPUT: Matrix = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
WEIGHTS: Matrix = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
OUTPUT: Matrix = (
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)


def can(g: Geometry) -> bool:
    """Return True if Winograd can compute this convolution.

    Example:
        >>> from penstock.conv.geometry import Geometry
        >>> can(Geometry(batch=1, in_channels=8, out_channels=8, groups=1, in_size=(8, 8),
        ...              out_size=(4, 4), kernel=(3, 3), stride=(2, 2), padding=(1, 1),
        ...              dilation=(1, 1)))
        False
    """
    is_3x3 = g.kernel == (3, 3) and g.groups == 1 and g.is_unit_stride and g.is_undilated
    # Smaller sizes fill at most half of a tile. With more padding, a position could see no input:
    # its result would not be zero, but what the transforms of its tile have rounded.
    return is_3x3 and min(*g.in_size, *g.out_size) >= 3 and all(p <= 2 for p in g.padding)


@functools.lru_cache(maxsize=64)
def _matrix(rows: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the matrix that transforms both axes."""
    one = torch.tensor(rows, dtype=torch.float64)
    return torch.kron(one, one).to(device=device, dtype=dtype)


def _tiles(g: Geometry) -> tuple[int, int]:
    return -(-g.out_size[0] // 4), -(-g.out_size[1] // 4)


Finish = Callable[[torch.Tensor, torch.Tensor], None]
"""Transforms products into their part of a result."""


@dataclass(frozen=True)
class Transforms:
    """The transforms of a chunk, each prepared for the geometry and for tensors like the given one.

    Args:
        tiles: From ``x`` to ``[36, C, tiles]``, or ``[36, tiles, C]`` in channels_last layout.
        errors: From ``dy`` to the same with ``O``.
        weights: To ``[36, O, C]``. If ``is_turned``, the geometry computes the input gradient of
            the convolution that the weights belong to.
        output: The products to ``y``.
        gather: The products of a weight gradient, ``[36, C, O]``, to ``dw``.
        num_copies: How many times the tiles and products are held.
    """

    tiles: Callable[[Geometry, torch.Tensor], Step]
    errors: Callable[[Geometry, torch.Tensor], Step]
    weights: Callable[[Geometry, torch.Tensor, bool], Step]
    output: Callable[[Geometry, torch.Tensor], Finish]
    gather: Callable[[Geometry, torch.Tensor], Finish]
    num_copies: int


# -- transforms as matrix products -----------------------------------------------------------------


def _tiles_by_product(g: Geometry, x: torch.Tensor, *, is_error: bool = False) -> Step:
    (high, wide), channels = _tiles(g), g.out_channels if is_error else g.in_channels
    rows: Matrix = tuple(zip(*OUTPUT, strict=True)) if is_error else INPUT
    matrix, side = _matrix(rows, x.dtype, x.device), len(rows[0])
    size, (top, left) = (g.out_size, (0, 0)) if is_error else (g.in_size, g.padding)
    bottom = (high - 1) * 4 + side - size[0] - top
    right = (wide - 1) * 4 + side - size[1] - left
    pads = (left, right, top, bottom)
    last = g.is_channels_last

    def run(x: torch.Tensor) -> torch.Tensor:
        padded = torch.constant_pad_nd(x, pads) if any(pads) else x
        num = len(x)
        n, c, h, v = padded.stride()
        if last:
            seen = padded.as_strided(
                (side, side, num, high, wide, channels), (h, v, n, 4 * h, 4 * v, c)
            )
        else:
            seen = padded.as_strided(
                (side, side, channels, num, high, wide), (h, v, c, n, 4 * h, 4 * v)
            )
        tiles = torch.mm(matrix, seen.reshape(side * side, -1))
        return tiles.view((36, -1, channels) if last else (36, channels, -1))

    return run


def _weights_by_product(g: Geometry, w: torch.Tensor, is_turned: bool) -> Step:
    rows = tuple(row[::-1] for row in WEIGHTS) if is_turned else WEIGHTS
    matrix, shape = _matrix(rows, w.dtype, w.device), (36, *w.shape[:2])

    def run(w: torch.Tensor) -> torch.Tensor:
        u = torch.mm(matrix, w.reshape(-1, 9).t()).view(shape)
        return u.transpose(1, 2) if is_turned else u

    return run


def _output_by_product(g: Geometry, x: torch.Tensor) -> Finish:
    matrix, (high, wide) = _matrix(OUTPUT, x.dtype, x.device), _tiles(g)
    n, c, h, v = g.strides(g.out_channels, g.out_size)
    axes = [(4, h), (4, v), (g.out_channels, c), (g.batch, n), (high, 4 * h), (wide, 4 * v)]
    order = (3, 2, 4, 0, 5, 1)  # from these axes to those of y
    if g.is_channels_last:
        axes = [*axes[:2], *axes[3:], axes[2]]
        order = (2, 5, 3, 0, 4, 1)
    size, strides = (tuple(one) for one in zip(*axes, strict=True))
    whole = (g.batch, g.out_channels, high * 4, wide * 4)

    def run(products: torch.Tensor, y: torch.Tensor) -> None:
        back = torch.mm(matrix, products.view(36, -1)).view(size)
        if whole[2:] == g.out_size:
            y.as_strided(size, strides).copy_(back)
        else:
            y.copy_(back.permute(order).reshape(whole)[:, :, : g.out_size[0], : g.out_size[1]])

    return run


def _gather_by_product(g: Geometry, x: torch.Tensor) -> Finish:
    matrix = _matrix(tuple(zip(*WEIGHTS, strict=True)), x.dtype, x.device)
    shape = (3, 3, g.in_channels, g.out_channels)

    def run(total: torch.Tensor, dw: torch.Tensor) -> None:
        dw.copy_(torch.mm(matrix, total.view(36, -1)).view(shape).permute(3, 2, 0, 1))

    return run


BY_PRODUCTS = Transforms(
    tiles=_tiles_by_product,
    errors=functools.partial(_tiles_by_product, is_error=True),
    weights=_weights_by_product,
    output=_output_by_product,
    gather=_gather_by_product,
    num_copies=2,
)


# -- transforms in Triton --------------------------------------------------------------------------

BLOCK = 128


def _kernels() -> Any:
    from penstock.conv.algorithms import winograd_kernels

    return winograd_kernels


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for float32, and sizes that kernels can index."""
    return can(g) and dtype == torch.float32 and can_gather(g, dtype)


def _launch(kernel: Any, num: int, *numbers: int, **constants: bool) -> Launch:
    """Return a launch with one lane for each of ``num`` pairs of tile and channel."""
    return Launch(kernel, (-(-num // BLOCK),), (num, *numbers), {**constants, "BLOCK": BLOCK})


def _tiles_fused(g: Geometry, x: torch.Tensor, *, is_error: bool = False) -> Step:
    (high, wide), channels = _tiles(g), g.out_channels if is_error else g.in_channels
    tiles = g.batch * high * wide
    shape = (36, tiles, channels) if g.is_channels_last else (36, channels, tiles)
    kernel = _kernels().transform_error if is_error else _kernels().transform_input
    size = g.out_size if is_error else (*g.in_size, *g.padding)
    numbers = (channels, tiles, high, wide, *size, *x.stride())
    launch = _launch(kernel, tiles * channels, *numbers, IS_LAST=g.is_channels_last)

    def run(x: torch.Tensor) -> torch.Tensor:
        v = x.new_empty(shape)
        launch(x, v)
        return v

    return run


def _weights_fused(g: Geometry, w: torch.Tensor, is_turned: bool) -> Step:
    output, channel, row, column = w.stride()
    first = 0
    if is_turned:
        output, channel, row, column = channel, output, -row, -column
        first = -2 * (row + column)
    shape = (36, g.out_channels, g.in_channels)
    num = g.out_channels * g.in_channels
    numbers = (g.in_channels, first, output, channel, row, column)
    launch = _launch(_kernels().transform_weights, num, *numbers)

    def run(w: torch.Tensor) -> torch.Tensor:
        u = w.new_empty(shape)
        launch(w, u)
        return u

    return run


def _output_fused(g: Geometry, x: torch.Tensor) -> Finish:
    high, wide = _tiles(g)
    tiles = g.batch * high * wide
    strides = g.strides(g.out_channels, g.out_size)
    numbers = (g.out_channels, tiles, high, wide, *g.out_size, *strides)
    num = tiles * g.out_channels
    return _launch(_kernels().transform_output, num, *numbers, IS_LAST=g.is_channels_last)


def _gather_fused(g: Geometry, x: torch.Tensor) -> Finish:
    strides = g.strides(g.in_channels, g.kernel)
    num = g.in_channels * g.out_channels
    return _launch(_kernels().gather_weights, num, g.out_channels, *strides)


FUSED = Transforms(
    tiles=_tiles_fused,
    errors=functools.partial(_tiles_fused, is_error=True),
    weights=_weights_fused,
    output=_output_fused,
    gather=_gather_fused,
    num_copies=1,
)


# -- the passes ------------------------------------------------------------------------------------


def _chunks(g: Geometry, x: torch.Tensor, cap: int, by: Transforms) -> list[tuple[slice, Geometry]]:
    """Return chunks of samples under the cap, each with the geometry of its convolution."""
    high, wide = _tiles(g)
    cells = 36 * high * wide * (g.in_channels + g.out_channels) * by.num_copies
    most = (1 << 31) // (high * wide * max(g.in_channels, g.out_channels))
    step = min(samples_under(cap, cells * x.element_size(), g.batch), max(1, most))
    starts = range(0, g.batch, step)
    ranges = [slice(start, min(start + step, g.batch)) for start in starts]
    return [(samples, replace(g, batch=samples.stop - samples.start)) for samples in ranges]


def _prepare(
    g: Geometry,
    x: torch.Tensor,
    w: torch.Tensor,
    cap_bytes: int,
    by: Transforms,
    *,
    is_turned: bool,
) -> Prepared:
    weights = by.weights(g, w, is_turned)
    make = empty(g, g.out_channels, g.out_size, x.dtype)
    chunks = [
        (samples, by.tiles(part, x), by.output(part, x))
        for samples, part in _chunks(g, x, cap_bytes, by)
    ]

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        u = weights(w).transpose(1, 2) if g.is_channels_last else weights(w)
        y = make(x)
        for samples, transform, transform_back in chunks:
            v = transform(x if len(chunks) == 1 else x[samples])
            m = torch.bmm(v, u) if g.is_channels_last else torch.bmm(u, v)
            transform_back(m, y if len(chunks) == 1 else y[samples])
        return y

    return run


def prepare_forward(
    g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int, by: Transforms = BY_PRODUCTS
) -> Prepared:
    """Compute ``y`` as ``[batch, O, *out_size]``, in the geometry's memory layout."""
    return _prepare(g, x, w, cap_bytes, by, is_turned=False)


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int, by: Transforms = BY_PRODUCTS
) -> Prepared:
    """Compute ``dx`` as a forward pass with the taps in reverse and the channels swapped."""
    return _prepare(turned(g), dy, w, cap_bytes, by, is_turned=True)


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int, by: Transforms = BY_PRODUCTS
) -> Prepared:
    """Compute ``dw``: transform both tensors, multiply over the tiles, and transform back."""
    chunks = [
        (samples, by.tiles(part, x), by.errors(part, dy))
        for samples, part in _chunks(g, x, cap_bytes, by)
    ]
    make = empty(replace(g, batch=g.out_channels), g.in_channels, g.kernel, x.dtype)
    gather = by.gather(g, x)

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for samples, transform, transform_error in chunks:
            whole = len(chunks) == 1
            v, e = (
                transform(x if whole else x[samples]),
                transform_error(dy if whole else dy[samples]),
            )
            pair = (v.transpose(1, 2), e) if g.is_channels_last else (v, e.transpose(1, 2))
            total = torch.bmm(*pair) if total is None else total.baddbmm_(*pair)
        assert total is not None
        dw = make(total)
        gather(total, dw)
        return dw

    return run
