"""Which ways are there for a convolution, and which is tried first?

:func:`candidates` lists the ways that can compute one pass of one convolution, the one that the
rule would take first. All take the same arguments; see :data:`Run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.conv.algorithms import columns, depthwise, folding, phases, pointwise, winograd
from penstock.conv.algorithms import depthwise_triton as depthwise_lanes
from penstock.conv.algorithms import implicit_gemm as implicit
from penstock.conv.algorithms import merged_groups as merging
from penstock.conv.algorithms import split_reduction as parted
from penstock.conv.algorithms import triton_launch as launching
from penstock.conv.algorithms import winograd_triton as winograd_fused
from penstock.conv.geometry import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Geometry, Pass

Run = Callable[[Geometry, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Geometry, the two tensors of the pass (x, w; dy, w; or x, dy), and the memory cap in bytes."""

MIN_WINOGRAD_CHANNELS = 32
"""Below so many channels the transforms cost more than the multiplications they save. By reasoning:
a tile takes 36*36 multiplications for its transform and 36*O for its products."""


MIN_TILES = 100
"""With fewer tiles in a batch, transforming the weights costs more than it saves. Measured on one
core of a Xeon in float32: 128 tiles of 256 channels were 0.6 times the columns' time, 16 tiles of
128 channels 1.5 times, one tile of 512 channels 10 times."""
FOLD_BELOW = 4
"""With so many times more outputs than inputs, an input gradient is folded rather than phased.
Measured there: 3 to 64 channels, 7x7 with stride 2: phases 123 ms, torch's own 21 ms."""


@dataclass(frozen=True)
class Candidate:
    """A way to compute one pass."""

    name: str
    run: Run
    needs_triton: bool = False


def candidates(g: Geometry, which: Pass, dtype: torch.dtype, device: str) -> list[Candidate]:
    """Every way that can compute this pass, best guess first; never empty.

    Args:
        device: ``"cpu"`` or ``"cuda"``, which is also ROCm's name in torch.

    Example:
        >>> g = Geometry(batch=1, in_channels=8, out_channels=8, groups=1, in_size=(4, 4),
        ...              out_size=(4, 4), kernel=(1, 1), stride=(1, 1), padding=(0, 0),
        ...              dilation=(1, 1))
        >>> candidates(g, "forward", torch.float32, "cpu")[0].name
        '1x1 product'
    """
    has_triton = (device == "cuda" or launching.is_interpreted()) and launching.is_there()
    found: list[Candidate] = []
    if g.is_depthwise:
        found += _depthwise(g, which, dtype, device, has_triton=has_triton)
    if g.is_pointwise and g.groups == 1:
        found.append(_POINTWISE[which])
    if which == INPUT_GRADIENT and FOLD_BELOW * g.group_in <= g.group_out and not g.is_depthwise:
        if has_triton and folding.can(g, dtype):
            found.append(Candidate("folded product", folding.input_gradient, needs_triton=True))
        found.append(Candidate("columns, folded", columns.folded_input_gradient))
    is_half = dtype in (torch.float16, torch.bfloat16)
    by_winograd = _winograd(g, which, dtype, has_triton=has_triton)
    by_triton = [] if not has_triton or g.is_depthwise else _implicit(g, which, dtype)
    by_columns = [] if g.is_depthwise and device == "cuda" else _columns(g, which)
    if not _has_tiles(g):
        found += [*by_triton, *by_columns, *by_winograd]
    elif is_half or g.groups > 1:
        found += [*by_triton, *by_winograd, *by_columns]
    else:
        found += [*by_winograd, *by_triton, *by_columns]
    if device == "cuda":
        found += _turned_ways(g, which, dtype, has_triton=has_triton)
    return found


