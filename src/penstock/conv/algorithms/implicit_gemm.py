"""Convolution as a matrix product without materialized columns (implicit GEMM, in Triton).

The columns of im2col are never written. Each program computes the addresses of its part of them, so
there is no copy and no memory for it in either layout. Groups are one more program axis. The
kernels handle two or three spatial axes; a 1-d convolution runs with a height of 1.

Weight gradients sum over parts of the positions first, and then sum the parts. This gives many
programs work although ``dw`` is small, and the same call gives the same bits.

Merged groups: several groups with few channels are computed as one, because matrix
units need more channels. The weights of a merged group hold the weights of its groups on the
diagonal, and zero elsewhere. Of a weight gradient, only the diagonal is kept. The added zeros
change no sum.

Error: products and sums in float32 (without TF32), rounded once to the type of the result.
Memory in addition to inputs and results: a transposed copy of the weights where their layout does
not suit the kernel. With merged groups, the weights once for each group in a merged group. Weight
gradients: ``parts * O * C/groups * taps`` sums in float32, limited by the cap and
:data:`MAX_PARTIAL_BYTES`, or the sums of one part if those are larger.

Tested by ``tests/integration/conv/algorithms/test_triton_launch.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch

from penstock.conv.algorithms.triton_launch import Launch, five, four, kernels, power, three, two
from penstock.conv.geometry import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Geometry,
    Pass,
    Prepared,
    empty,
)

MAX_ELEMENTS = 1 << 31
"""The kernels index the positions of a sample and the rows of the batch with 32 bits."""


@dataclass(frozen=True)
class Block:
    """Tile sizes of a program, and its numbers of warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


def _by_type(float32: Block, half: Block) -> dict[torch.dtype, Block]:
    return {torch.float32: float32, torch.float16: half, torch.bfloat16: half}


# The tiles to try: the best of ten on an H200, for fifteen layers. penstock.conv.tuning picks one
# per shape.
WIDE, NARROW = "wide", "narrow"
TILES = {
    WIDE: _by_type(Block(128, 64, 16, 4, 3), half=Block(128, 128, 32, 4, 4)),
    NARROW: _by_type(Block(64, 64, 16, 4, 3), half=Block(64, 128, 64, 4, 3)),
}
WIDE_LAST = _by_type(TILES[WIDE][torch.float32], half=Block(128, 64, 64, 4, 3))
"""The wide tile in channels_last layout."""
MAX_TAPS = 31
"""Along an axis, for the faster of two loops."""


def can(g: Geometry, dtype: torch.dtype, which: Pass | None = None) -> bool:
    """Return True if the kernels can compute this pass, or the passes of other algorithms."""
    largest = g.batch * max(g.in_channels * prod(g.in_size), g.out_channels * prod(g.out_size))
    is_easy = which != INPUT_GRADIENT or g.is_undilated or g.is_unit_stride
    return dtype in TILES[WIDE] and largest < MAX_ELEMENTS and is_easy


