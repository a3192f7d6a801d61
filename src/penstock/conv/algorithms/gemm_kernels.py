"""Triton kernels for implicit GEMM, for columns, for sums of partial results, and for col2im.

Imported only where Triton is installed. :mod:`penstock.conv.algorithms.implicit_gemm`,
:mod:`penstock.conv.algorithms.im2col` and :mod:`penstock.conv.algorithms.col2im` launch them. The
first two address tensors by strides, so one kernel serves both memory layouts. All sum in float32
(no TF32) and use no atomic operations, so the same call gives the same bits.

Tested by ``tests/integration/conv/algorithms/test_triton_launch.py``.
"""

# Triton compiles the source of these functions itself, so Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(num_m, num_n, GROUP_M: tl.constexpr):
    """Return this program's tile. Neighboring programs share rows, which stay in the cache."""
    pid = tl.program_id(0)
    per_group = GROUP_M * num_n
    group = pid // per_group
    first = group * GROUP_M
    size = min(num_m - first, GROUP_M)
    inside = pid % per_group
    return first + inside % size, inside // size


_PLAIN = [
    *("num_rows", "rows_per_split", "out_h", "out_w", "in_h", "in_w", "taps_h", "taps_w", "depth"),
    *("stride_h", "stride_w", "step_h", "step_w", "offset_h", "offset_w", "pad_h", "pad_w"),
    *("out_d", "in_d", "taps_d", "stride_d", "step_d", "offset_d"),
    *("num_groups", "num", "splits", "taps", "merged", "batch"),
    *("num_tiles", "tiles_h", "tiles_w", "size_h", "size_w", "first"),
]
"""Arguments that Triton does not specialize kernels for. Strides are not listed: a kernel compiled
for multiples of 16 reads 16 bytes at a time, which is worth another compilation."""


