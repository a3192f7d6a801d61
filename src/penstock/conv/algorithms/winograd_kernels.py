"""Triton kernels for Winograd F(4x4), where each transform reads and writes each value once.

Imported only where Triton is installed. :mod:`penstock.conv.algorithms.winograd` launches them.
A lane holds one tile of one channel, with all 36 positions in registers.

Tested by ``tests/integration/conv/algorithms/test_triton_launch.py``.
"""

# Triton compiles the source of these functions itself, so Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from penstock.conv.algorithms.gemm_kernels import kernel


@triton.jit
def _find(index, channels, num_tiles, tiles_h, tiles_w, IS_LAST: tl.constexpr):
    """Return channel, sample, row and column of a lane's tile."""
    if IS_LAST:
        channel = index % channels
        tile = index // channels
    else:
        tile = index % num_tiles
        channel = index // num_tiles
    w = tile % tiles_w
    rest = tile // tiles_w
    h = rest % tiles_h
    return channel, (rest // tiles_h).to(tl.int64), h * 4, w * 4


@triton.jit
def _b(d0, d1, d2, d3, d4, d5):
    """Transform one line of an input tile."""
    return (
        4 * d0 - 5 * d2 + d4,
        d4 + d3 - 4 * (d1 + d2),
        d4 - d3 + 4 * (d1 - d2),
        d4 - d2 + 2 * (d3 - d1),
        d4 - d2 + 2 * (d1 - d3),
        4 * d1 - 5 * d3 + d5,
    )


@triton.jit
def _a(m0, m1, m2, m3, m4, m5):
    """Transform one line of products back to four positions."""
    p, q, r, s = m1 + m2, m1 - m2, m3 + m4, m3 - m4
    return m0 + p + r, q + 2 * s, p + 4 * r, q + 8 * s + m5


@triton.jit
def _spread(y0, y1, y2, y3):
    """Transform four positions of ``dy`` to six."""
    p, q, r, s = y0 + y2, y1 + y3, y0 + 4 * y2, 2 * y1 + 8 * y3
    return y0, p + q, p - q, r + s, r - s, y3


@triton.jit
def _load6(at, h, w, size_h, size_w, x_w, is_here):
    """Load and transform one row of six positions. Values outside the input are zero."""
    is_row = is_here & (h >= 0) & (h < size_h)
    d0 = tl.load(at, mask=is_row & (w >= 0) & (w < size_w), other=0.0)
    d1 = tl.load(at + x_w, mask=is_row & (w + 1 >= 0) & (w + 1 < size_w), other=0.0)
    d2 = tl.load(at + 2 * x_w, mask=is_row & (w + 2 >= 0) & (w + 2 < size_w), other=0.0)
    d3 = tl.load(at + 3 * x_w, mask=is_row & (w + 3 >= 0) & (w + 3 < size_w), other=0.0)
    d4 = tl.load(at + 4 * x_w, mask=is_row & (w + 4 >= 0) & (w + 4 < size_w), other=0.0)
    d5 = tl.load(at + 5 * x_w, mask=is_row & (w + 5 >= 0) & (w + 5 < size_w), other=0.0)
    return _b(d0, d1, d2, d3, d4, d5)


@triton.jit
def _store6(at, step, v0, v1, v2, v3, v4, v5, is_here):
    tl.store(at, v0, mask=is_here)
    tl.store(at + 6 * step, v1, mask=is_here)
    tl.store(at + 12 * step, v2, mask=is_here)
    tl.store(at + 18 * step, v3, mask=is_here)
    tl.store(at + 24 * step, v4, mask=is_here)
    tl.store(at + 30 * step, v5, mask=is_here)


@triton.jit
def _store_b(at, step, d0, d1, d2, d3, d4, d5, is_here):
    d0, d1, d2, d3, d4, d5 = _b(d0, d1, d2, d3, d4, d5)
    _store6(at, step, d0, d1, d2, d3, d4, d5, is_here)


@kernel
def transform_input(
    x, v,
    num, channels, num_tiles, tiles_h, tiles_w, size_h, size_w,
    pad_h, pad_w,
    x_n, x_c, x_h, x_w,
    IS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``v[36, channels and tiles]``, in the order of the memory layout."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    channel, sample, h, w = _find(index, channels, num_tiles, tiles_h, tiles_w, IS_LAST)
    h = h - pad_h
    w = w - pad_w
    at = x + sample * x_n + channel * x_c + h * x_h + w * x_w
    a0, a1, a2, a3, a4, a5 = _load6(at, h, w, size_h, size_w, x_w, is_here)
    b0, b1, b2, b3, b4, b5 = _load6(at + x_h, h + 1, w, size_h, size_w, x_w, is_here)
    c0, c1, c2, c3, c4, c5 = _load6(at + 2 * x_h, h + 2, w, size_h, size_w, x_w, is_here)
    d0, d1, d2, d3, d4, d5 = _load6(at + 3 * x_h, h + 3, w, size_h, size_w, x_w, is_here)
    e0, e1, e2, e3, e4, e5 = _load6(at + 4 * x_h, h + 4, w, size_h, size_w, x_w, is_here)
    f0, f1, f2, f3, f4, f5 = _load6(at + 5 * x_h, h + 5, w, size_h, size_w, x_w, is_here)
    out = v + index
    step = num.to(tl.int64)
    _store_b(out, step, a0, b0, c0, d0, e0, f0, is_here)
    _store_b(out + step, step, a1, b1, c1, d1, e1, f1, is_here)
    _store_b(out + 2 * step, step, a2, b2, c2, d2, e2, f2, is_here)
    _store_b(out + 3 * step, step, a3, b3, c3, d3, e3, f3, is_here)
    _store_b(out + 4 * step, step, a4, b4, c4, d4, e4, f4, is_here)
    _store_b(out + 5 * step, step, a5, b5, c5, d5, e5, f5, is_here)


@triton.jit
def _load4(at, h, w, size_h, size_w, y_w, is_here):
    """Load one row of four positions of ``dy`` and transform it to six. Zero outside ``dy``."""
    is_row = is_here & (h < size_h)
    y0 = tl.load(at, mask=is_row & (w < size_w), other=0.0)
    y1 = tl.load(at + y_w, mask=is_row & (w + 1 < size_w), other=0.0)
    y2 = tl.load(at + 2 * y_w, mask=is_row & (w + 2 < size_w), other=0.0)
    y3 = tl.load(at + 3 * y_w, mask=is_row & (w + 3 < size_w), other=0.0)
    return _spread(y0, y1, y2, y3)


@triton.jit
def _store_spread(at, step, y0, y1, y2, y3, is_here):
    v0, v1, v2, v3, v4, v5 = _spread(y0, y1, y2, y3)
    _store6(at, step, v0, v1, v2, v3, v4, v5, is_here)


@kernel
def transform_error(
    dy, v,
    num, channels, num_tiles, tiles_h, tiles_w, size_h, size_w,
    y_n, y_c, y_h, y_w,
    IS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``v[36, channels and tiles]`` of ``dy``: tiles of 4x4 positions become 6x6."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    channel, sample, h, w = _find(index, channels, num_tiles, tiles_h, tiles_w, IS_LAST)
    at = dy + sample * y_n + channel * y_c + h * y_h + w * y_w
    a0, a1, a2, a3, a4, a5 = _load4(at, h, w, size_h, size_w, y_w, is_here)
    b0, b1, b2, b3, b4, b5 = _load4(at + y_h, h + 1, w, size_h, size_w, y_w, is_here)
    c0, c1, c2, c3, c4, c5 = _load4(at + 2 * y_h, h + 2, w, size_h, size_w, y_w, is_here)
    d0, d1, d2, d3, d4, d5 = _load4(at + 3 * y_h, h + 3, w, size_h, size_w, y_w, is_here)
    out = v + index
    step = num.to(tl.int64)
    _store_spread(out, step, a0, b0, c0, d0, is_here)
    _store_spread(out + step, step, a1, b1, c1, d1, is_here)
    _store_spread(out + 2 * step, step, a2, b2, c2, d2, is_here)
    _store_spread(out + 3 * step, step, a3, b3, c3, d3, is_here)
    _store_spread(out + 4 * step, step, a4, b4, c4, d4, is_here)
    _store_spread(out + 5 * step, step, a5, b5, c5, d5, is_here)


@triton.jit
def _products(at, step, is_here):
    """Load the six products of one column of a tile."""
    m0 = tl.load(at, mask=is_here, other=0.0)
    m1 = tl.load(at + 6 * step, mask=is_here, other=0.0)
    m2 = tl.load(at + 12 * step, mask=is_here, other=0.0)
    m3 = tl.load(at + 18 * step, mask=is_here, other=0.0)
    m4 = tl.load(at + 24 * step, mask=is_here, other=0.0)
    m5 = tl.load(at + 30 * step, mask=is_here, other=0.0)
    return m0, m1, m2, m3, m4, m5


@triton.jit
def _places(at, step, is_here):
    """Load the products of one column and transform them back to four positions."""
    m0, m1, m2, m3, m4, m5 = _products(at, step, is_here)
    return _a(m0, m1, m2, m3, m4, m5)


@triton.jit
def _store4(at, h, w, size_h, size_w, y_w, m0, m1, m2, m3, m4, m5, is_here):
    """Transform six products of one row back to four positions of ``y``, and store them."""
    y0, y1, y2, y3 = _a(m0, m1, m2, m3, m4, m5)
    is_row = is_here & (h < size_h)
    tl.store(at, y0, mask=is_row & (w < size_w))
    tl.store(at + y_w, y1, mask=is_row & (w + 1 < size_w))
    tl.store(at + 2 * y_w, y2, mask=is_row & (w + 2 < size_w))
    tl.store(at + 3 * y_w, y3, mask=is_row & (w + 3 < size_w))


@kernel
def transform_output(
    m, y,
    num, channels, num_tiles, tiles_h, tiles_w, size_h, size_w,
    y_n, y_c, y_h, y_w,
    IS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Transform ``m[36, channels and tiles]`` back to ``y``."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    channel, sample, h, w = _find(index, channels, num_tiles, tiles_h, tiles_w, IS_LAST)
    step = num.to(tl.int64)
    at = m + index
    a0, b0, c0, d0 = _places(at, step, is_here)
    a1, b1, c1, d1 = _places(at + step, step, is_here)
    a2, b2, c2, d2 = _places(at + 2 * step, step, is_here)
    a3, b3, c3, d3 = _places(at + 3 * step, step, is_here)
    a4, b4, c4, d4 = _places(at + 4 * step, step, is_here)
    a5, b5, c5, d5 = _places(at + 5 * step, step, is_here)
    out = y + sample * y_n + channel * y_c + h * y_h + w * y_w
    _store4(out, h, w, size_h, size_w, y_w, a0, a1, a2, a3, a4, a5, is_here)
    _store4(out + y_h, h + 1, w, size_h, size_w, y_w, b0, b1, b2, b3, b4, b5, is_here)
    _store4(out + 2 * y_h, h + 2, w, size_h, size_w, y_w, c0, c1, c2, c3, c4, c5, is_here)
    _store4(out + 3 * y_h, h + 3, w, size_h, size_w, y_w, d0, d1, d2, d3, d4, d5, is_here)


@triton.jit
def _g(w0, w1, w2):
    """Transform one line of three taps."""
    p, q = (w0 + w2) / 6, w1 / 6
    r, s = w0 / 24 + w2 / 6, w1 / 12
    return w0 / 4, -p - q, q - p, r + s, r - s, w2


@triton.jit
def _g_back(m0, m1, m2, m3, m4, m5):
    """Transform one line of six products back to three taps."""
    p, q, r, s = m1 + m2, m2 - m1, m3 + m4, m3 - m4
    return m0 / 4 - p / 6 + r / 24, q / 6 + s / 12, (r - p) / 6 + m5


@triton.jit
def _load_g(at, w_w, is_here):
    w0 = tl.load(at, mask=is_here, other=0.0)
    w1 = tl.load(at + w_w, mask=is_here, other=0.0)
    w2 = tl.load(at + 2 * w_w, mask=is_here, other=0.0)
    return _g(w0, w1, w2)


@triton.jit
def _store_g(at, step, w0, w1, w2, is_here):
    v0, v1, v2, v3, v4, v5 = _g(w0, w1, w2)
    _store6(at, step, v0, v1, v2, v3, v4, v5, is_here)


@kernel
def transform_weights(w, u, num, channels, first, w_o, w_c, w_h, w_w, BLOCK: tl.constexpr):
    """Compute ``u[36, output, channel]``.

    For reversed taps, ``first`` is the offset of the last tap, and the tap strides are negative.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    at = w + first + index // channels * w_o + index % channels * w_c
    a0, a1, a2, a3, a4, a5 = _load_g(at, w_w, is_here)
    b0, b1, b2, b3, b4, b5 = _load_g(at + w_h, w_w, is_here)
    c0, c1, c2, c3, c4, c5 = _load_g(at + 2 * w_h, w_w, is_here)
    out = u + index
    step = num.to(tl.int64)
    _store_g(out, step, a0, b0, c0, is_here)
    _store_g(out + step, step, a1, b1, c1, is_here)
    _store_g(out + 2 * step, step, a2, b2, c2, is_here)
    _store_g(out + 3 * step, step, a3, b3, c3, is_here)
    _store_g(out + 4 * step, step, a4, b4, c4, is_here)
    _store_g(out + 5 * step, step, a5, b5, c5, is_here)


@triton.jit
def _taps(at, step, is_here):
    """Load the products of one column and transform them back to three taps."""
    m0, m1, m2, m3, m4, m5 = _products(at, step, is_here)
    return _g_back(m0, m1, m2, m3, m4, m5)


@triton.jit
def _store_taps(at, w_w, m0, m1, m2, m3, m4, m5, is_here):
    """Transform six products of one row back to three taps, and store them."""
    w0, w1, w2 = _g_back(m0, m1, m2, m3, m4, m5)
    tl.store(at, w0, mask=is_here)
    tl.store(at + w_w, w1, mask=is_here)
    tl.store(at + 2 * w_w, w2, mask=is_here)


@kernel
def gather_weights(m, dw, num, outputs, w_o, w_c, w_h, w_w, BLOCK: tl.constexpr):
    """Transform ``m[36, channel, output]`` back to ``dw``."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    step = num.to(tl.int64)
    at = m + index
    a0, b0, c0 = _taps(at, step, is_here)
    a1, b1, c1 = _taps(at + step, step, is_here)
    a2, b2, c2 = _taps(at + 2 * step, step, is_here)
    a3, b3, c3 = _taps(at + 3 * step, step, is_here)
    a4, b4, c4 = _taps(at + 4 * step, step, is_here)
    a5, b5, c5 = _taps(at + 5 * step, step, is_here)
    out = dw + index % outputs * w_o + index // outputs * w_c
    _store_taps(out, w_w, a0, a1, a2, a3, a4, a5, is_here)
    _store_taps(out + w_h, w_w, b0, b1, b2, b3, b4, b5, is_here)
    _store_taps(out + 2 * w_h, w_w, c0, c1, c2, c3, c4, c5, is_here)
