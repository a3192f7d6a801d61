"""Winograd convolution: 3x3 kernels with stride 1 in fewer multiplications.

The input is cut into overlapping tiles. Each tile and the weights are transformed, the transformed
tiles are multiplied by the weights over the channels (one product for each position in a tile), and
the results are transformed back::

    tiles [36, C, P]  --B-->  V   U @ V = M   M  --A-->  y, 16 positions for each tile

F(4x4): tiles of 6x6, 4 times fewer multiplications, for float32 and float64.

Error: the transforms add and subtract values of different sizes, which loses digits. Relative to
the sum of absolute products ``|x| * |w|`` at the same position, the result is off by at most 128
eps. Tests check this against float64. The largest error seen was 81 eps, for a weight gradient
over 20 positions.

Memory in addition to inputs and results, in elements: ``36 * P * (2C + O)`` for the ``P`` tiles of
a chunk of samples. Tiles have 2.25 times as many elements as positions. The chunk size is chosen
so that this stays under the cap, or is one sample. The weights take ``36 * C * O``.

The ``prepare_*`` passes are F(4x4) in float32, with transforms in Triton and the same error bound.
These transforms read and write each value once: a tile is not stored before it is transformed.
Memory: ``36 * P * (C + O)`` for the tiles of a chunk, and ``36 * C * O`` for the weights.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from penstock.conv.algorithms.implicit_gemm import Strides
from penstock.conv.algorithms.implicit_gemm import can as can_gather
from penstock.conv.algorithms.triton_launch import Launch
from penstock.conv.geometry import Geometry, Prepared, empty, samples_under, turned

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
    return g.kernel == (3, 3) and g.groups == 1 and g.is_unit_stride and g.is_undilated


@functools.lru_cache(maxsize=64)
def _matrix(rows: Matrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the matrix that transforms both axes."""
    one = torch.tensor(rows, dtype=torch.float64)
    return torch.kron(one, one).to(device=device, dtype=dtype)


def _transform(rows: Matrix, values: torch.Tensor) -> torch.Tensor:
    """Multiply ``values``, with the positions of a tile outermost, by the matrix of ``rows``."""
    return torch.mm(
        _matrix(rows, values.dtype, values.device), values.reshape(len(rows[0]) ** 2, -1)
    )


def transform_weights(w: torch.Tensor, *, is_turned: bool = False) -> torch.Tensor:
    """Return ``U`` as ``[36, O, C]``. ``is_turned`` reverses the taps."""
    rows = tuple(row[::-1] for row in WEIGHTS) if is_turned else WEIGHTS
    return _transform(rows, w.reshape(-1, 9).t()).view(36, w.shape[0], w.shape[1])


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``y`` as ``[batch, O, *out_size]``, in the geometry's memory layout."""
    return _forward(g, x, transform_weights(w), cap_bytes)


