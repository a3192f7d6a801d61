"""Convolution as a matrix product without materialized columns (implicit GEMM, in Triton).

The columns of im2col are never written. Each program computes the addresses of its part of them, so
there is no copy and no memory for it in either layout. Groups are one more program axis. The
kernels handle two or three spatial axes; a 1-d convolution runs with a height of 1.

Weight gradients sum over parts of the positions first, and then sum the parts. This gives many
programs work although ``dw`` is small, and the same call gives the same bits.

Merged groups (``merged_*``): several groups with few channels are computed as one, because matrix
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

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any

import torch

from penstock.conv.algorithms.phases import Axis, phases
from penstock.conv.algorithms.triton_launch import Launch, five, four, kernels, power, three, two
from penstock.conv.geometry import Geometry, empty

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


# The tiles to try: the best of ten on an H200, for nine layers. penstock.conv.tuning picks one per
# shape.
WIDE, NARROW = "wide", "narrow"
TILES = {
    WIDE: _by_type(Block(128, 64, 16, 4, 3), half=Block(128, 128, 32, 4, 4)),
    NARROW: _by_type(Block(64, 64, 16, 4, 3), half=Block(64, 128, 64, 4, 3)),
}


def can(g: Geometry, dtype: torch.dtype) -> bool:
    """Return True if the kernels can compute this convolution."""
    largest = g.batch * max(g.in_channels * prod(g.in_size), g.out_channels * prod(g.out_size))
    return dtype in TILES[WIDE] and largest < MAX_ELEMENTS


def _block(outputs: int, channels: int, depth: int, base: Block) -> Block:
    """Return a tile no wider than the outputs, with a depth within one tap if possible."""
    n = max(16, min(base.n, power(outputs)))
    within = [k for k in (64, 32, 16) if k <= base.k and channels % k == 0]
    k = within[0] if within else max(16, min(32, base.k, power(depth)))
    return Block(base.m, n, k, base.warps if n >= 64 else 4, base.stages)


# -- forward and input gradient --------------------------------------------------------------------

Strides = tuple[int, ...]
Prepared = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Three = tuple[int, int, int]
Weights = tuple[int, int, int, int, int, int]
"""Strides of the weights: group, tap along each axis, summed channel, output."""


@dataclass(frozen=True, kw_only=True)
class _Gather:
    """The sizes, strides and offsets of one launch of ``gather_gemm``.

    Args:
        weights: Strides of the weights: group, tap along each axis, summed channel, output.
        num_phases: The number of phases, if one launch computes all phases of an input gradient.
    """

    taps: Three
    out_size: Three
    in_size: Three
    stride: Three
    step: Three
    offset: Three
    weights: Weights
    x: tuple[int, int, int, int, int]
    y: tuple[int, int, int, int, int]
    w_first: int = 0
    y_first: int = 0
    num_phases: int | None = None

    def launch(self, g: Geometry, channels: int, outputs: int, block: Block) -> Launch:
        """Return a launch that sums over ``channels`` for each of ``outputs``, in each group."""
        one = self.stride if self.num_phases else (1, 1, 1)  # the first phase is the largest
        rows = g.batch * prod(
            -(-size // step) for size, step in zip(self.out_size, one, strict=True)
        )
        tiles = -(-rows // block.m) * -(-outputs // block.n)
        return Launch(
            kernels().gather_gemm,
            (tiles, g.groups, self.num_phases or 1),
            (
                *(g.batch, *self.out_size, *self.in_size, channels, outputs, *self.taps),
                *(*self.stride, *self.step, *self.offset, self.w_first, self.y_first),
                *(*self.x, *self.weights, *self.y),
            ),
            {
                "DEEP": g.num_dims == 3,
                "IS_PHASED": self.num_phases is not None,
                "EVEN": channels % block.k == 0,
                "BLOCK_M": block.m,
                "BLOCK_N": block.n,
                "BLOCK_K": block.k,
                "GROUP_M": 8,
            },
            num_warps=block.warps,
            num_stages=block.stages,
        )


def _taps(g: Geometry, w: Strides) -> Weights:
    """Return the strides of the weights: group, tap along each axis, input and output channel."""
    output, channel, *taps = five(w)
    return (g.group_out * output, *taps, channel, output)  # type: ignore[return-value]


def _settle_weights(
    g: Geometry, w: Strides, dtype: torch.dtype, *, is_forward: bool
) -> tuple[Weights, Callable[[Any], Any]]:
    """Return the weight strides for the kernel (see :func:`_taps`) and a function that converts.

    The weights are read in place if the channels of the result are adjacent in memory. For half
    types, adjacent summed channels are enough, because matrix units read both orders. float32
    multiply-adds took twice as long with that order.
    """
    inner = (w[0], w[1]) if is_forward else (w[1], w[0])
    if inner[0] == 1 or (inner[1] == 1 and dtype != torch.float32):
        return _taps(g, w), lambda weights: weights
    num = g.num_dims
    if is_forward:  # [groups, taps, C/groups, O/groups]
        order = (0, *range(3, num + 3), 2, 1)
        last = (g.group_out, 1)
    else:  # [groups, taps, O/groups, C/groups]
        order = (0, *range(3, num + 3), 1, 2)
        last = (1, g.group_in)
    shape = (g.groups, g.group_out, g.group_in, *g.kernel)
    each, (_, high, wide) = g.group_in * g.group_out, three(g.kernel, 1)
    strides = (g.num_taps * each, high * wide * each, wide * each, each, *last)
    return strides, lambda weights: weights.reshape(shape).permute(order).contiguous()


@functools.lru_cache(maxsize=4096)
def _prepare_forward(
    g: Geometry, dtype: torch.dtype, device: torch.device, x: Strides, w: Strides, tile: str
) -> Prepared:
    make = empty(g, g.out_channels, g.out_size, dtype)
    weights, settle = _settle_weights(g, w, dtype, is_forward=True)
    block = _block(g.group_out, g.group_in, g.num_taps * g.group_in, TILES[tile][dtype])
    launch = _Gather(
        taps=three(g.kernel, 1),
        out_size=three(g.out_size, 1),
        in_size=three(g.in_size, 1),
        stride=three(g.stride, 1),
        step=three(g.dilation, 1),
        offset=three(tuple(-p for p in g.padding), 0),
        weights=weights,
        x=five(x),
        y=five(g.strides(g.out_channels, g.out_size)),
    ).launch(g, g.group_in, g.group_out, block)

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = make(x)
        launch(x, settle(w), y)
        return y

    return run


def forward(
    g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int, *, tile: str = WIDE
) -> torch.Tensor:
    """Compute ``y`` as ``[batch, O, *out_size]``, in the geometry's memory layout."""
    return _prepare_forward(g, x.dtype, x.device, x.stride(), w.stride(), tile)(x, w)


