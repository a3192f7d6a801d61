"""Lists the algorithms that can compute one pass of a convolution, in order of expected speed.

On the CPU, and wherever nothing can be measured, the first candidate is used. Elsewhere
:mod:`penstock.conv.tuning` times the candidates. All algorithms take the same arguments; see
:data:`penstock.conv.geometry.Run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from penstock.conv.algorithms import (
    aten,
    col2im,
    depthwise,
    im2col,
    implicit_gemm,
    phases,
    pointwise,
    triton_launch,
    winograd,
)
from penstock.conv.geometry import (
    INPUT_GRADIENT,
    PASSES,
    WEIGHT_GRADIENT,
    Geometry,
    Pass,
    Run,
    samples_under,
)

MIN_WINOGRAD_CHANNELS = 32
"""With fewer channels, the transforms cost more than the multiplications they save. This value is
estimated: a tile takes 36*36 multiplications for its transform and 36*O for its products."""

MIN_TILES = 100
"""With fewer tiles in a batch, transforming the weights costs more than it saves. Measured on one
core of a Xeon in float32, relative to im2col: 128 tiles of 256 channels took 0.6 times as long, 16
tiles of 128 channels 1.5 times, and one tile of 512 channels 10 times."""
FOLD_BELOW = 4
"""If there are at least this many times more output than input channels, the input gradient uses
col2im instead of phases. Measured on the same core with 3 to 64 channels, 7x7, stride 2: phases
took 123 ms, torch's own algorithm 21 ms."""


@dataclass(frozen=True)
class Candidate:
    """An algorithm for one pass.

    The name appears in ``Bypass.counts`` and in the file of measured choices.
    """

    name: str
    run: Run
    needs_triton: bool = False


def candidates(g: Geometry, which: Pass, dtype: torch.dtype, device: str) -> list[Candidate]:
    """Return all algorithms that can compute this pass, in order of expected speed. Never empty.

    Args:
        device: ``"cpu"`` or ``"cuda"``. torch also uses ``"cuda"`` for ROCm.

    Example:
        >>> g = Geometry(batch=1, in_channels=8, out_channels=8, groups=1, in_size=(4, 4),
        ...              out_size=(4, 4), kernel=(1, 1), stride=(1, 1), padding=(0, 0),
        ...              dilation=(1, 1))
        >>> candidates(g, "forward", torch.float32, "cpu")[0].name
        '1x1 product'
    """
    can_launch = device == "cuda" or triton_launch.is_interpreted()
    has_triton = can_launch and triton_launch.is_available()
    found: list[Candidate] = []
    if g.is_depthwise:
        found += _depthwise(g, which, dtype, device, has_triton=has_triton)
    if g.is_pointwise and g.groups == 1:
        found.append(Candidate("1x1 product", _POINTWISE[which]))
    is_folded = which == INPUT_GRADIENT and not g.is_depthwise
    folded = [Candidate("columns, folded", col2im.input_gradient)] if is_folded else []
    if is_folded and FOLD_BELOW * g.group_in <= g.group_out:
        if has_triton and col2im.can_triton(g, dtype):
            run: Run = col2im.triton_input_gradient
            found.append(Candidate("folded product", run, needs_triton=True))
        found += folded
        folded = []
    by_winograd = _winograd(g, which, dtype, has_triton=has_triton)
    by_triton = [] if not has_triton or g.is_depthwise else _implicit(g, which, dtype)
    by_columns = [] if g.is_depthwise and device == "cuda" else [_COLUMNS[which]]
    if has_triton and im2col.can_triton(g, which, dtype):
        by_columns.insert(0, Candidate("gathered columns", _GATHERED[which], needs_triton=True))
    is_half = dtype in (torch.float16, torch.bfloat16)
    if not _has_tiles(g):
        found += [*by_triton, *by_columns, *by_winograd]
    elif is_half or g.groups > 1:
        found += [*by_triton, *by_winograd, *by_columns]
    else:
        found += [*by_winograd, *by_triton, *by_columns]
    if device == "cuda":
        found += [*folded, *_in_channels_last(g, which, dtype, has_triton=has_triton)]
        if not g.is_depthwise and aten.can(g, which, dtype):
            found.append(Candidate(aten.NAME, partial(aten.run, which=which)))
    return found


