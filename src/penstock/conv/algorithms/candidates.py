"""Lists the algorithms that can compute one pass of a convolution, in order of expected speed.

On the CPU, and wherever nothing can be measured, the first candidate is used. Elsewhere
:mod:`penstock.conv.tuning` times the candidates. All algorithms take the same arguments; see
:data:`penstock.conv.geometry.Prepare`.
"""

from __future__ import annotations

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
    patches,
    triton_launch,
    winograd,
)
from penstock.conv.geometry import (
    INPUT_GRADIENT,
    PASSES,
    WEIGHT_GRADIENT,
    Geometry,
    Pass,
    Prepare,
    Prepared,
    Run,
    samples_under,
    sum_dtype,
)

MIN_WINOGRAD_CHANNELS = 32
"""With fewer channels, the transforms cost more than the multiplications they save. This value is
estimated: a tile takes 36*36 multiplications for its transform and 36*O for its products."""

MIN_TILES = 100
"""With fewer tiles in a batch, transforming the weights costs more than it saves. Measured on one
core of a Xeon in float32, relative to im2col: 128 tiles of 256 channels took 0.6 times as long, 16
tiles of 128 channels 1.5 times, and one tile of 512 channels 10 times."""
FOLD_BELOW = 4
"""If there are at least this many times more output than input channels, col2im comes first. It
takes the columns of ``x``, and a convolution of ``dy`` takes those of ``dy``, which are more."""


@dataclass(frozen=True)
class Candidate:
    """An algorithm for one pass.

    The name appears in ``Bypass.counts`` and in the file of measured choices.
    """

    name: str
    prepare: Prepare
    needs_triton: bool = False

    def run(self, g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int) -> torch.Tensor:
        """Prepare and compute the pass once."""
        return self.prepare(g, a, b, cap_bytes)(a, b)


def unprepared(run: Run) -> Prepare:
    """Return the preparation of an algorithm that has nothing to prepare."""
    return lambda g, _a, _b, cap_bytes: lambda a, b: run(g, a, b, cap_bytes)


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
    if patches.can(g):
        name = "1x1 product" if g.is_pointwise else "patches"
        found.append(Candidate(name, _PATCHES[which]))
    is_folded = which == INPUT_GRADIENT and not g.is_depthwise
    folded = [Candidate("columns, folded", col2im.prepare_input_gradient)] * is_folded
    if is_folded and FOLD_BELOW * g.group_in <= g.group_out:
        if has_triton and col2im.can_triton(g, dtype):
            run = col2im.prepare_folded_input_gradient
            found.append(Candidate("folded product", run, needs_triton=True))
        found += folded
        folded = []
    by_winograd = _winograd(g, which, dtype, has_triton=has_triton)
    by_triton = [] if not has_triton or g.is_depthwise else _implicit(g, which, dtype)
    by_columns = [Candidate("columns", _COLUMNS[which])]
    if which == INPUT_GRADIENT and not g.is_unit_stride:
        by_columns, folded = folded, []
    if g.is_depthwise:
        by_columns = []
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
            found.append(Candidate(aten.NAME, partial(aten.prepare, which=which)))
    return found


