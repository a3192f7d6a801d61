"""Triton's side of implicit matrix products: columns are never written, only pointed at.

Imported only where Triton is there; :mod:`penstock.compute.algorithms.implicit` calls these. All of
them address tensors by strides, so one kernel serves both memory layouts; all sum in float32 (no
TF32) and use no atomic operation, so that the same call gives the same bits.
"""

# Triton reads these functions as source of another language: Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(num_m, num_n, GROUP_M: tl.constexpr):
    """Which tile is this program's? Neighbours share rows, so that they meet in the cache."""
    pid = tl.program_id(0)
    per_group = GROUP_M * num_n
    group = pid // per_group
    first = group * GROUP_M
    size = min(num_m - first, GROUP_M)
    inside = pid % per_group
    return first + inside % size, inside // size


_PLAIN = [
    *("num_rows", "rows_per_split", "out_h", "out_w", "in_h", "in_w", "taps_w", "depth"),
    *("stride_h", "stride_w", "step_h", "step_w", "offset_h", "offset_w", "pad_h", "pad_w"),
    *("w_g", "w_r", "w_s", "num_groups", "num"),
]
"""Numbers that a kernel is not compiled anew for. What lies side by side in memory is worth it."""


def _kernel(function):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    plain = [name for name in _PLAIN if name in names]
    return triton.jit(do_not_specialize=plain)(function)