def kernel(function):
    """Make a Triton kernel that is not specialized for the arguments in :data:`_PLAIN`."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    plain = [name for name in _PLAIN if name in names]
    return triton.jit(do_not_specialize=plain)(function)


@triton.jit
def _places(rows, out_d, out_h, out_w, DEEP: tl.constexpr):
    """Return sample, depth, row and column of an output position."""
    w = rows % out_w
    rest = rows // out_w
    h = rest % out_h
    rest = rest // out_h
    d = 0
    if DEEP:
        d = rest % out_d
        rest = rest // out_d
    return rest.to(tl.int64), d, h, w


@triton.jit
def _split_tap(tap, taps_h, taps_w, DEEP: tl.constexpr):
    """Return the indices of a tap along each axis."""
    rest = tap // taps_w
    s = tap - rest * taps_w
    q = 0
    r = rest
    if DEEP:
        q = rest // taps_h
        r = rest - q * taps_h
    return q, r, s


@triton.jit
def _inside(first, step, size, taps):
    """Return bits that tell which of at most 31 taps along an axis are inside the input."""
    bits = first * 0
    for tap in range(taps):
        at = first + tap * step
        bits = bits | (((at >= 0) & (at < size)).to(tl.int32) << tap)
    return bits


@kernel
def gather_gemm(
    x, w, y,
    batch, out_d, out_h, out_w, in_d, in_h, in_w, channels, outputs, taps_d, taps_h, taps_w,
    stride_d, stride_h, stride_w, step_d, step_h, step_w, offset_d, offset_h, offset_w,
    x_n, x_c, x_d, x_h, x_w,
    w_g, w_q, w_r, w_s, w_c, w_k,
    y_n, y_c, y_d, y_h, y_w,
    DEEP: tl.constexpr, IS_PHASED: tl.constexpr, EVEN: tl.constexpr, IS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute ``y[n, o, h, w]``, the sum of ``x[n, c, h * stride + r * step + offset, ...] * w``.

    The weights are ``w[q, r, s, c, o]``. Forward pass: the step is the dilation, and the offset is
    minus the padding. Input gradient: the step is negative, and the offset is the padding. The
    second program axis is the group. DEEP: there are three spatial axes; without it, the depth is
    1. EVEN: each block of the depth is within one tap, so only one number is added to the addresses
    of a block to get those of the next. IS_PADDED: the last block of a tap has fewer channels.

    IS_PHASED computes all phases of a strided, undilated input gradient, one per program of the
    third axis. The stride is that of the convolution, and the sizes and strides cover all
    positions.
    """
    group = tl.program_id(1)
    w_first = 0
    y_first = 0
    if IS_PHASED:
        phase_w = tl.program_id(2) % stride_w
        phase_h = tl.program_id(2) // stride_w % stride_h
        first_h = (phase_h + offset_h) % stride_h
        first_w = (phase_w + offset_w) % stride_w
        w_first = first_h * w_r + first_w * w_s
        y_first = phase_h * y_h + phase_w * y_w
        out_h = tl.maximum(out_h - phase_h + stride_h - 1, 0) // stride_h
        out_w = tl.maximum(out_w - phase_w + stride_w - 1, 0) // stride_w
        taps_h = tl.maximum(taps_h - first_h + stride_h - 1, 0) // stride_h
        taps_w = tl.maximum(taps_w - first_w + stride_w - 1, 0) // stride_w
        offset_h = (phase_h + offset_h - first_h) // stride_h
        offset_w = (phase_w + offset_w - first_w) // stride_w
        w_r = w_r * stride_h
        w_s = w_s * stride_w
        y_h = y_h * stride_h
        y_w = y_w * stride_w
        if DEEP:
            phase_d = tl.program_id(2) // stride_w // stride_h
            first_d = (phase_d + offset_d) % stride_d
            w_first += first_d * w_q
            y_first += phase_d * y_d
            out_d = tl.maximum(out_d - phase_d + stride_d - 1, 0) // stride_d
            taps_d = tl.maximum(taps_d - first_d + stride_d - 1, 0) // stride_d
            offset_d = (phase_d + offset_d - first_d) // stride_d
            w_q = w_q * stride_d
            y_d = y_d * stride_d
        stride_d = 1
        stride_h = 1
        stride_w = 1
    depth = taps_h * taps_w * channels
    num_rows = batch * out_h * out_w
    if DEEP:
        depth = depth * taps_d
        num_rows = num_rows * out_d
    num_m = tl.cdiv(num_rows, BLOCK_M)
    num_n = tl.cdiv(outputs, BLOCK_N)
    if tl.program_id(0) >= num_m * num_n:
        return  # this phase has fewer positions than the first
    m, n = _tile(num_m, num_n, GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    sample, places_d, places_h, places_w = _places(rows, out_d, out_h, out_w, DEEP)
    is_row = rows < num_rows
    from_h = places_h * stride_h + offset_h
    from_w = places_w * stride_w + offset_w
    x_rows = x + sample * x_n + group * channels * x_c
    if DEEP:
        from_d = places_d * stride_d + offset_d
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    w_columns = w + w_first + group * w_g + columns * w_k
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if EVEN:
        x_base = x_rows + from_h * x_h + from_w * x_w
        taps = taps_h * taps_w
        if DEEP:
            x_base += from_d * x_d
            taps = taps * taps_d
        x_tile = x_base[:, None] + (inner * x_c)[None, :]
        w_tile = w_columns[None, :] + (inner * w_c)[:, None]
        inside_h = _inside(from_h, step_h, in_h, taps_h)
        inside_w = tl.where(is_row, _inside(from_w, step_w, in_w, taps_w), 0)
        per_tap = tl.cdiv(channels, BLOCK_K)
        for block in range(taps * per_tap):
            tap = block // per_tap
            first = (block - tap * per_tap) * BLOCK_K
            q, r, s = _split_tap(tap, taps_h, taps_w, DEEP)
            is_inside = ((inside_h >> r) & (inside_w >> s) & 1) != 0
            x_shift = r * step_h * x_h + s * step_w * x_w + first * x_c
            if DEEP:
                at_d = from_d + q * step_d
                is_inside = is_inside & (at_d >= 0) & (at_d < in_d)
                x_shift += q * step_d * x_d
            is_left = is_inside[:, None]
            is_right = is_column[None, :]
            if IS_PADDED:
                is_left = is_left & (first + inner < channels)[None, :]
                is_right = is_right & (first + inner < channels)[:, None]
            left = tl.load(x_tile + x_shift, mask=is_left, other=0.0)
            w_shift = q * w_q + r * w_r + s * w_s + first * w_c
            right = tl.load(w_tile + w_shift, mask=is_right, other=0.0)
            sums = tl.dot(left, right, sums, input_precision="ieee")
    else:
        for start in range(0, depth, BLOCK_K):
            k = start + inner
            tap = k // channels
            channel = k - tap * channels
            q, r, s = _split_tap(tap, taps_h, taps_w, DEEP)
            at_h = from_h[:, None] + (r * step_h)[None, :]
            at_w = from_w[:, None] + (s * step_w)[None, :]
            is_inside = (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            is_inside = is_inside & is_row[:, None] & (k < depth)[None, :]
            x_at = x_rows[:, None] + (channel * x_c)[None, :] + at_h * x_h + at_w * x_w
            if DEEP:
                at_d = from_d[:, None] + (q * step_d)[None, :]
                is_inside = is_inside & (at_d >= 0) & (at_d < in_d)
                x_at += at_d * x_d
            left = tl.load(x_at, mask=is_inside, other=0.0)
            right = tl.load(
                w_columns[None, :] + (q * w_q + r * w_r + s * w_s + channel * w_c)[:, None],
                mask=is_column[None, :] & (k < depth)[:, None],
                other=0.0,
            )
            sums = tl.dot(left, right, sums, input_precision="ieee")
    y_rows = y + y_first + sample * y_n + places_h * y_h + places_w * y_w
    if DEEP:
        y_rows += places_d * y_d
    y_at = y_rows[:, None] + ((group * outputs + columns) * y_c)[None, :]
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@kernel
def weight_gemm(
    x, dy, partial,
    num_rows, rows_per_split, out_d, out_h, out_w, in_d, in_h, in_w, channels, outputs,
    taps_h, taps_w, depth,
    stride_d, stride_h, stride_w, step_d, step_h, step_w, offset_d, offset_h, offset_w,
    x_n, x_c, x_d, x_h, x_w,
    y_n, y_c, y_d, y_h, y_w,
    num_groups,
    DEEP: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``partial[split, group, o, (q, r, s, c)]``, the sums over the positions of one split.

    :func:`sum_splits` adds the splits, in float32 and always in the same order. DEEP: there are
    three spatial axes. EVEN: each block of columns is within one tap.
    """
    group = tl.program_id(1)
    split = tl.program_id(2)
    num_n = tl.cdiv(depth, BLOCK_N)
    m = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n
    outs = m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_out = outs < outputs
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < depth
    tap = (n * BLOCK_N if EVEN else columns) // channels
    channel = columns - tap * channels
    q, r, s = _split_tap(tap, taps_h, taps_w, DEEP)
    shift_h = r * step_h + offset_h
    shift_w = s * step_w + offset_w
    if DEEP:
        shift_d = q * step_d + offset_d
    x_columns = x + (group * channels + channel) * x_c
    y_outs = dy + (group * outputs + outs) * y_c
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = split * rows_per_split
    last = min(first + rows_per_split, num_rows)
    for start in range(first, last, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        is_row = rows < last
        sample, places_d, places_h, places_w = _places(rows, out_d, out_h, out_w, DEEP)
        y_rows = sample * y_n + places_h * y_h + places_w * y_w
        if DEEP:
            y_rows += places_d * y_d
        left = tl.load(
            y_outs[:, None] + y_rows[None, :], mask=is_out[:, None] & is_row[None, :], other=0.0
        )
        if EVEN:
            at_h = places_h * stride_h + shift_h
            at_w = places_w * stride_w + shift_w
            is_inside = is_row & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            x_rows = sample * x_n + at_h * x_h + at_w * x_w
            if DEEP:
                at_d = places_d * stride_d + shift_d
                is_inside = is_inside & (at_d >= 0) & (at_d < in_d)
                x_rows += at_d * x_d
            right = tl.load(
                x_columns[None, :] + x_rows[:, None],
                mask=is_inside[:, None] & is_column[None, :],
                other=0.0,
            )
        else:
            at_h = (places_h * stride_h)[:, None] + shift_h[None, :]
            at_w = (places_w * stride_w)[:, None] + shift_w[None, :]
            is_inside = (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            is_inside = is_inside & is_row[:, None] & is_column[None, :]
            x_rows = (sample * x_n)[:, None] + at_h * x_h + at_w * x_w
            if DEEP:
                at_d = (places_d * stride_d)[:, None] + shift_d[None, :]
                is_inside = is_inside & (at_d >= 0) & (at_d < in_d)
                x_rows += at_d * x_d
            right = tl.load(x_columns[None, :] + x_rows, mask=is_inside, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    base = partial + (split * num_groups + group).to(tl.int64) * outputs * depth
    at = base + outs[:, None] * depth + columns[None, :]
    tl.store(at, sums, mask=is_out[:, None] & is_column[None, :])


@kernel
def gather_columns(
    x, cells,
    first, num_rows, out_d, out_h, out_w, in_d, in_h, in_w, channels, taps_d, taps_h, taps_w,
    stride_d, stride_h, stride_w, step_d, step_h, step_w, offset_d, offset_h, offset_w,
    x_n, x_c, x_d, x_h, x_w,
    DEEP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write ``cells[row, (q, r, s, c)]``, the columns of ``num_rows`` positions from ``first``.

    BLOCK_C divides the number of channels. Neighboring programs write the taps of the same rows.
    """
    taps = taps_d * taps_h * taps_w
    tap = tl.program_id(0) % taps
    rows = tl.program_id(0) // taps * BLOCK_R + tl.arange(0, BLOCK_R)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    sample, places_d, places_h, places_w = _places(first + rows, out_d, out_h, out_w, DEEP)
    q, r, s = _split_tap(tap, taps_h, taps_w, DEEP)
    at_h = places_h * stride_h + offset_h + r * step_h
    at_w = places_w * stride_w + offset_w + s * step_w
    is_row = rows < num_rows
    is_inside = is_row & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
    x_rows = x + sample * x_n + at_h * x_h + at_w * x_w
    if DEEP:
        at_d = places_d * stride_d + offset_d + q * step_d
        is_inside = is_inside & (at_d >= 0) & (at_d < in_d)
        x_rows += at_d * x_d
    values = tl.load(x_rows[:, None] + channel[None, :] * x_c, mask=is_inside[:, None], other=0.0)
    to = (
        cells + rows.to(tl.int64)[:, None] * (taps * channels) + (tap * channels + channel)[None, :]
    )
    tl.store(to, values, mask=is_row[:, None])


@kernel
def sum_splits(
    partial, out,
    num, splits, channels, taps, outputs, merged,
    IS_LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute ``out[o, c, tap]``, the sum of ``partial[split, o, tap, c]`` in a fixed order.

    For merged groups of ``outputs``, only the channels of an output's own group are used. IS_LAST:
    the channels of ``out`` are innermost as well.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    channel = index % channels
    rest = index // channels
    o = rest // taps
    source = (rest * merged + o // outputs % merged) * channels + channel
    sums = tl.zeros((BLOCK_S, BLOCK), dtype=tl.float32)
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = partial + split.to(tl.int64)[:, None] * num * merged + source[None, :]
        sums += tl.load(at, mask=(split < splits)[:, None] & is_here[None, :], other=0.0)
    total = tl.sum(sums, axis=0)
    place = index
    if not IS_LAST:
        place = (o * channels + channel) * taps + rest % taps
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_here)


@kernel
def merge_groups(
    w, out, num, channels, taps, taps_w, outputs, merged, w_o, w_c, w_r, w_s, BLOCK: tl.constexpr
):
    """Write the weights of each group to the diagonal of ``out[o, tap, c]``, and zero elsewhere."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    wide = index % (channels * merged)
    rest = index // (channels * merged)
    tap = rest % taps
    o = rest // taps
    is_own = wide // channels == o // outputs % merged
    at = w + o * w_o + wide % channels * w_c + tap // taps_w * w_r + tap % taps_w * w_s
    tl.store(out + index, tl.load(at, mask=is_here & is_own, other=0.0), mask=is_here)


@kernel
def fold(
    cells, dx,
    num, in_h, in_w, out_h, out_w,
    stride_h, stride_w, step_h, step_w, pad_h, pad_w,
    R: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``dx[plane, h, w]`` from ``cells[plane, (r, s), position]``, summing its taps."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = index % in_w
    h = index // in_w % in_h
    plane = (index // in_w // in_h).to(tl.int64)
    at = cells + plane * (R * S * out_h * out_w)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        at_h = h + pad_h - r * step_h
        o_h = at_h // stride_h
        is_row = (index < num) & (o_h * stride_h == at_h) & (at_h >= 0) & (o_h < out_h)
        for s in tl.static_range(S):
            at_w = v + pad_w - s * step_w
            o_w = at_w // stride_w
            is_hit = is_row & (o_w * stride_w == at_w) & (at_w >= 0) & (o_w < out_w)
            where = at + ((r * S + s) * out_h + o_h) * out_w + o_w
            sums += tl.load(where, mask=is_hit, other=0.0).to(tl.float32)
    tl.store(dx + index, sums.to(dx.dtype.element_ty), mask=index < num)