def _forward(g: Geometry, x: torch.Tensor, u: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    high, wide = _tiles(g)
    cells = 36 * high * wide * (2 * g.in_channels + g.out_channels)
    step = samples_under(cap_bytes, cells * x.element_size(), g.batch)
    if step == g.batch:
        return _chunk(g, x, u)
    y = empty(g, g.out_channels, g.out_size, x.dtype)(x)
    for start in range(0, g.batch, step):
        y[start : start + step] = _chunk(g, x[start : start + step], u)
    return y


def _chunk(g: Geometry, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    num, (high, wide) = x.shape[0], _tiles(g)
    v = _transform_input(g, x)
    if g.is_channels_last:
        products = torch.bmm(v.view(36, -1, g.in_channels), u.transpose(1, 2))
        back = _transform(OUTPUT, products).view(4, 4, num, high, wide, g.out_channels)
        shaped = back.permute(2, 5, 3, 0, 4, 1)
    else:
        products = torch.bmm(u, v.view(36, g.in_channels, -1))
        back = _transform(OUTPUT, products).view(4, 4, g.out_channels, num, high, wide)
        shaped = back.permute(3, 2, 4, 0, 5, 1)
    whole = shaped.reshape(num, g.out_channels, high * 4, wide * 4)
    return whole[:, :, : g.out_size[0], : g.out_size[1]]


def _transform_input(g: Geometry, x: torch.Tensor) -> torch.Tensor:
    """Return ``V`` as ``[36, channels and tiles]``, in the order of the memory layout."""
    (high, wide), (top, left) = _tiles(g), g.padding
    bottom = high * 4 + 2 - g.in_size[0] - top
    right = wide * 4 + 2 - g.in_size[1] - left
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    n, c, h, v = padded.stride()
    if g.is_channels_last:
        size = (6, 6, x.shape[0], high, wide, g.in_channels)
        seen = padded.as_strided(size, (h, v, n, 4 * h, 4 * v, c))
    else:
        size = (6, 6, g.in_channels, x.shape[0], high, wide)
        seen = padded.as_strided(size, (h, v, c, n, 4 * h, 4 * v))
    return _transform(INPUT, seen)


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dw`` with the transposed transforms and a product over the tiles.

    The error has the same bound, relative to ``|x| * |dy|`` summed over all positions.
    """
    high, wide = _tiles(g)
    cells = 36 * high * wide * 2 * (g.in_channels + g.out_channels)
    step = samples_under(cap_bytes, cells * x.element_size(), g.batch)
    total: torch.Tensor | None = None
    spread, gather = (tuple(zip(*rows, strict=True)) for rows in (OUTPUT, WEIGHTS))
    for start in range(0, g.batch, step):
        v = _transform_input(g, x[start : start + step])
        e = _transform(spread, _tiles_of(g, dy[start : start + step]))
        if g.is_channels_last:
            v, e = v.view(36, -1, g.in_channels).transpose(1, 2), e.view(36, -1, g.out_channels)
        else:
            v, e = v.view(36, g.in_channels, -1), e.view(36, g.out_channels, -1).transpose(1, 2)
        total = torch.bmm(v, e) if total is None else total.baddbmm_(v, e)
    assert total is not None
    dw = _transform(gather, total).view(3, 3, g.in_channels, g.out_channels)
    return dw.permute(3, 2, 0, 1)


def _tiles_of(g: Geometry, dy: torch.Tensor) -> torch.Tensor:
    """Cut ``dy`` into tiles of 4x4 positions: ``[4, 4, channels and tiles]``."""
    high, wide = _tiles(g)
    bottom, right = high * 4 - g.out_size[0], wide * 4 - g.out_size[1]
    padded = torch.nn.functional.pad(dy, (0, right, 0, bottom)) if bottom or right else dy
    cut = padded.reshape(dy.shape[0], g.out_channels, high, 4, wide, 4)
    return cut.permute((3, 5, 0, 2, 4, 1) if g.is_channels_last else (3, 5, 1, 0, 2, 4))


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``dx`` as a forward pass with the taps in reverse and the channels swapped."""
    u = transform_weights(w, is_turned=True)
    return _forward(turned(g), dy, u.transpose(1, 2), cap_bytes)


def _tiles(g: Geometry) -> tuple[int, int]:
    return -(-g.out_size[0] // 4), -(-g.out_size[1] // 4)


def can_input_gradient(g: Geometry) -> bool:
    return can(g) and all(p <= 2 for p in g.padding)


# -- Triton ----------------------------------------------------------------------------------------

BLOCK = 128
Stage = Callable[[torch.Tensor], torch.Tensor]


def _kernels() -> Any:
    from penstock.conv.algorithms import winograd_kernels

    return winograd_kernels


def can_triton(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True for a float32 convolution whose forward pass and input gradient are supported."""
    return can_input_gradient(g) and dtype == torch.float32 and can_gather(g, dtype)


def _step(g: Geometry, cap_bytes: int) -> int:
    high, wide = _tiles(g)
    sample_bytes = 36 * high * wide * (g.in_channels + g.out_channels) * 4
    most = (1 << 31) // (high * wide * max(g.in_channels, g.out_channels))
    return max(1, min(g.batch, cap_bytes // sample_bytes, most))


def _launch(kernel: Any, num: int, *numbers: int, **constants: bool) -> Launch:
    """Return a launch with one lane for each of ``num`` pairs of tile and channel."""
    return Launch(kernel, (-(-num // BLOCK),), (num, *numbers), {**constants, "BLOCK": BLOCK})


def _prepare_tiles(g: Geometry, channels: int, strides: Strides, *, is_error: bool) -> Stage:
    """Return the transform to ``[36, channels, tiles]``, or ``[36, tiles, channels]`` if last."""
    high, wide = _tiles(g)
    tiles = g.batch * high * wide
    shape = (36, tiles, channels) if g.is_channels_last else (36, channels, tiles)
    kernel = _kernels().transform_error if is_error else _kernels().transform_input
    size = g.out_size if is_error else (*g.in_size, *g.padding)
    numbers = (channels, tiles, high, wide, *size, *strides)
    launch = _launch(kernel, tiles * channels, *numbers, IS_LAST=g.is_channels_last)

    def run(x: torch.Tensor) -> torch.Tensor:
        v = x.new_empty(shape)
        launch(x, v)
        return v

    return run


def _prepare_weights(g: Geometry, strides: Strides, *, is_turned: bool) -> Stage:
    """Return the transform of the weights to ``[36, O, C]``.

    Args:
        is_turned: ``g`` computes the input gradient of the convolution that the weights belong to.
    """
    output, channel, row, column = strides
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


def _prepare_output(g: Geometry) -> Launch:
    """Return the launch that transforms the products of a chunk into its part of ``y``."""
    high, wide = _tiles(g)
    tiles = g.batch * high * wide
    strides = g.strides(g.out_channels, g.out_size)
    numbers = (g.out_channels, tiles, high, wide, *g.out_size, *strides)
    num = tiles * g.out_channels
    return _launch(_kernels().transform_output, num, *numbers, IS_LAST=g.is_channels_last)


def _chunks(g: Geometry, step: int) -> Iterator[tuple[slice, Geometry]]:
    """Yield chunks of samples, each with the geometry of its convolution."""
    for start in range(0, g.batch, step):
        stop = min(start + step, g.batch)
        yield slice(start, stop), replace(g, batch=stop - start)


def _prepare(
    g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int, *, is_turned: bool
) -> Prepared:
    step, strides = _step(g, cap_bytes), x.stride()
    weights = _prepare_weights(g, w.stride(), is_turned=is_turned)
    make = empty(g, g.out_channels, g.out_size, torch.float32)
    chunks = [
        (
            samples,
            _prepare_tiles(part, g.in_channels, strides, is_error=False),
            _prepare_output(part),
        )
        for samples, part in _chunks(g, step)
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


def prepare_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> Prepared:
    """Compute ``y`` as ``[batch, O, *out_size]``, in the geometry's memory layout."""
    return _prepare(g, x, w, cap_bytes, is_turned=False)


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dx`` as a forward pass with the taps in reverse and the channels swapped."""
    return _prepare(turned(g), dy, w, cap_bytes, is_turned=True)


def prepare_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> Prepared:
    """Compute ``dw``: transform both tensors, multiply over the tiles, and transform back."""
    chunks = [
        (
            samples,
            _prepare_tiles(part, g.in_channels, x.stride(), is_error=False),
            _prepare_tiles(part, g.out_channels, dy.stride(), is_error=True),
        )
        for samples, part in _chunks(g, _step(g, cap_bytes))
    ]
    make = empty(replace(g, batch=g.out_channels), g.in_channels, g.kernel, torch.float32)
    strides = g.strides(g.in_channels, g.kernel)
    num = g.in_channels * g.out_channels
    gather = _launch(_kernels().gather_weights, num, g.out_channels, *strides)

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
