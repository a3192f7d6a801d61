"""3x3 kernels with stride 1 in fewer multiplications (Winograd), as three matrix products.

The input is cut into overlapping tiles, each tile and the weights are transformed, the transformed
tiles are multiplied with the weights over the channels (one product for each of the tile's places),
and the results are transformed back::

    tiles [t*t, C, P]  --B-->  V   U @ V = M   M  --A-->  y, m*m places for each tile

F(4x4): tiles of 6x6, 4 times fewer multiplications; float32 and float64.
F(2x2): tiles of 4x4, 2.25 times fewer; half types, with the transforms in float32.

Error: transforms add and subtract values of different size, which costs digits. Against the sum of
absolute products ``|x| * |w|`` at the same place, with ``eps`` of the type that is multiplied:
F(4x4) at most 128 eps, F(2x2) at most 16 eps (tests hold both against float64, and the largest
seen was 81 eps, for a weight gradient over 20 places).

Memory beside inputs and results, in elements: ``t*t * P * (2C + O)`` for the ``P`` tiles of a chunk
of samples, with ``t*t/(m*m)`` = 2.25 or 4 times as many elements as places; the chunk is chosen so
that this stays under the cap, or is one sample. The weights take ``t*t * C * O``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from penstock.conv.geometry import Geometry


@dataclass(frozen=True)
class Scheme:
    """One of the two: ``m`` places of output from tiles of ``t`` places."""

    m: int
    t: int
    b: tuple[tuple[float, ...], ...]
    g: tuple[tuple[float, ...], ...]
    a: tuple[tuple[float, ...], ...]


F4 = Scheme(
    m=4,
    t=6,
    b=(
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
    g=(
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
    a=((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
)
F2 = Scheme(
    m=2,
    t=4,
    b=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    g=((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    a=((1, 1, 1, 0), (0, 1, -1, -1)),
)


def scheme_for(dtype: torch.dtype) -> Scheme:
    """F(2x2) for half types, F(4x4) for the others."""
    return F2 if dtype in (torch.float16, torch.bfloat16) else F4


def can(g: Geometry) -> bool:
    """Is this a convolution that Winograd's way is for?

    Example:
        >>> from penstock.conv.geometry import Geometry
        >>> can(Geometry(batch=1, in_channels=8, out_channels=8, groups=1, in_size=(8, 8),
        ...              out_size=(4, 4), kernel=(3, 3), stride=(2, 2), padding=(1, 1),
        ...              dilation=(1, 1)))
        False
    """
    return g.kernel == (3, 3) and g.groups == 1 and g.is_unit_stride and g.is_undilated


@lru_cache(maxsize=64)
def _matrix(
    rows: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The transform of both axes at once."""
    one = torch.tensor(rows, dtype=torch.float64)
    return torch.kron(one, one).to(device=device, dtype=dtype)