def _has_tiles(g: Geometry) -> bool:
    """Return True if there are enough tiles for Winograd."""
    return (
        g.num_dims == 2 and g.batch * -(-g.out_size[0] // 4) * -(-g.out_size[1] // 4) >= MIN_TILES
    )


# -- each algorithm --------------------------------------------------------------------------------


def _by_pass(forward: Any, input_gradient: Any, weight_gradient: Any) -> dict[Pass, Any]:
    return dict(zip(PASSES, (forward, input_gradient, weight_gradient), strict=True))


def _phases_by_columns(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int) -> torch.Tensor:
    return phases.input_gradient(g, a, b, lambda g, a, b: im2col.forward(g, a, b, cap))


_COLUMNS: dict[Pass, Candidate] = _by_pass(
    Candidate("columns", im2col.forward),
    Candidate("columns by phases", _phases_by_columns),
    Candidate("columns", im2col.weight_gradient),
)
_GATHERED: dict[Pass, Run] = _by_pass(
    im2col.triton_forward, im2col.triton_input_gradient, im2col.triton_weight_gradient
)
_POINTWISE: dict[Pass, Run] = _by_pass(
    pointwise.forward, pointwise.input_gradient, pointwise.weight_gradient
)
_WINOGRAD: dict[Pass, Run] = _by_pass(
    winograd.forward, winograd.input_gradient, winograd.weight_gradient
)
_WINOGRAD_TRITON: dict[Pass, Run] = _by_pass(
    winograd.triton_forward, winograd.triton_input_gradient, winograd.triton_weight_gradient
)
_IMPLICIT: dict[Pass, Callable[..., torch.Tensor]] = _by_pass(
    implicit_gemm.forward, implicit_gemm.input_gradient, implicit_gemm.weight_gradient
)
_MERGED: dict[Pass, Run] = _by_pass(
    implicit_gemm.merged_forward,
    implicit_gemm.merged_input_gradient,
    implicit_gemm.merged_weight_gradient,
)
_SHIFTS: dict[Pass, Run] = _by_pass(
    depthwise.forward, depthwise.input_gradient, depthwise.weight_gradient
)
_DEPTHWISE_TRITON: dict[Pass, Run] = _by_pass(
    depthwise.triton_forward, depthwise.triton_input_gradient, depthwise.triton_weight_gradient
)


def _winograd(g: Geometry, which: Pass, dtype: torch.dtype, *, has_triton: bool) -> list[Candidate]:
    if min(g.in_channels, g.out_channels) < MIN_WINOGRAD_CHANNELS or dtype.is_complex:
        return []
    if not (winograd.can_input_gradient if which == INPUT_GRADIENT else winograd.can)(g):
        return []
    found = [Candidate("winograd", _WINOGRAD[which])]
    if has_triton and winograd.can_triton(g, dtype):
        found.insert(0, Candidate("winograd, fused", _WINOGRAD_TRITON[which], needs_triton=True))
    return found


def _implicit(g: Geometry, which: Pass, dtype: torch.dtype) -> list[Candidate]:
    if not implicit_gemm.can(g, dtype):
        return []
    tiles = {"implicit product, wide": implicit_gemm.WIDE, "implicit product": implicit_gemm.NARROW}
    found = [
        Candidate(name, partial(_IMPLICIT[which], tile=tile), needs_triton=True)
        for name, tile in tiles.items()
    ]
    if implicit_gemm.can_merge(g, dtype):
        found.insert(0, Candidate("merged groups", _MERGED[which], needs_triton=True))
    return found


def _depthwise(
    g: Geometry, which: Pass, dtype: torch.dtype, device: str, *, has_triton: bool
) -> list[Candidate]:
    found: list[Candidate] = []
    if has_triton and depthwise.can_triton(g, dtype):
        found.append(Candidate("depthwise lanes", _DEPTHWISE_TRITON[which], needs_triton=True))
    if device == "cuda" and aten.can(g, which, dtype):
        found.append(Candidate(aten.NAME, partial(aten.run, which=which)))
    found.append(Candidate("shifts", partial(_shifts, which=which)))
    return found


def _shifts(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int, which: Pass) -> torch.Tensor:
    """Run the shift algorithm, on the CPU always in contiguous layout.

    There, shifted views of contiguous rows are faster.
    """
    if g.is_channels_last and not a.is_cuda:
        g, a = replace(g, is_channels_last=False), a.contiguous()
        b = b.contiguous() if which == WEIGHT_GRADIENT else b
    return _SHIFTS[which](g, a, b, cap)


# -- other layouts ---------------------------------------------------------------------------------


def _in_channels_last(
    g: Geometry, which: Pass, dtype: torch.dtype, *, has_triton: bool
) -> list[Candidate]:
    """Return algorithms that first copy contiguous tensors to channels_last. Some are faster."""
    if g.num_dims == 1 or g.is_channels_last:
        return []
    by_triton = has_triton and which == WEIGHT_GRADIENT
    found: list[tuple[str, Run, bool]] = []
    if g.is_depthwise:
        if by_triton and depthwise.can_triton(g, dtype):
            found.append(("depthwise lanes", depthwise.triton_weight_gradient, True))
    else:
        if by_triton and implicit_gemm.can(g, dtype):
            found.append(("implicit product", implicit_gemm.weight_gradient, True))
        found.append(("columns", _COLUMNS[which].run, False))
        if has_triton and im2col.can_triton(replace(g, is_channels_last=True), which, dtype):
            found.append(("gathered columns", _GATHERED[which], True))
    return [
        Candidate(f"{name}, channels turned", partial(_turned, way=run, which=which), needs_triton)
        for name, run, needs_triton in found
    ]


def _turned(
    g: Geometry, a: torch.Tensor, b: torch.Tensor, cap: int, way: Run, which: Pass
) -> torch.Tensor:
    """Run an algorithm on channels_last copies of the tensors.

    The copies stay under the memory cap, or hold one sample if a sample is larger than the cap.
    Chunks are summed in float32.
    """
    is_weight = which == WEIGHT_GRADIENT
    sample_bytes = (a[0].numel() + (b[0].numel() if is_weight else 0)) * a.element_size()
    step = samples_under(cap, sample_bytes, g.batch)
    parts: list[torch.Tensor] = []
    total: torch.Tensor | None = None
    for start in range(0, g.batch, step):
        chunk = slice(start, start + step)
        left, right = a[chunk], b[chunk] if is_weight else b
        kind = torch.channels_last if g.num_dims == 2 else torch.channels_last_3d
        if not (way is im2col.forward or way is im2col.weight_gradient) or not any(g.padding):
            left = left.contiguous(memory_format=kind)
            right = right.contiguous(memory_format=kind) if is_weight else b
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