def _block(outputs: int, channels: int, depth: int, base: Block) -> tuple[Block, bool]:
    """Return a tile no wider than the outputs, and whether its depth is within one tap.

    It is if that adds at most half as many channels.
    """
    n = max(16, min(base.n, power(outputs)))
    k = min((64, 32, 16), key=lambda k: (k > base.k, -(-channels // k) * k))
    is_even = -(-channels // k) * k <= 1.5 * channels
    if not is_even:
        k = max(16, min(32, base.k, power(depth)))
    return Block(base.m, n, k, base.warps if n >= 64 else 4, base.stages), is_even


# -- forward and input gradient --------------------------------------------------------------------

Strides = tuple[int, ...]
Weights = tuple[int, int, int, int, int, int]
"""Strides of the weights: group, tap along each axis, summed channel, output."""


def _settle_weights(
    g: Geometry, w: torch.Tensor, *, is_forward: bool
) -> tuple[Weights, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the weight strides for the kernel and a function that converts weights like ``w``.

    The weights are read in place if the channels of the result are adjacent in memory. For half
    types, adjacent summed channels are enough, because matrix units read both orders. float32
    multiply-adds took twice as long with that order.
    """
    output, channel, *taps = five(w.stride())
    ends = (channel, output) if is_forward else (output, channel)
    if ends[1] == 1 or (ends[0] == 1 and w.dtype != torch.float32):
        return (g.group_out * output, *taps, *ends), lambda w: w  # type: ignore[return-value]
    outer, inner = (2, 1) if is_forward else (1, 2)  # [groups, taps, C/groups, O/groups], or O, C
    order = (0, *range(3, g.num_dims + 3), outer, inner)
    shape = (g.groups, g.group_out, g.group_in, *g.kernel)
    each, (_, high, wide) = g.group_in * g.group_out, three(g.kernel, 1)
    strides = (g.num_taps * each, high * wide * each, wide * each, each, shape[inner], 1)
    return strides, lambda w: w.reshape(shape).permute(order).contiguous()


def prepare_forward(
    g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int, *, tile: str = WIDE
) -> Prepared:
    """Compute ``y`` as ``[batch, O, *out_size]``, in the geometry's memory layout."""
    return _prepare(g, x, w, tile, is_forward=True)


def prepare_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int, *, tile: str = WIDE
) -> Prepared:
    """Compute ``dx`` in one launch, writing each phase of the stride directly to its positions."""
    return _prepare(g, dy, w, tile, is_forward=False)


def _prepare(
    g: Geometry, a: torch.Tensor, w: torch.Tensor, tile: str, *, is_forward: bool
) -> Prepared:
    weights, settle = _settle_weights(g, w, is_forward=is_forward)
    stride, one = three(g.stride, 1), (1, 1, 1)
    phases = 1
    if is_forward:
        channels, outputs, in_size, out_size = g.group_in, g.group_out, g.in_size, g.out_size
        step, offset = three(g.dilation, 1), three(tuple(-p for p in g.padding), 0)
    else:
        channels, outputs, in_size, out_size = g.group_out, g.group_in, g.out_size, g.in_size
        step, offset = three(tuple(-d for d in g.dilation), 1), three(g.padding, 0)
        phases, one = prod(stride), stride  # the first phase is the largest
    base = (WIDE_LAST if tile == WIDE and g.is_channels_last else TILES[tile])[a.dtype]
    block, is_even = _block(outputs, channels, -(-g.num_taps // phases) * channels, base)
    size = three(out_size, 1)
    rows = g.batch * prod(-(-n // s) for n, s in zip(size, one, strict=True))
    make = empty(g, outputs * g.groups, out_size, a.dtype)
    launch = Launch(
        kernels().gather_gemm,
        (-(-rows // block.m) * -(-outputs // block.n), g.groups, phases),
        (
            *(g.batch, *size, *three(in_size, 1), channels, outputs, *three(g.kernel, 1)),
            *(*stride, *step, *offset),
            *(*five(a.stride()), *weights, *five(g.strides(outputs * g.groups, out_size))),
        ),
        {
            "DEEP": g.num_dims == 3,
            "IS_PHASED": phases > 1,
            "EVEN": is_even and max(g.kernel) <= MAX_TAPS,
            "IS_PADDED": channels % block.k != 0,
            "BLOCK_M": block.m,
            "BLOCK_N": block.n,
            "BLOCK_K": block.k,
            "GROUP_M": 8,
        },
        num_warps=block.warps,
        num_stages=block.stages,
    )

    def run(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = make(a)
        launch(a, settle(w), result)
        return result

    return run


# -- weight gradient -------------------------------------------------------------------------------

MAX_PARTIAL_BYTES = 64 << 20
TARGET_PROGRAMS = 132 * 4
"""A weight gradient is split until this many programs run: four for each of the 132 multiprocessors
of an H200."""

# The tiles to try, as outputs, columns and positions per step: the best two of six on an H200.
WEIGHT_TILES = {
    WIDE: _by_type(Block(64, 128, 16, 8, 3), half=Block(128, 64, 64, 4, 3)),
    NARROW: _by_type(Block(64, 64, 16, 4, 3), half=Block(64, 64, 32, 4, 4)),
}


def prepare_weight_gradient(
    g: Geometry,
    x: torch.Tensor,
    dy: torch.Tensor,
    cap_bytes: int,
    *,
    tile: str = WIDE,
    merged: int = 1,
) -> Prepared:
    """Compute ``dw`` as ``[O, C/groups, *kernel]``: sum each split of the positions, then add up.

    Args:
        merged: The number of groups computed as one.
    """
    limit = min(cap_bytes, MAX_PARTIAL_BYTES)
    unmerged, g = g, replace(g, groups=g.groups // merged)
    depth, rows = g.num_taps * g.group_in, g.batch * g.num_positions
    base = WEIGHT_TILES[tile][x.dtype]
    block_m = max(16, min(base.m, power(g.group_out)))
    block_n = max(16, min(base.n, power(depth)))
    block_k = base.k
    tiles = -(-g.group_out // block_m) * -(-depth // block_n)
    split = Split.of(rows, tiles * g.groups, block_k, 4 * g.out_channels * depth, limit)
    launch = Launch(
        kernels().weight_gemm,
        (tiles, g.groups, split.num),
        (
            *(rows, split.size, *three(g.out_size, 1), *three(g.in_size, 1)),
            *(g.group_in, g.group_out, *three(g.kernel, 1)[1:], depth),
            *(*three(g.stride, 1), *three(g.dilation, 1)),
            *(
                *three(tuple(-p for p in g.padding), 0),
                *five(x.stride()),
                *five(dy.stride()),
                g.groups,
            ),
        ),
        {
            "DEEP": g.num_dims == 3,
            "EVEN": g.group_in % block_n == 0,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        num_warps=base.warps,
        num_stages=base.stages,
    )
    return split.prepare(launch, unmerged, x.dtype, merged)


@dataclass(frozen=True)
class Split:
    """The rows of a weight gradient, split into ``num`` parts of ``size`` that are summed apart."""

    num: int
    size: int

    @classmethod
    def of(cls, rows: int, tiles: int, block: int, bytes_each: int, limit: int) -> Split:
        """Choose enough parts to keep the GPU busy, within the memory limit for their sums.

        Args:
            tiles: Programs of one part.
            block: Rows that a program processes per step.
            bytes_each: Memory for the sums of one part.
            limit: Memory for the sums of all parts, in bytes. One part is always allowed.
        """
        longest = max(1, rows // (8 * block))
        wanted = min(-(-TARGET_PROGRAMS // tiles), longest, 1024)
        return cls.of_blocks(rows, block, bytes_each, limit, wanted)

    @classmethod
    def of_blocks(
        cls, rows: int, block: int, bytes_each: int, limit: int, wanted: int = 1 << 31
    ) -> Split:
        """Return ``wanted`` parts of whole blocks, or fewer to respect the limit."""
        each = -(-rows // max(1, min(wanted, limit // bytes_each)))
        size = -(-each // block) * block
        return cls(-(-rows // size), size)

    def prepare(self, launch: Launch, g: Geometry, dtype: torch.dtype, merged: int = 1) -> Prepared:
        """Return a function that sums each part with ``launch``, then adds the parts.

        The sums of a part are ``[O, *kernel, merged * C/groups]``.

        Args:
            launch: Takes ``x``, ``dy`` and memory for the sums.
        """
        num, block = g.out_channels * g.num_taps * g.group_in, 64
        add_parts = Launch(
            kernels().sum_splits,
            (-(-num // block),),
            (num, self.num, g.group_in, g.num_taps, g.group_out, merged),
            {"IS_LAST": g.is_channels_last, "BLOCK": block, "BLOCK_S": 16 if self.num > 8 else 8},
        )
        make = empty(replace(g, batch=g.out_channels), g.group_in, g.kernel, dtype)
        num_sums = self.num * num * merged

        def run(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
            partial = torch.empty(num_sums, dtype=torch.float32, device=x.device)
            launch(x, dy, partial)
            dw = make(partial)
            add_parts(partial, dw)
            return dw

        return run


# -- merged groups ---------------------------------------------------------------------------------

MERGE_BLOCK = 256
MAX_MERGED_CHANNELS = {torch.float32: 16, torch.float16: 64, torch.bfloat16: 64}
"""Channels of one merged group: the fastest of 16 to 128 for the groups of ResNeXt on an H200."""


def num_merged(g: Geometry, dtype: torch.dtype) -> int:
    """Return the number of groups to compute as one.

    Example:
        >>> g = Geometry(batch=1, in_channels=64, out_channels=64, groups=16, in_size=(4, 4),
        ...              out_size=(4, 4), kernel=(3, 3), stride=(1, 1), padding=(1, 1),
        ...              dilation=(1, 1))
        >>> num_merged(g, torch.float32), num_merged(g, torch.bfloat16)
        (4, 16)
    """
    most = MAX_MERGED_CHANNELS.get(dtype, 0) // max(g.group_in, g.group_out)
    return max((num for num in range(1, most + 1) if g.groups % num == 0), default=1)


def can_merge(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True if there are groups to merge."""
    return g.num_dims <= 2 and num_merged(g, dtype) > 1


def prepare_merged(
    g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int, which: Pass
) -> Prepared:
    """Prepare a pass with merged groups, for channels_last weights ``[O, num * C/groups, ...]``."""
    num = num_merged(g, a.dtype)
    if which == WEIGHT_GRADIENT:
        return prepare_weight_gradient(g, a, b, cap_bytes, merged=num)
    shape = (g.out_channels, *g.kernel, num * g.group_in)
    launch = Launch(
        kernels().merge_groups,
        (-(-prod(shape) // MERGE_BLOCK),),
        (
            *(prod(shape), g.group_in, g.num_taps, two(g.kernel, 1)[1], g.group_out, num),
            *four(b.stride()),
        ),
        {"BLOCK": MERGE_BLOCK},
    )

    def merge(w: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(shape, dtype=w.dtype, device=w.device)
        launch(w, wide)
        return wide.movedim(-1, 1)

    weights = b.new_empty(shape).movedim(-1, 1)
    g = replace(g, groups=g.groups // num)
    run = _prepare(g, a, weights, WIDE, is_forward=which == FORWARD)
    return lambda a, w: run(a, merge(w))
