"""Weight gradients by Triton: the places in some parts, each summed by itself, then the parts.

So that many programs have work although ``dw`` is small, and the same call gives the same bits.

Error: products and sums in float32 (without TF32), rounded once to the type of the result.
Memory beside inputs and results: ``parts * O * C/groups * taps`` sums in float32, of at most the
cap and :data:`MAX_PARTIAL_BYTES`, or one part's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from penstock.conv.algorithms.implicit_gemm import Block, Ready, Strides
from penstock.conv.algorithms.triton_launch import Launch, empty, four, kernels, power, two
from penstock.conv.geometry import Geometry

MAX_PARTIAL_BYTES = 64 << 20
TARGET_PROGRAMS = 132 * 4
"""A weight gradient is split until so many programs run: some for each of an H200's processors."""

# Which tiles are tried: outputs, columns, places at a time. The best two of six on an H200.
WIDE = {
    torch.float32: Block(64, 128, 16, 8, 3),
    torch.float16: Block(128, 64, 64, 4, 3),
    torch.bfloat16: Block(128, 64, 64, 4, 3),
}
NARROW = {
    torch.float32: Block(64, 64, 16, 4, 3),
    torch.float16: Block(64, 64, 32, 4, 4),
    torch.bfloat16: Block(64, 64, 32, 4, 4),
}


@functools.lru_cache(maxsize=4096)
def _prepare_weight_gradient(
    g: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    x: Strides,
    dy: Strides,
    is_wide: bool,
    merged: int,
    limit_bytes: int,
) -> Ready:
    collected, g = g, replace(g, groups=g.groups // merged)
    depth, rows = g.num_taps * g.group_in, g.batch * g.num_positions
    base = (WIDE if is_wide else NARROW)[dtype]
    block_m = max(16, min(base.m, power(g.group_out)))
    block_n = max(16, min(base.n, power(depth)))
    block_k = base.k
    tiles = -(-g.group_out // block_m) * -(-depth // block_n)
    split = Split.of(rows, tiles * g.groups, block_k, 4 * g.out_channels * depth, limit_bytes)
    launch = Launch(
        kernels().weight_gemm,
        (tiles, g.groups, split.num),
        (
            *(rows, split.size, *two(g.out_size, 1), *two(g.in_size, 1)),
            *(g.group_in, g.group_out, two(g.kernel, 1)[1], depth),
            *(*two(g.stride, 1), *two(g.dilation, 1), *two(tuple(-p for p in g.padding), 0)),
            *(*four(x), *four(dy), g.groups),
        ),
        {
            "EVEN": g.group_in % block_n == 0,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        num_warps=base.warps,
        num_stages=base.stages,
    )
    collect = split.collect(collected, dtype, merged)

    def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        partial = split.room(g.out_channels * depth, x.device)
        launch(x, dy, partial)
        return collect(partial)

    return run


def weight_gradient(
    g: Geometry,
    x: torch.Tensor,
    dy: torch.Tensor,
    cap_bytes: int = MAX_PARTIAL_BYTES,
    *,
    is_wide: bool = True,
    merged: int = 1,
) -> torch.Tensor:
    """``dw`` as ``[O, C/groups, *kernel]``: some splits of the places, then their sum.

    Args:
        merged: So many groups are computed as one; see
            :mod:`penstock.conv.algorithms.merged_groups`.
    """
    key = (x.dtype, x.device, x.stride(), dy.stride())
    limit = min(cap_bytes, MAX_PARTIAL_BYTES)
    return _prepare_weight_gradient(g, *key, is_wide, merged, limit)(x, dy)


@dataclass(frozen=True)
class Split:
    """The rows of a weight gradient, in ``num`` parts of ``size``, summed one by one."""

    num: int
    size: int

    @classmethod
    def of(
        cls, rows: int, tiles: int, block: int, bytes_each: int, limit: int = MAX_PARTIAL_BYTES
    ) -> Split:
        """So many that the GPU is busy, and no more than their sums are worth.

        Args:
            tiles: Programs of one part.
            block: Rows that a program takes at a time.
            bytes_each: What the sums of one part take.
            limit: What those of all may take, in bytes; one part's are needed.
        """
        longest = max(1, rows // (8 * block))
        wanted = min(-(-TARGET_PROGRAMS // tiles), longest, limit // bytes_each, 1024)
        each = -(-rows // max(1, wanted))
        size = -(-each // block) * block
        return cls(-(-rows // size), size)

    def room(self, num_sums: int, device: torch.device) -> torch.Tensor:
        """Memory for the sums of all parts."""
        return torch.empty(self.num * num_sums, dtype=torch.float32, device=device)

    def collect(
        self, g: Geometry, dtype: torch.dtype, merged: int = 1
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Adds the parts, each as ``[O, *kernel, merged * C/groups]``, to ``dw``."""
        num, block = g.out_channels * g.num_taps * g.group_in, 64
        launch = Launch(
            kernels().sum_splits,
            (-(-num // block),),
            (num, self.num, g.group_in, g.num_taps, g.group_out, merged),
            {"IS_LAST": g.is_channels_last, "BLOCK": block, "BLOCK_S": 16 if self.num > 8 else 8},
        )
        make = empty(replace(g, batch=g.out_channels), g.group_in, g.kernel, dtype)

        def run(partial: torch.Tensor) -> torch.Tensor:
            dw = make(partial)
            launch(partial, dw)
            return dw

        return run
