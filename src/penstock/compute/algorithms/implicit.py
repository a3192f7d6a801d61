"""Convolution as a matrix product whose columns are only pointed at (Triton), where Triton runs.

The columns of im2col are never written: each program computes where its part of them lies. So there
is no copy and no memory for it, in either layout, and groups are one more axis of programs. Two
axes; one axis is the same with a height of 1.

Error: products and sums in float32 (without TF32), rounded once to the type of the result.
Memory beside inputs and results: a transposed copy of the weights; a weight gradient writes
``splits * O * C/groups * taps`` sums in float32, of at most :data:`MAX_PARTIAL_BYTES`.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from penstock.compute.algorithms.phases import phases
from penstock.compute.geometry import Geometry

MAX_PARTIAL_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 31
"""The kernels count places of one sample and rows of all in 32 bits."""
TARGET_PROGRAMS = 132 * 4
"""A weight gradient is split until so many programs run: some for each of an H200's processors."""


@functools.lru_cache(maxsize=1)
def kernels() -> Any:
    """The module with the kernels, or None without Triton."""
    try:
        from penstock.compute.algorithms import triton_kernels
    except Exception:  # absent, or of a version that cannot be imported beside this torch
        return None
    return triton_kernels


@functools.lru_cache(maxsize=1)
def _depthwise_kernels() -> Any:
    from penstock.compute.algorithms import depthwise_kernels

    return depthwise_kernels


_trouble = ""


def is_there() -> bool:
    """Can Triton's kernels be used?"""
    return not _trouble and kernels() is not None


def give_up(error: Exception) -> None:
    """A kernel failed on this card: none of Triton's is offered any more."""
    global _trouble
    _trouble = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"Triton's kernels do not run here and are left out ({_trouble[:200]}); convolutions go on "
        "with matrix products alone.",
        RuntimeWarning,
        stacklevel=2,
    )


def is_interpreted() -> bool:
    """Are kernels run by Triton's interpreter, on the CPU (``TRITON_INTERPRET=1``)?"""
    module = kernels()
    return module is not None and type(module.gather_gemm).__name__ == "InterpretedFunction"