def _has_tiles(g: Geometry) -> bool:
    """Return True if there are enough tiles for Winograd."""
    return (
        g.num_dims == 2 and g.batch * -(-g.out_size[0] // 4) * -(-g.out_size[1] // 4) >= MIN_TILES
    )


# -- each algorithm --------------------------------------------------------------------------------


def _passes(module: Any, prefix: str = "prepare_") -> dict[Pass, Any]:
    """Return the passes of a module."""
    return {which: getattr(module, prefix + which.replace(" ", "_"), None) for which in PASSES}


_COLUMNS: dict[Pass, Prepare] = _passes(im2col)
_GATHERED: dict[Pass, Prepare] = _passes(im2col, "prepare_gathered_")
_SHIFTS: dict[Pass, Run] = _passes(depthwise, "")
_PATCHES, _WINOGRAD, _IMPLICIT, _DEPTHWISE_TRITON = map(
    _passes, (patches, winograd, implicit_gemm, depthwise)
)


def _winograd(g: Geometry, which: Pass, dtype: torch.dtype, *, has_triton: bool) -> list[Candidate]:
    is_wide = min(g.in_channels, g.out_channels) >= MIN_WINOGRAD_CHANNELS
    if not is_wide or dtype not in (torch.float32, torch.float64) or not winograd.can(g):
        return []
    found = [Candidate("winograd", _WINOGRAD[which])]
    if has_triton and winograd.can_triton(g, dtype):
        run = partial(_WINOGRAD[which], by=winograd.FUSED)
        found.insert(0, Candidate("winograd, fused", run, needs_triton=True))
    return found


def _implicit(g: Geometry, which: Pass, dtype: torch.dtype) -> list[Candidate]:
    if not implicit_gemm.can(g, dtype, which):
        return []
    tiles = {"implicit product, wide": implicit_gemm.WIDE, "implicit product": implicit_gemm.NARROW}
    found = [
        Candidate(name, partial(_IMPLICIT[which], tile=tile), needs_triton=True)
        for name, tile in tiles.items()
    ]
    if implicit_gemm.can_merge(g, dtype):
        run = partial(implicit_gemm.prepare_merged, which=which)
        found.insert(0, Candidate("merged groups", run, needs_triton=True))
    return found


def _depthwise(
    g: Geometry, which: Pass, dtype: torch.dtype, device: str, *, has_triton: bool
) -> list[Candidate]:
    found: list[Candidate] = []
    if has_triton and depthwise.can_triton(g, dtype):
        found.append(Candidate("depthwise lanes", _DEPTHWISE_TRITON[which], needs_triton=True))
    if device == "cuda" and aten.can(g, which, dtype):
        found.append(Candidate(aten.NAME, partial(aten.prepare, which=which)))
    else:  # on a GPU, these launches take longer than torch's kernels
        found.append(Candidate("shifts", unprepared(partial(_shifts, which=which))))
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
    if g.is_channels_last or g.is_depthwise:
        return []
    turned = replace(g, is_channels_last=True)
    found: list[tuple[str, Prepare, bool]] = []
    if has_triton and which == WEIGHT_GRADIENT and implicit_gemm.can(g, dtype):
        found.append(("implicit product", implicit_gemm.prepare_weight_gradient, True))
    if which != INPUT_GRADIENT or g.is_unit_stride:
        found.append(("columns", _COLUMNS[which], False))
    if has_triton and im2col.can_triton(turned, which, dtype):
        found.append(("gathered columns", _GATHERED[which], True))
    copies_itself = any(g.padding) and which != INPUT_GRADIENT
    return [
        Candidate(
            f"{name}, channels turned",
            partial(
                _prepare_turned,
                way=way,
                which=which,
                is_copied=needs_triton or not copies_itself,
            ),
            needs_triton,
        )
        for name, way, needs_triton in found
    ]


def _prepare_turned(
    g: Geometry,
    a: torch.Tensor,
    b: torch.Tensor,
    cap: int,
    way: Prepare,
    which: Pass,
    is_copied: bool,
) -> Prepared:
    """Prepare an algorithm for channels_last copies of the tensors.

    The copies stay under the memory cap, or hold one sample if a sample is larger than the cap.
    Chunks are summed in float32.

    Args:
        is_copied: False if the algorithm copies its input in any case, to pad it.
    """
    is_weight = which == WEIGHT_GRADIENT
    sample_bytes = (a[0].numel() + (b[0].numel() if is_weight else 0)) * a.element_size()
    step = samples_under(cap, sample_bytes, g.batch)

    def turn(t: torch.Tensor) -> torch.Tensor:
        return t.movedim(1, -1).contiguous().movedim(-1, 1) if is_copied else t

    def prepare(num: int) -> Prepared:
        chunk = replace(g, is_channels_last=True, batch=num)
        left, right = turn(a[:num]), turn(b[:num]) if is_weight else b
        run = way(chunk, left, right, cap)
        return (lambda a, b: run(turn(a), turn(b))) if is_weight else lambda a, b: run(turn(a), b)

    kinds = {num: prepare(num) for num in {step, g.batch % step or step}}
    if step == g.batch:
        return kinds[step]

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        starts = range(0, g.batch, step)
        pairs = ((a[i : i + step], b[i : i + step] if is_weight else b) for i in starts)
        parts = (kinds[len(left)](left, right) for left, right in pairs)
        if not is_weight:
            return torch.cat([*parts])
        total = next(parts).to(sum_dtype(a))
        for part in parts:
            total += part
        return total.to(a.dtype)

    return run
