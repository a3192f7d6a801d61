"""Triton kernel that normalizes uint8 images with a lookup table. Importing it needs Triton.

Used by :mod:`penstock.device.image_finisher`. Tested by ``tests/gpu/device/test_to_the_gpu.py``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_MAX_ELEMENTS = 2**31 - 1 - _BLOCK


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    images,
    table,
    mirrored,
    out,
    num_pixels,
    channels,
    height,
    width,
    in_n,
    in_c,
    in_h,
    in_w,
    out_n,
    out_c,
    out_h,
    out_w,
    table_step,
    IS_LAST: tl.constexpr,
    IS_MIRRORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Each program computes BLOCK values, in the memory order of the result.
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_pixels
    if IS_LAST:
        c = place % channels
        rest = place // channels
        x = rest % width
        rest = rest // width
        y = rest % height
        n = rest // height
    else:
        x = place % width
        rest = place // width
        y = rest % height
        rest = rest // height
        c = rest % channels
        n = rest // channels
    n64 = n.to(tl.int64)
    from_x = x
    if IS_MIRRORED:
        is_mirrored = tl.load(mirrored + n, mask=inside, other=0)
        from_x = tl.where(is_mirrored != 0, width - 1 - x, x)
    source = images + n64 * in_n + c * in_c + y * in_h + from_x * in_w
    value = tl.load(source, mask=inside, other=0).to(tl.int32)
    result = tl.load(table + c * table_step + value, mask=inside, other=0.0)
    tl.store(out + n64 * out_n + c * out_c + y * out_h + x * out_w, result, mask=inside)


def look_up(
    images: torch.Tensor,
    table: torch.Tensor,
    mirrored: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill ``out`` with the table's values for ``images``, on the current stream."""
    rows = max(1, _MAX_ELEMENTS // max(1, images[0].numel()))
    for first in range(0, len(images), rows):
        last = first + rows
        flags = None if mirrored is None else mirrored[first:last]
        _launch(images[first:last], table, flags, out[first:last])


def _launch(
    images: torch.Tensor, table: torch.Tensor, mirrored: torch.Tensor | None, out: torch.Tensor
) -> None:
    _, channels, height, width = images.shape
    is_last = out.stride(1) == 1 and channels > 1
    num_pixels = images.numel()
    with torch.cuda.device(images.device):
        _kernel[(triton.cdiv(num_pixels, _BLOCK),)](
            images,
            table,
            images if mirrored is None else mirrored.to(torch.uint8),
            out,
            num_pixels,
            channels,
            height,
            width,
            *images.stride(),
            *out.stride(),
            table.stride(0) if table.shape[0] > 1 else 0,
            IS_LAST=is_last,
            IS_MIRRORED=mirrored is not None,
            BLOCK=_BLOCK,
        )
