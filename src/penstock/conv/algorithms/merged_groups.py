"""Groups of few channels, some of them taken as one: matrix units want more than such have.

Weights of the merged group are those of its groups along the diagonal, and zero elsewhere; of a
weight gradient the diagonal is kept. The added zeros change no sum: error as of the way beneath.

Memory beside inputs and results: the weights, as many times as groups are merged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from penstock.conv.algorithms import implicit_gemm as implicit
from penstock.conv.algorithms import split_reduction as parted
from penstock.conv.algorithms.implicit_gemm import Strides
from penstock.conv.algorithms.triton_launch import Launch, four, kernels, two
from penstock.conv.geometry import Geometry

LANES = 256
MERGED = {torch.float32: 16, torch.float16: 64, torch.bfloat16: 64}
"""Channels of a merged group, at most: the quickest of 16 to 128 for ResNeXt's on an H200."""


@functools.lru_cache(maxsize=4096)
def num_merged(g: Geometry, dtype: torch.dtype) -> int:
    """How many groups are taken as one.

    Example:
        >>> g = Geometry(batch=1, in_channels=64, out_channels=64, groups=16, in_size=(4, 4),
        ...              out_size=(4, 4), kernel=(3, 3), stride=(1, 1), padding=(1, 1),
        ...              dilation=(1, 1))
        >>> num_merged(g, torch.float32), num_merged(g, torch.bfloat16)
        (4, 16)
    """
    most = MERGED.get(dtype, 0) // max(g.group_in, g.group_out)
    return max((num for num in range(1, most + 1) if g.groups % num == 0), default=1)


def can(g: Geometry, dtype: torch.dtype) -> bool:
    """Are there groups to merge?"""
    return implicit.can(g, dtype) and num_merged(g, dtype) > 1


@functools.lru_cache(maxsize=4096)
def _merge(
    g: Geometry, dtype: torch.dtype, device: torch.device, w: Strides, num: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """To ``[O, num * C/groups, *kernel]``, the channels innermost."""
    shape = (g.out_channels, *g.kernel, num * g.group_in)
    cells = prod(shape)
    strides = four(w)
    launch = Launch(
        kernels().merge_groups,
        (-(-cells // LANES),),
        (cells, g.group_in, g.num_taps, two(g.kernel, 1)[1], g.group_out, num, *strides),
        {"BLOCK": LANES},
    )

    def run(w: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(shape, dtype=dtype, device=device)
        launch(w, wide)
        return wide.movedim(-1, 1)

    return run


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``y``."""
    num = num_merged(g, x.dtype)
    merged = _merge(g, w.dtype, w.device, w.stride(), num)(w)
    return implicit.forward(_wider(g, num), x, merged)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dx``."""
    num = num_merged(g, dy.dtype)
    merged = _merge(g, w.dtype, w.device, w.stride(), num)(w)
    return implicit.input_gradient(_wider(g, num), dy, merged)


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor, cap_bytes: int) -> torch.Tensor:
    """``dw``."""
    return parted.weight_gradient(g, x, dy, cap_bytes, merged=num_merged(g, x.dtype))


@functools.lru_cache(maxsize=4096)
def _wider(g: Geometry, num: int) -> Geometry:
    return replace(g, groups=g.groups // num)
