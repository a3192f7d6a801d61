"""Triton kernels for depthwise convolutions, with one lane for each element.

Imported only where Triton is installed. :mod:`penstock.conv.algorithms.depthwise` launches them.
They sum in float32 and use no atomic operations.

Tested by ``tests/integration/conv/algorithms/test_triton_launch.py``.
"""

# Triton compiles the source of these functions itself, so Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from penstock.conv.algorithms.gemm_kernels import kernel


@kernel
def depthwise_lanes(
    x, w, y,
    num, channels, out_h, out_w, in_h, in_w,
    stride_h, stride_w, step_h, step_w, pad_h, pad_w,
    x_n, x_c, x_h, x_w,
    y_n, y_c, y_h, y_w,
    R: tl.constexpr, S: tl.constexpr, NUM_R: tl.constexpr, NUM_S: tl.constexpr,
    IS_FORWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK`` elements of ``y`` per program, in contiguous layout.

    Without IS_FORWARD, ``y`` is the input gradient and ``x`` the output gradient. The steps are
    negative, and only every stride-th tap contributes to an element: NUM_R and NUM_S of them.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_here = index < num
    v = index % out_w
    rest = index // out_w
    h = rest % out_h
    rest = rest // out_h
    channel = rest % channels
    sample = (rest // channels).to(tl.int64)
    x_at = x + sample * x_n + channel * x_c
    if IS_FORWARD:
        from_h = h * stride_h - pad_h
        from_w = v * stride_w - pad_w
    else:
        from_h = (h + pad_h) // stride_h
        from_w = (v + pad_w) // stride_w
        first_h = h + pad_h - from_h * stride_h
        first_w = v + pad_w - from_w * stride_w
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(NUM_R):
        at_h = from_h + i * step_h
        is_row = is_here & (at_h >= 0) & (at_h < in_h)
        r = i
        if not IS_FORWARD:
            r = first_h + i * stride_h
            is_row = is_row & (r < R)
        for j in tl.static_range(NUM_S):
            at_w = from_w + j * step_w
            is_inside = is_row & (at_w >= 0) & (at_w < in_w)
            s = j
            if not IS_FORWARD:
                s = first_w + j * stride_w
                is_inside = is_inside & (s < S)
            seen = tl.load(x_at + at_h * x_h + at_w * x_w, mask=is_inside, other=0.0)
            tap = tl.load(w + channel * (R * S) + r * S + s, mask=is_inside, other=0.0)
            sums += seen.to(tl.float32) * tap.to(tl.float32)
    y_at = y + sample * y_n + channel * y_c + h * y_h + v * y_w
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=is_here)


@kernel
def depthwise_tile(
    x, w, y,
    num_rows, channels, out_h, out_w, in_h, in_w,
    stride_h, stride_w, step_h, step_w, pad_h, pad_w,
    x_n, x_h, x_w,
    y_n, y_h, y_w,
    w_c, w_tap,
    R: tl.constexpr, S: tl.constexpr, IS_FORWARD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of positions and channels of ``y``, in channels_last layout.

    Neighboring channels are read and written together.
    Channels and strides are given in multiples of UNIT: a program that knows that 72 is a multiple
    of 8 reads 8 elements at a time. Without IS_FORWARD, ``y`` is the input gradient and ``x`` the
    output gradient.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_row = rows < num_rows
    is_channel = channel < channels * UNIT
    v = rows % out_w
    rest = rows // out_w
    h = rest % out_h
    sample = (rest // out_h).to(tl.int64)
    x_at = x + (sample * x_n * UNIT)[:, None] + channel[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for r in tl.static_range(R):
        if IS_FORWARD:
            at_h = h * stride_h - pad_h + r * step_h
            is_here = is_row & (at_h >= 0) & (at_h < in_h)
        else:
            far = h + pad_h - r * step_h
            at_h = far // stride_h
            is_here = is_row & (far >= 0) & (at_h * stride_h == far) & (at_h < in_h)
        for s in tl.static_range(S):
            if IS_FORWARD:
                at_w = v * stride_w - pad_w + s * step_w
                is_inside = is_here & (at_w >= 0) & (at_w < in_w)
            else:
                far = v + pad_w - s * step_w
                at_w = far // stride_w
                is_inside = is_here & (far >= 0) & (at_w * stride_w == far) & (at_w < in_w)
            seen = tl.load(
                x_at + ((at_h * x_h + at_w * x_w) * UNIT)[:, None],
                mask=is_inside[:, None] & is_channel[None, :],
                other=0.0,
            )
            tap = tl.load(w + (r * S + s) * w_tap + channel * w_c, mask=is_channel, other=0.0)
            sums += seen.to(tl.float32) * tap.to(tl.float32)[None, :]
    y_at = y + ((sample * y_n + h * y_h + v * y_w) * UNIT)[:, None] + channel[None, :]
    tl.store(y_at, sums.to(y.dtype.element_ty), mask=is_row[:, None] & is_channel[None, :])


@kernel
def depthwise_weight_gradient(
    x, dy, partial,
    num_rows, rows_per_split, channels, out_h, out_w, in_h, in_w,
    stride_h, stride_w, step_h, step_w, pad_h, pad_w,
    x_n, x_c, x_h, x_w,
    y_n, y_c, y_h, y_w,
    S: tl.constexpr, NUM_TAPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Compute ``partial[split, channel, tap]``, tap by tap for the same block of ``dy``.

    Channels and strides, except those of the channels, are given in multiples of UNIT.
    """
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    is_channel = channel < channels * UNIT
    at = partial + (split * channels * UNIT + channel).to(tl.int64) * NUM_TAPS
    first = split * rows_per_split
    last = min(first + rows_per_split, num_rows)
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        is_row = rows < last
        v = rows % out_w
        rest = rows // out_w
        h = rest % out_h
        sample = (rest // out_h).to(tl.int64)
        y_rows = (sample * y_n + h * y_h + v * y_w) * UNIT
        y_at = dy + y_rows[:, None] + (channel * y_c)[None, :]
        error = tl.load(y_at, mask=is_row[:, None] & is_channel[None, :], other=0.0)
        error = error.to(tl.float32)
        x_at = x + (sample * x_n * UNIT)[:, None] + (channel * x_c)[None, :]
        for tap in range(NUM_TAPS):
            at_h = h * stride_h - pad_h + tap // S * step_h
            at_w = v * stride_w - pad_w + tap % S * step_w
            is_inside = is_row & (at_h >= 0) & (at_h < in_h) & (at_w >= 0) & (at_w < in_w)
            seen = tl.load(
                x_at + ((at_h * x_h + at_w * x_w) * UNIT)[:, None],
                mask=is_inside[:, None] & is_channel[None, :],
                other=0.0,
            )
            total = tl.sum(seen.to(tl.float32) * error, axis=0)
            before = tl.load(at + tap, mask=is_channel & (start > first), other=0.0)
            tl.store(at + tap, before + total, mask=is_channel)
        tl.debug_barrier()  # the sums are read again by other threads than wrote them