def transform_weights(scheme: Scheme, w: torch.Tensor) -> torch.Tensor:
    """``U`` as ``[t*t, O, C]``, in the type of ``w``."""
    sums = w.dtype if w.element_size() > 2 else torch.float32
    matrix = _matrix(scheme.g, sums, w.device)
    flat = w.reshape(-1, 9).t().to(sums)
    u = torch.mm(matrix, flat).to(w.dtype)
    return u.view(scheme.t**2, w.shape[0], w.shape[1])


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``y`` as ``[batch, O, *out_size]``, laid out as the geometry says."""
    scheme = scheme_for(x.dtype)
    u = transform_weights(scheme, w)
    high, wide = (-(-n // scheme.m) for n in g.out_size)
    cells = scheme.t**2 * high * wide * (2 * g.in_channels + g.out_channels)
    step = max(1, min(g.batch, cap_bytes // (cells * max(4, x.element_size()))))
    y = _empty(g, x)
    for start in range(0, g.batch, step):
        part = x[start : start + step]
        y[start : start + step] = _chunk(g, scheme, part, u, (high, wide))
    return y


def _chunk(
    g: Geometry, scheme: Scheme, x: torch.Tensor, u: torch.Tensor, tiles: tuple[int, int]
) -> torch.Tensor:
    num, (high, wide), t, m = x.shape[0], tiles, scheme.t, scheme.m
    sums = x.dtype if x.element_size() > 2 else torch.float32
    transformed = _transform_input(g, scheme, x, tiles)
    places = num * high * wide
    if g.is_channels_last:
        products = torch.bmm(transformed.view(t * t, places, g.in_channels), u.transpose(1, 2))
    else:
        products = torch.bmm(u, transformed.view(t * t, g.in_channels, places))
    back = torch.mm(_matrix(scheme.a, sums, x.device), products.view(t * t, -1).to(sums))
    if g.is_channels_last:
        shaped = back.view(m, m, num, high, wide, g.out_channels).permute(2, 5, 3, 0, 4, 1)
    else:
        shaped = back.view(m, m, g.out_channels, num, high, wide).permute(3, 2, 4, 0, 5, 1)
    whole = shaped.reshape(num, g.out_channels, high * m, wide * m)
    return whole[:, :, : g.out_size[0], : g.out_size[1]]


def _transform_input(
    g: Geometry, scheme: Scheme, x: torch.Tensor, tiles: tuple[int, int]
) -> torch.Tensor:
    """``V`` as ``[t*t, channels and tiles]``, the innermost as the layout has it."""
    (high, wide), t, m = tiles, scheme.t, scheme.m
    top, left = g.padding
    bottom = high * m + 2 - g.in_size[0] - top
    right = wide * m + 2 - g.in_size[1] - left
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    n, c, h, v = padded.stride()
    if g.is_channels_last:
        size = (t, t, x.shape[0], high, wide, g.in_channels)
        seen = padded.as_strided(size, (h, v, n, m * h, m * v, c))
    else:
        size = (t, t, g.in_channels, x.shape[0], high, wide)
        seen = padded.as_strided(size, (h, v, c, n, m * h, m * v))
    sums = x.dtype if x.element_size() > 2 else torch.float32
    matrix = _matrix(scheme.b, sums, x.device)
    return torch.mm(matrix, seen.reshape(t * t, -1).to(sums)).to(x.dtype)


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dw``: both transforms the other way round, and the product over the tiles.

    Its error has the same bound, against ``|x| * |dy|`` summed over all places.
    """
    scheme = scheme_for(x.dtype)
    t, m = scheme.t, scheme.m
    high, wide = (-(-n // m) for n in g.out_size)
    sums = x.dtype if x.element_size() > 2 else torch.float32
    cells = t**2 * high * wide * 2 * (g.in_channels + g.out_channels)
    step = max(1, min(g.batch, cap_bytes // (cells * max(4, x.element_size()))))
    total = x.new_zeros((t * t, g.in_channels, g.out_channels), dtype=sums)
    spread = _matrix(tuple(zip(*scheme.a, strict=True)), sums, x.device)
    for start in range(0, g.batch, step):
        v = _transform_input(g, scheme, x[start : start + step], (high, wide))
        errors = _tiles_of(g, scheme, dy[start : start + step], (high, wide))
        spread_errors = torch.mm(spread, errors.to(sums)).to(x.dtype)
        if g.is_channels_last:
            pair = (
                v.view(t * t, -1, g.in_channels).transpose(1, 2),
                spread_errors.view(t * t, -1, g.out_channels),
            )
        else:
            pair = (
                v.view(t * t, g.in_channels, -1),
                spread_errors.view(t * t, g.out_channels, -1).transpose(1, 2),
            )
        total += torch.bmm(*pair)
    return gather_weights(scheme, total).to(x.dtype)


def gather_weights(scheme: Scheme, total: torch.Tensor) -> torch.Tensor:
    """``[t*t, C, O]`` back to ``[O, C, 3, 3]``."""
    num, channels, outputs = total.shape
    matrix = _matrix(tuple(zip(*scheme.g, strict=True)), total.dtype, total.device)
    dw = torch.mm(matrix, total.view(num, -1)).view(3, 3, channels, outputs)
    return dw.permute(3, 2, 0, 1)


def _tiles_of(
    g: Geometry, scheme: Scheme, dy: torch.Tensor, tiles: tuple[int, int]
) -> torch.Tensor:
    """``dy`` cut into tiles of ``m*m`` places: ``[m*m, channels and tiles]``."""
    (high, wide), m = tiles, scheme.m
    bottom, right = high * m - g.out_size[0], wide * m - g.out_size[1]
    padded = torch.nn.functional.pad(dy, (0, right, 0, bottom)) if bottom or right else dy
    cut = padded.reshape(dy.shape[0], g.out_channels, high, m, wide, m)
    order = (3, 5, 0, 2, 4, 1) if g.is_channels_last else (3, 5, 1, 0, 2, 4)
    return cut.permute(order).reshape(m * m, -1)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dx``: the same with the taps in reverse and the channels exchanged."""
    return forward(turned(g), dy, w.flip((2, 3)).transpose(0, 1), cap_bytes)


def turned(g: Geometry) -> Geometry:
    """The convolution that computes the input gradient; padding is at most 2."""
    return replace(
        g,
        in_channels=g.out_channels,
        out_channels=g.in_channels,
        in_size=g.out_size,
        out_size=g.in_size,
        padding=tuple(2 - p for p in g.padding),
    )


def can_input_gradient(g: Geometry) -> bool:
    return can(g) and all(p <= 2 for p in g.padding)


def _empty(g: Geometry, x: torch.Tensor) -> torch.Tensor:
    if g.is_channels_last:
        return x.new_empty((g.batch, *g.out_size, g.out_channels)).permute(0, 3, 1, 2)
    return x.new_empty((g.batch, g.out_channels, *g.out_size))