def _phase(
    g: Geometry,
    phase: tuple[Axis, ...],
    weights: Weights,
    dy: Strides,
    dx: tuple[int, int, int, int, int],
) -> _Gather:
    """Return the launch parameters of one phase of an input gradient.

    Args:
        dy: Strides of ``dy``.
        dx: Strides of ``dx``.
    """
    group, *taps, channel, output = weights
    start = three(tuple(axis.start for axis in phase), 0)
    first = three(tuple(axis.taps[0] for axis in phase), 0)
    every = three(tuple(axis.taps[1] for axis in phase), 1)
    stride = three(g.stride, 1)
    return _Gather(
        taps=three(tuple(axis.num_taps for axis in phase), 1),
        out_size=three(tuple(axis.num for axis in phase), 1),
        in_size=three(g.out_size, 1),
        stride=(1, 1, 1),
        step=three(tuple(-axis.step for axis in phase), 0),
        offset=three(tuple(axis.offset for axis in phase), 0),
        weights=(group, *map(mul, taps, every), output, channel),
        x=five(dy),
        y=(*dx[:2], *map(mul, dx[2:], stride)),
        w_first=sum(map(mul, first, taps)),
        y_first=sum(map(mul, start, dx[2:])),
    )


@functools.lru_cache(maxsize=4096)
def _prepare_input_gradient(
    g: Geometry, dtype: torch.dtype, device: torch.device, dy: Strides, w: Strides, tile: str
) -> Prepared:
    make = empty(g, g.in_channels, g.in_size, dtype)
    weights, settle = _settle_weights(g, w, dtype, is_forward=False)
    group, *along, channel, output = weights
    strides = five(g.strides(g.in_channels, g.in_size))
    launches, empties = [], []
    if g.is_undilated and not g.is_unit_stride:
        taps = -(-g.num_taps // prod(g.stride))
        gather = _Gather(
            taps=three(g.kernel, 1),
            out_size=three(g.in_size, 1),
            in_size=three(g.out_size, 1),
            stride=three(g.stride, 1),
            step=(1, 1, 1),
            offset=three(g.padding, 0),
            weights=(group, *along, output, channel),  # type: ignore[arg-type]
            x=five(dy),
            y=strides,
            num_phases=prod(g.stride),
        )
        block = _block(g.group_in, g.group_out, taps * g.group_out, TILES[tile][dtype])
        launches.append(gather.launch(g, g.group_out, g.group_in, block))
    else:
        for phase in phases(g):
            if all(axis.num_taps for axis in phase):
                taps = prod(axis.num_taps for axis in phase)
                block = _block(g.group_in, g.group_out, taps * g.group_out, TILES[tile][dtype])
                gather = _phase(g, phase, weights, dy, strides)
                launches.append(gather.launch(g, g.group_out, g.group_in, block))
            else:
                spans = (slice(a.start, None, s) for a, s in zip(phase, g.stride, strict=True))
                empties.append((slice(None), slice(None), *spans))

    def run(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = make(dy)
        for place in empties:
            dx[place].zero_()
        w = settle(w)
        for launch in launches:
            launch(dy, w, dx)
        return dx

    return run


def input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int, *, tile: str = WIDE
) -> torch.Tensor:
    """Compute ``dx``, writing each phase directly to its positions.

    Without dilation, one launch computes all phases.
    """
    return _prepare_input_gradient(g, dy.dtype, dy.device, dy.stride(), w.stride(), tile)(dy, w)


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


@functools.lru_cache(maxsize=4096)
def _prepare_weight_gradient(
    g: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    x: Strides,
    dy: Strides,
    tile: str,
    merged: int,
    limit_bytes: int,
) -> Prepared:
    unmerged, g = g, replace(g, groups=g.groups // merged)
    depth, rows = g.num_taps * g.group_in, g.batch * g.num_positions
    base = WEIGHT_TILES[tile][dtype]
    block_m = max(16, min(base.m, power(g.group_out)))
    block_n = max(16, min(base.n, power(depth)))
    block_k = base.k
    tiles = -(-g.group_out // block_m) * -(-depth // block_n)
    split = Split.of(rows, tiles * g.groups, block_k, 4 * g.out_channels * depth, limit_bytes)
    launch = Launch(
        kernels().weight_gemm,
        (tiles, g.groups, split.num),
        (
            *(rows, split.size, *three(g.out_size, 1), *three(g.in_size, 1)),
            *(g.group_in, g.group_out, *three(g.kernel, 1)[1:], depth),
            *(*three(g.stride, 1), *three(g.dilation, 1)),
            *(*three(tuple(-p for p in g.padding), 0), *five(x), *five(dy), g.groups),
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
    return split.prepare(launch, unmerged, dtype, merged)


def weight_gradient(
    g: Geometry,
    x: torch.Tensor,
    dy: torch.Tensor,
    cap_bytes: int,
    *,
    tile: str = WIDE,
    merged: int = 1,
) -> torch.Tensor:
    """Compute ``dw`` as ``[O, C/groups, *kernel]``: sum each split of the positions, then add up.

    Args:
        merged: The number of groups computed as one.
    """
    key = (x.dtype, x.device, x.stride(), dy.stride())
    limit = min(cap_bytes, MAX_PARTIAL_BYTES)
    return _prepare_weight_gradient(g, *key, tile, merged, limit)(x, dy)


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
        wanted = min(-(-TARGET_PROGRAMS // tiles), longest, limit // bytes_each, 1024)
        each = -(-rows // max(1, wanted))
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


@functools.lru_cache(maxsize=4096)
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
    return g.num_dims <= 2 and can(g, dtype) and num_merged(g, dtype) > 1


@functools.lru_cache(maxsize=4096)
def _prepare_merge(
    g: Geometry, dtype: torch.dtype, device: torch.device, w: Strides, num: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes channels_last weights ``[O, num * C/groups, *kernel]``."""
    shape = (g.out_channels, *g.kernel, num * g.group_in)
    cells = prod(shape)
    strides = four(w)
    launch = Launch(
        kernels().merge_groups,
        (-(-cells // MERGE_BLOCK),),
        (cells, g.group_in, g.num_taps, two(g.kernel, 1)[1], g.group_out, num, *strides),
        {"BLOCK": MERGE_BLOCK},
    )

    def run(w: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(shape, dtype=dtype, device=device)
        launch(w, wide)
        return wide.movedim(-1, 1)

    return run


def _merge(
    g: Geometry, a: torch.Tensor, w: torch.Tensor
) -> tuple[Geometry, torch.Tensor, torch.Tensor]:
    """Return geometry, ``a`` and weights for the convolution with merged groups."""
    num = num_merged(g, a.dtype)
    return (
        _with_groups(g, g.groups // num),
        a,
        _prepare_merge(g, w.dtype, w.device, w.stride(), num)(w),
    )


@functools.lru_cache(maxsize=4096)
def _with_groups(g: Geometry, groups: int) -> Geometry:
    return replace(g, groups=groups)


def merged_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """Compute ``y`` with merged groups."""
    return forward(*_merge(g, x, w), cap_bytes)


def merged_input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int
) -> torch.Tensor:
    """Compute ``dx`` with merged groups."""
    return input_gradient(*_merge(g, dy, w), cap_bytes)


def merged_weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int
) -> torch.Tensor:
    """Compute ``dw`` with merged groups."""
    return weight_gradient(g, x, dy, cap_bytes, merged=num_merged(g, x.dtype))