def _has_tiles(g: Geometry) -> bool:
    """Are there enough tiles for Winograd's way?"""
    return (
        g.num_dims == 2 and g.batch * -(-g.out_size[0] // 4) * -(-g.out_size[1] // 4) >= MIN_TILES
    )


# -- each way --------------------------------------------------------------------------------------


def _by_columns(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int) -> torch.Tensor:
    return columns.forward(g, a, b, cap)


def _phases_by_columns(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int) -> torch.Tensor:
    return phases.input_gradient(g, a, b, partial(_capped_columns, cap=cap))


def _capped_columns(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int) -> torch.Tensor:
    return columns.forward(g, a, b, cap)


def _columns(g: Geometry, which: Pass) -> list[Candidate]:
    if which == FORWARD:
        return [Candidate("columns", _by_columns)]
    if which == INPUT_GRADIENT:
        return [Candidate("columns by phases", _phases_by_columns)]
    return [Candidate("columns by taps", columns.weight_gradient)]


def _turned(
    g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int, way: Run, which: Pass
) -> torch.Tensor:
    """The same with the channels innermost in between, for memory that has them outermost.

    Turned copies stay under the cap, or are of one sample; the sums of chunks are in float32.
    """
    is_weight = which == WEIGHT_GRADIENT
    sample_bytes = (a[0].numel() + (b[0].numel() if is_weight else 0)) * a.element_size()
    step = max(1, min(g.batch, cap // sample_bytes))
    parts: list[torch.Tensor] = []
    total: torch.Tensor | None = None
    for start in range(0, g.batch, step):
        chunk = slice(start, start + step)
        left = a[chunk].contiguous(memory_format=torch.channels_last)
        right = b[chunk].contiguous(memory_format=torch.channels_last) if is_weight else b
        part = way(replace(g, is_channels_last=True, batch=len(left)), left, right, cap)
        if not is_weight:
            parts.append(part)
        elif total is None:
            total = part.float() if step < g.batch and part.element_size() == 2 else part
        else:
            total += part
    if total is not None:
        return total.to(a.dtype)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _turned_ways(
    g: Geometry, which: Pass, dtype: torch.dtype, *, has_triton: bool
) -> list[Candidate]:
    """For memory with the channels outermost, where it can pay to turn it first."""
    if g.num_dims != 2 or g.is_channels_last:
        return []
    found: list[Candidate] = []
    if g.is_depthwise:
        if which == WEIGHT_GRADIENT and has_triton and depthwise_lanes.can(g, dtype):
            run = partial(_turned, way=_lanes_last, which=which)
            found.append(Candidate("depthwise lanes, channels turned", run, needs_triton=True))
        return found
    if which == WEIGHT_GRADIENT and has_triton and implicit.can(g, dtype):
        run = partial(_turned, way=_implicit_last, which=which)
        found.append(Candidate("implicit product, channels turned", run, needs_triton=True))
    columns_last = _columns(replace(g, is_channels_last=True), which)[0].run
    run = partial(_turned, way=columns_last, which=which)
    return [*found, Candidate("columns, channels turned", run)]


_POINTWISE = {
    FORWARD: Candidate("1x1 product", lambda g, a, b, cap: pointwise.forward(g, a, b)),
    INPUT_GRADIENT: Candidate(
        "1x1 product", lambda g, a, b, cap: pointwise.input_gradient(g, a, b)
    ),
    WEIGHT_GRADIENT: Candidate("1x1 product", pointwise.weight_gradient),
}


def _winograd(g: Geometry, which: Pass, dtype: torch.dtype, *, has_triton: bool) -> list[Candidate]:
    if min(g.in_channels, g.out_channels) < MIN_WINOGRAD_CHANNELS or dtype.is_complex:
        return []
    if not (winograd.can_input_gradient if which == INPUT_GRADIENT else winograd.can)(g):
        return []
    found = [Candidate("winograd", _WINOGRAD[which])]
    if has_triton and winograd_fused.can(g, dtype):
        found.insert(0, Candidate("winograd, fused", _FUSED[which], needs_triton=True))
    return found


_WINOGRAD: dict[Pass, Run] = {
    FORWARD: winograd.forward,
    INPUT_GRADIENT: winograd.input_gradient,
    WEIGHT_GRADIENT: winograd.weight_gradient,
}
_FUSED: dict[Pass, Run] = {
    FORWARD: winograd_fused.forward,
    INPUT_GRADIENT: winograd_fused.input_gradient,
    WEIGHT_GRADIENT: winograd_fused.weight_gradient,
}


def _implicit_last(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int) -> torch.Tensor:
    return parted.weight_gradient(g, a, b, cap)


def _lanes_last(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int) -> torch.Tensor:
    return depthwise_lanes.weight_gradient(g, a, b)


_MERGED: dict[Pass, Run] = {
    FORWARD: merging.forward,
    INPUT_GRADIENT: merging.input_gradient,
    WEIGHT_GRADIENT: merging.weight_gradient,
}


def _implicit(g: Geometry, which: Pass, dtype: torch.dtype) -> list[Candidate]:
    if not implicit.can(g, dtype):
        return []
    run = _IMPLICIT[which]
    found = []
    if merging.can(g, dtype):
        found.append(Candidate("merged groups", _MERGED[which], needs_triton=True))
    return [
        *found,
        Candidate("implicit product, wide", partial(run, is_wide=True), needs_triton=True),
        Candidate("implicit product", partial(run, is_wide=False), needs_triton=True),
    ]


_IMPLICIT: dict[Pass, Callable[..., torch.Tensor]] = {
    FORWARD: lambda g, a, b, cap, is_wide: implicit.forward(g, a, b, is_wide=is_wide),
    INPUT_GRADIENT: lambda g, a, b, cap, is_wide: implicit.input_gradient(g, a, b, is_wide=is_wide),
    WEIGHT_GRADIENT: parted.weight_gradient,
}


_SHIFTS: dict[Pass, Callable[[Geometry, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    FORWARD: depthwise.forward,
    INPUT_GRADIENT: depthwise.input_gradient,
    WEIGHT_GRADIENT: depthwise.weight_gradient,
}
_LANES: dict[Pass, Callable[[Geometry, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    FORWARD: depthwise_lanes.forward,
    INPUT_GRADIENT: depthwise_lanes.input_gradient,
    WEIGHT_GRADIENT: depthwise_lanes.weight_gradient,
}


def _depthwise(
    g: Geometry, which: Pass, dtype: torch.dtype, device: str, *, has_triton: bool
) -> list[Candidate]:
    found: list[Candidate] = []
    if has_triton and depthwise_lanes.can(g, dtype):
        lanes = _LANES[which]
        found.append(
            Candidate("depthwise lanes", lambda g, a, b, cap: lanes(g, a, b), needs_triton=True)
        )
    if device == "cuda" and g.num_dims == 2:
        if which == FORWARD:
            found.append(
                Candidate("aten depthwise", lambda g, a, b, cap: depthwise.aten_forward(g, a, b))
            )
        if which == INPUT_GRADIENT and depthwise.can_aten_input_gradient(g):
            found.append(
                Candidate(
                    "aten depthwise", lambda g, a, b, cap: depthwise.aten_input_gradient(g, a, b)
                )
            )
    found.append(Candidate("shifts", partial(_shifted, which=which)))
    return found


def _shifted(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int, which: Pass) -> torch.Tensor:
    """On the CPU with the channels outermost: shifted views of runs of places are faster."""
    if g.is_channels_last and not a.is_cuda:
        g, a = replace(g, is_channels_last=False), a.contiguous()
        b = b.contiguous() if which == WEIGHT_GRADIENT else b
    return _SHIFTS[which](g, a, b)