@_kernel
def gather_gemm(
    x,
    w,
    y,
    num_rows,
    out_h,
    out_w,
    in_h,
    in_w,
    channels,
    outputs,
    taps_w,
    depth,
    stride_h,
    stride_w,
    step_h,
    step_w,
    offset_h,
    offset_w,
    x_n,
    x_c,
    x_h,
    x_w,
    w_g,
    w_r,
    w_s,
    w_c,
    w_k,
    y_n,
    y_c,
    y_h,
    y_w,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``y[n, o, h, w]`` sums ``x[n, c, h * stride + r * step + offset, ...] * w[r, s, c, o]``.

    Forward: step is the dilation, offset minus the padding. A phase of an input gradient: stride 1,
    the step negative, and strides of ``y`` that skip the other phases. One group for each program
    of the second axis. EVEN: a block of the depth lies within one tap.
    """
    group = tl.program_id(1)
    m, n = _tile(tl.cdiv(num_rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    places_w = rows % out_w
    rest = rows // out_w
    places_h = rest % out_h
    sample = (rest // out_h).to(tl.int64)
    is_row = rows < num_rows
    from_h = places_h * stride_h + offset_h
    from_w = places_w * stride_w + offset_w
    x_rows = x + sample * x_n + group * channels * x_c
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < outputs
    w_columns = w + group * w_g + columns * w_k
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            tap = start // channels
            channel = start - tap * channels + inner
            r = tap // taps_w
            s = tap - r * taps_w
            at_h = from_h + r * step_h
            at_w = from_w + s * step_w
            is_inside = is_row & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            x_at = x_rows + at_h * x_h + at_w * x_w
            left = tl.load(
                x_at[:, None] + channel[None, :] * x_c, mask=is_inside[:, None], other=0.0
            )
            right = tl.load(
                w_columns[None, :] + (r * w_r + s * w_s + channel * w_c)[:, None],
                mask=is_column[None, :],
                other=0.0,
            )
        else:
            k = start + inner
            tap = k // channels
            channel = k - tap * channels
            r = tap // taps_w
            s = tap - r * taps_w
            at_h = from_h[:, None] + (r * step_h)[None, :]
            at_w = from_w[:, None] + (s * step_w)[None, :]
            is_inside = (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            is_inside = is_inside & is_row[:, None] & (k < depth)[None, :]
            left = tl.load(
                x_rows[:, None] + (channel * x_c)[None, :] + at_h * x_h + at_w * x_w,
                mask=is_inside,
                other=0.0,
            )
            right = tl.load(
                w_columns[None, :] + (r * w_r + s * w_s + channel * w_c)[:, None],
                mask=is_column[None, :] & (k < depth)[:, None],
                other=0.0,
            )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    y_rows = y + sample * y_n + places_h * y_h + places_w * y_w
    y_at = y_rows[:, None] + ((group * outputs + columns) * y_c)[None, :]
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@_kernel
def weight_gemm(
    x,
    dy,
    partial,
    num_rows,
    rows_per_split,
    out_h,
    out_w,
    in_h,
    in_w,
    channels,
    outputs,
    taps_w,
    depth,
    stride_h,
    stride_w,
    step_h,
    step_w,
    offset_h,
    offset_w,
    x_n,
    x_c,
    x_h,
    x_w,
    y_n,
    y_c,
    y_h,
    y_w,
    num_groups,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``partial[split, group, o, (r, s, c)]``: the places of one split, summed.

    The sums over splits are left to torch, in float32 and always in the same order. EVEN: a block
    of columns lies within one tap.
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
    if EVEN:
        tap = (n * BLOCK_N) // channels
        r = tap // taps_w
        s = tap - r * taps_w
        channel = columns - tap * channels
    else:
        taps = columns // channels
        channel = columns - taps * channels
        r = taps // taps_w
        s = taps - r * taps_w
    shift_h = r * step_h + offset_h
    shift_w = s * step_w + offset_w
    x_columns = x + (group * channels + channel) * x_c
    y_outs = dy + (group * outputs + outs) * y_c
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = split * rows_per_split
    last = min(first + rows_per_split, num_rows)
    for start in range(first, last, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        is_row = rows < last
        places_w = rows % out_w
        rest = rows // out_w
        places_h = rest % out_h
        sample = (rest // out_h).to(tl.int64)
        y_rows = sample * y_n + places_h * y_h + places_w * y_w
        left = tl.load(
            y_outs[:, None] + y_rows[None, :], mask=is_out[:, None] & is_row[None, :], other=0.0
        )
        if EVEN:
            at_h = places_h * stride_h + shift_h
            at_w = places_w * stride_w + shift_w
            is_inside = is_row & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            x_rows = sample * x_n + at_h * x_h + at_w * x_w
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
            right = tl.load(x_columns[None, :] + x_rows, mask=is_inside, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    base = partial + (split * num_groups + group).to(tl.int64) * outputs * depth
    at = base + outs[:, None] * depth + columns[None, :]
    tl.store(at, sums, mask=is_out[:, None] & is_column[None, :])


# -- one channel for each group --------------------------------------------------------------------


@triton.jit
def _place(index, size_h, size_w, channels, IS_LAST: tl.constexpr):
    """Sample, channel, row and column of an element, in the order of memory."""
    if IS_LAST:
        channel = index % channels
        rest = index // channels
        w = rest % size_w
        rest = rest // size_w
        h = rest % size_h
        sample = rest // size_h
    else:
        w = index % size_w
        rest = index // size_w
        h = rest % size_h
        rest = rest // size_h
        channel = rest % channels
        sample = rest // channels
    return sample.to(tl.int64), channel, h, w


@_kernel
def depthwise_forward(
    x,
    w,
    y,
    num,
    channels,
    out_h,
    out_w,
    in_h,
    in_w,
    stride_h,
    stride_w,
    step_h,
    step_w,
    pad_h,
    pad_w,
    x_n,
    x_c,
    x_h,
    x_w,
    y_n,
    y_c,
    y_h,
    y_w,
    R: tl.constexpr,
    S: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program computes ``BLOCK`` elements of ``y``, in the order of its memory."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    sample, channel, h, v = _place(index, out_h, out_w, channels, IS_LAST)
    x_at = x + sample * x_n + channel * x_c
    from_h = h * stride_h - pad_h
    from_w = v * stride_w - pad_w
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            at_h = from_h + r * step_h
            at_w = from_w + s * step_w
            is_inside = is_here & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            seen = tl.load(x_at + at_h * x_h + at_w * x_w, mask=is_inside, other=0.0)
            tap = tl.load(w + channel * (R * S) + r * S + s, mask=is_here, other=0.0)
            sums += seen.to(tl.float32) * tap.to(tl.float32)
    y_at = y + sample * y_n + channel * y_c + h * y_h + v * y_w
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=is_here)


@_kernel
def depthwise_input_gradient(
    dy,
    w,
    dx,
    num,
    channels,
    in_h,
    in_w,
    out_h,
    out_w,
    stride_h,
    stride_w,
    step_h,
    step_w,
    pad_h,
    pad_w,
    y_n,
    y_c,
    y_h,
    y_w,
    x_n,
    x_c,
    x_h,
    x_w,
    R: tl.constexpr,
    S: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program computes ``BLOCK`` elements of ``dx``."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    sample, channel, h, v = _place(index, in_h, in_w, channels, IS_LAST)
    y_at = dy + sample * y_n + channel * y_c
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            at_h = h + pad_h - r * step_h
            at_w = v + pad_w - s * step_w
            o_h = at_h // stride_h
            o_w = at_w // stride_w
            is_hit = (o_h * stride_h == at_h) & (o_w * stride_w == at_w)
            is_inside = (at_h >= 0) & (o_h < out_h) & (at_w >= 0) & (o_w < out_w)
            seen = tl.load(y_at + o_h * y_h + o_w * y_w, mask=is_here & is_hit & is_inside, other=0)
            tap = tl.load(w + channel * (R * S) + r * S + s, mask=is_here, other=0.0)
            sums += seen.to(tl.float32) * tap.to(tl.float32)
    x_at = dx + sample * x_n + channel * x_c + h * x_h + v * x_w
    tl.store(x_at, sums.to(dx.dtype.element_ty), mask=is_here)


@_kernel
def depthwise_weight_gradient(
    x,
    dy,
    partial,
    num_rows,
    rows_per_split,
    channels,
    out_h,
    out_w,
    in_h,
    in_w,
    stride_h,
    stride_w,
    step_h,
    step_w,
    pad_h,
    pad_w,
    x_n,
    x_c,
    x_h,
    x_w,
    y_n,
    y_c,
    y_h,
    y_w,
    S: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """``partial[split, channel, tap]``. All taps at once, so ``dy`` is read once."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    is_channel = channel < channels
    taps = tl.arange(0, TAPS)
    shift_h = (taps // S) * step_h - pad_h
    shift_w = (taps % S) * step_w - pad_w
    is_tap = taps < NUM_TAPS
    sums = tl.zeros((TAPS, BLOCK_M, BLOCK_C), dtype=tl.float32)
    first = split * rows_per_split
    last = min(first + rows_per_split, num_rows)
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        is_row = rows < last
        v = rows % out_w
        rest = rows // out_w
        h = rest % out_h
        sample = (rest // out_h).to(tl.int64)
        y_at = dy + (sample * y_n + h * y_h + v * y_w)[:, None] + (channel * y_c)[None, :]
        error = tl.load(y_at, mask=is_row[:, None] & is_channel[None, :], other=0.0)
        at_h = shift_h[:, None] + (h * stride_h)[None, :]
        at_w = shift_w[:, None] + (v * stride_w)[None, :]
        is_inside = (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
        is_inside = is_inside & is_tap[:, None] & is_row[None, :]
        x_rows = (sample * x_n)[None, :] + at_h * x_h + at_w * x_w
        x_at = x + x_rows[:, :, None] + (channel * x_c)[None, None, :]
        seen = tl.load(x_at, mask=is_inside[:, :, None] & is_channel[None, None, :], other=0.0)
        sums += seen.to(tl.float32) * error.to(tl.float32)[None, :, :]
    total = tl.sum(sums, axis=1)
    at = partial + (split * channels + channel)[None, :] * NUM_TAPS + taps[:, None]
    tl.store(at, total, mask=is_tap[:, None] & is_channel[None, :])