@dataclass(frozen=True)
class Block:
    """Sizes of a program's tile, and how it is run."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


# Which tiles are tried; measured choices are kept by penstock.compute.tuning.
WIDE = {
    torch.float32: Block(128, 64, 16, 4, 3),
    torch.float16: Block(128, 128, 64, 8, 3),
    torch.bfloat16: Block(128, 128, 64, 8, 3),
}
NARROW = {
    torch.float32: Block(64, 64, 16, 4, 3),
    torch.float16: Block(64, 64, 32, 4, 4),
    torch.bfloat16: Block(64, 64, 32, 4, 4),
}


def can(g: Geometry, dtype: torch.dtype) -> bool:
    """Do the kernels know this convolution?"""
    largest = g.batch * max(g.in_channels * _area(g.in_size), g.out_channels * _area(g.out_size))
    return g.num_dims <= 2 and dtype in WIDE and largest < MAX_ELEMENTS


def _area(size: tuple[int, ...]) -> int:
    area = 1
    for n in size:
        area *= n
    return area


def _block(outputs: int, channels: int, depth: int, dtype: torch.dtype, *, is_wide: bool) -> Block:
    """A tile no wider than the outputs, and of a depth that lies within one tap if that can be."""
    base = (WIDE if is_wide else NARROW)[dtype]
    n = max(16, min(base.n, _power(outputs)))
    within = [k for k in (64, 32, 16) if k <= base.k and channels % k == 0]
    k = within[0] if within else max(16, min(32, base.k, _power(depth)))
    return Block(base.m, n, k, base.warps if n >= 64 else 4, base.stages)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _two(values: tuple[int, ...], missing: int) -> tuple[int, int]:
    return (missing, values[0]) if len(values) == 1 else (values[0], values[1])


def _strides(t: torch.Tensor) -> tuple[int, int, int, int]:
    n, c, *rest = t.stride()
    return (n, c, 0, rest[0]) if len(rest) == 1 else (n, c, rest[0], rest[1])


def _empty(g: Geometry, like: torch.Tensor, channels: int, size: tuple[int, ...]) -> torch.Tensor:
    if not g.is_channels_last:
        return like.new_empty((g.batch, channels, *size))
    return like.new_empty((g.batch, *size, channels)).movedim(-1, 1)


@dataclass(frozen=True)
class _Gather:
    """Where a launch reads and writes along both axes; see ``gather_gemm``."""

    out_size: tuple[int, int]
    in_size: tuple[int, int]
    stride: tuple[int, int]
    step: tuple[int, int]
    offset: tuple[int, int]


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    gather: _Gather,
    *,
    is_wide: bool,
) -> None:
    """One ``gather_gemm``. ``w`` is ``[groups, taps_h, taps_w, channels, outputs]``."""
    groups, taps_h, taps_w, channels, outputs = w.shape
    depth = taps_h * taps_w * channels
    rows = x.shape[0] * gather.out_size[0] * gather.out_size[1]
    block = _block(outputs, channels, depth, x.dtype, is_wide=is_wide)
    grid = (-(-rows // block.m) * -(-outputs // block.n), groups)
    kernels().gather_gemm[grid](
        *(x, w, y, rows, *gather.out_size, *gather.in_size, channels, outputs, taps_w, depth),
        *(*gather.stride, *gather.step, *gather.offset),
        *(*_strides(x), *w.stride(), *_strides(y)),
        EVEN=channels % block.k == 0,
        BLOCK_M=block.m,
        BLOCK_N=block.n,
        BLOCK_K=block.k,
        GROUP_M=8,
        num_warps=block.warps,
        num_stages=block.stages,
    )


def _grouped(g: Geometry, w: torch.Tensor) -> torch.Tensor:
    """``[groups, O/groups, C/groups, taps_h, taps_w]``, a view."""
    return w.reshape(g.groups, g.group_out, g.group_in, *_two(g.kernel, 1))


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, *, is_wide: bool = True) -> torch.Tensor:
    """``y`` as ``[batch, O, *out_size]``, laid out as the geometry says."""
    y = _empty(g, x, g.out_channels, g.out_size)
    gather = _Gather(
        out_size=_two(g.out_size, 1),
        in_size=_two(g.in_size, 1),
        stride=_two(g.stride, 1),
        step=_two(g.dilation, 1),
        offset=_two(tuple(-p for p in g.padding), 0),
    )
    turned = _grouped(g, w).permute(0, 3, 4, 2, 1).contiguous()
    _launch(x, turned, y, gather, is_wide=is_wide)
    return y


def input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, *, is_wide: bool = True
) -> torch.Tensor:
    """``dx``: one launch for each phase of the stride, straight into its places."""
    dx = _empty(g, dy, g.in_channels, g.in_size)
    turned = _grouped(g, w).permute(0, 3, 4, 1, 2).contiguous()
    for phase in phases(g):
        spans = (slice(a.start, None, s) for a, s in zip(phase, g.stride, strict=True))
        place = (slice(None), slice(None), *spans)
        part = dx[place]
        if not all(axis.num_taps for axis in phase):
            part.zero_()
            continue
        first = _two(tuple(axis.taps[0] for axis in phase), 0)
        every = _two(tuple(axis.taps[1] for axis in phase), 1)
        taps = turned[:, first[0] :: every[0], first[1] :: every[1]]
        gather = _Gather(
            out_size=_two(tuple(axis.num for axis in phase), 1),
            in_size=_two(g.out_size, 1),
            stride=(1, 1),
            step=_two(tuple(-axis.step for axis in phase), 0),
            offset=_two(tuple(axis.offset for axis in phase), 0),
        )
        _launch(dy, taps, part, gather, is_wide=is_wide)
    return dx


def weight_gradient(
    g: Geometry, x: torch.Tensor, dy: torch.Tensor, *, is_wide: bool = True
) -> torch.Tensor:
    """``dw`` as ``[O, C/groups, *kernel]``: some splits of the places, then their sum."""
    depth, rows = g.num_taps * g.group_in, g.batch * g.num_positions
    base = (WIDE if is_wide else NARROW)[x.dtype]
    block_m = max(16, min(64, _power(g.group_out)))
    block_n = max(16, min(base.n, _power(depth)))
    block_k = min(32, base.k)
    tiles = -(-g.group_out // block_m) * -(-depth // block_n)
    splits = _num_splits(tiles * g.groups, rows, block_k, 4 * g.out_channels * depth)
    per_split = _up(_up(rows, splits), block_k) * block_k
    splits = -(-rows // per_split)
    partial = x.new_empty((splits, g.out_channels, depth), dtype=torch.float32)
    kernels().weight_gemm[(tiles, g.groups, splits)](
        *(x, dy, partial, rows, per_split, *_two(g.out_size, 1), *_two(g.in_size, 1)),
        *(g.group_in, g.group_out, _two(g.kernel, 1)[1], depth),
        *(*_two(g.stride, 1), *_two(g.dilation, 1), *_two(tuple(-p for p in g.padding), 0)),
        *(*_strides(x), *_strides(dy), g.groups),
        EVEN=g.group_in % block_n == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=base.stages,
    )
    dw = partial.sum(0) if splits > 1 else partial[0]
    shaped = dw.view(g.out_channels, *g.kernel, g.group_in).movedim(-1, 1)
    return shaped.to(x.dtype)


def _up(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def _num_splits(tiles: int, rows: int, block_k: int, bytes_each: int) -> int:
    wanted = -(-TARGET_PROGRAMS // tiles)
    longest = max(1, rows // (8 * block_k))
    return max(1, min(wanted, longest, MAX_PARTIAL_BYTES // bytes_each, 1024))


# -- one channel for each group --------------------------------------------------------------------


def can_depthwise(g: Geometry, dtype: torch.dtype) -> bool:
    """One output for each channel, and a kernel small enough to be unrolled."""
    return can(g, dtype) and g.is_depthwise and g.group_out == 1 and g.num_taps <= 64


def depthwise_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``y``, each element by one lane."""
    y = _empty(g, x, g.out_channels, g.out_size)
    num, (taps_h, taps_w) = y.numel(), _two(g.kernel, 1)
    _depthwise_kernels().depthwise_forward[(-(-num // 256),)](
        *(x, w.contiguous(), y, num, g.in_channels, *_two(g.out_size, 1), *_two(g.in_size, 1)),
        *(*_two(g.stride, 1), *_two(g.dilation, 1), *_two(g.padding, 0)),
        *(*_strides(x), *_strides(y)),
        R=taps_h,
        S=taps_w,
        IS_LAST=g.is_channels_last,
        BLOCK=256,
    )
    return y


def depthwise_input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``dx``, each element by one lane."""
    dx = _empty(g, dy, g.in_channels, g.in_size)
    num, (taps_h, taps_w) = dx.numel(), _two(g.kernel, 1)
    _depthwise_kernels().depthwise_input_gradient[(-(-num // 256),)](
        *(dy, w.contiguous(), dx, num, g.in_channels, *_two(g.in_size, 1), *_two(g.out_size, 1)),
        *(*_two(g.stride, 1), *_two(g.dilation, 1), *_two(g.padding, 0)),
        *(*_strides(dy), *_strides(dx)),
        R=taps_h,
        S=taps_w,
        IS_LAST=g.is_channels_last,
        BLOCK=256,
    )
    return dx


def depthwise_weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """``dw``: some splits of the places, all taps at once, then their sum."""
    rows, taps = g.batch * g.num_positions, _power(g.num_taps)
    cells = max(32, 4096 // taps)
    block_c = min(32, cells, _power(g.in_channels)) if g.is_channels_last else 1
    block_m = max(1, cells // block_c)
    blocks = -(-g.in_channels // block_c)
    splits = _num_splits(blocks, rows, block_m, 4 * g.in_channels * g.num_taps)
    per_split = _up(_up(rows, splits), block_m) * block_m
    splits = -(-rows // per_split)
    partial = x.new_empty((splits, g.in_channels, g.num_taps), dtype=torch.float32)
    _depthwise_kernels().depthwise_weight_gradient[(blocks, splits)](
        *(x, dy, partial, rows, per_split, g.in_channels),
        *(*_two(g.out_size, 1), *_two(g.in_size, 1)),
        *(*_two(g.stride, 1), *_two(g.dilation, 1), *_two(g.padding, 0)),
        *(*_strides(x), *_strides(dy)),
        S=_two(g.kernel, 1)[1],
        NUM_TAPS=g.num_taps,
        TAPS=taps,
        BLOCK_M=block_m,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return partial.sum(0).to(x.dtype).view(g.in_channels, 1, *g.kernel)
