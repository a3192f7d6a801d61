"""Input gradients as ordinary convolutions of stride 1, one for each phase of the stride.

With stride ``s``, the input positions fall into ``s`` phases along each axis. A position ``h`` gets
gradients only from the taps ``t`` with ``t * dilation = h + padding`` modulo ``s``. So each phase
is a convolution of ``dy`` with some of the taps, with stride 1, and multiplies no inserted zeros.
With stride 1 there is one phase: a convolution with the taps in reverse.

Error and memory: those of the algorithm that computes the phases, for the largest phase. With more
than one phase there is also a copy of the phase's result.

Tested by ``tests/unit/conv/algorithms/test_candidates.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import torch

from penstock.conv.geometry import Geometry, empty

Forward = Callable[[Geometry, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Axis:
    """One phase along one axis.

    Args:
        start: First input position of this phase. The others follow at steps of ``stride``.
        num: Number of positions.
        taps: First tap, and the step to the next.
        num_taps: Number of taps that contribute to this phase.
        offset: The position in ``dy`` that the first tap reads for the first input position.
        step: Positions in ``dy`` to go back from one tap to the next.
    """

    start: int
    num: int
    taps: tuple[int, int]
    num_taps: int
    offset: int
    step: int


def axis_phases(
    in_size: int, kernel: int, stride: int, padding: int, dilation: int
) -> Iterator[Axis]:
    """Yield the phases along one axis.

    Example:
        >>> [(phase.start, phase.taps, phase.num_taps) for phase in axis_phases(8, 3, 2, 1, 1)]
        [(0, (1, 2), 1), (1, (0, 2), 2)]
    """
    tap_step = stride // gcd(stride, dilation)
    for start in range(min(stride, in_size)):
        place = start + padding
        first = next(
            (t for t in range(min(tap_step, kernel)) if (place - t * dilation) % stride == 0), None
        )
        num = len(range(start, in_size, stride))
        if first is None:
            yield Axis(start, num, (0, tap_step), 0, 0, 0)
            continue
        num_taps = len(range(first, kernel, tap_step))
        offset = (place - first * dilation) // stride
        yield Axis(start, num, (first, tap_step), num_taps, offset, tap_step * dilation // stride)


def phases(g: Geometry) -> Iterator[tuple[Axis, ...]]:
    """Yield every phase of the input, over all axes."""
    axes = zip(g.in_size, g.kernel, g.stride, g.padding, g.dilation, strict=True)
    yield from product(*(list(axis_phases(*axis)) for axis in axes))


def input_gradient(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, forward: Forward
) -> torch.Tensor:
    """Compute ``dx`` as ``[batch, in_channels, *in_size]``, each phase with ``forward``.

    Args:
        forward: The forward pass of an algorithm. It is called with stride 1.
    """
    turned = _turn(g, w)
    parts = list(phases(g))
    if len(parts) == 1 and all(axis.num_taps for axis in parts[0]):
        return _phase(g, dy, turned, parts[0], forward)
    dx = empty(g, g.in_channels, g.in_size, dy.dtype)(dy)
    for phase in parts:
        spans = (slice(a.start, None, s) for a, s in zip(phase, g.stride, strict=True))
        place = (slice(None), slice(None), *spans)
        if all(axis.num_taps for axis in phase):
            dx[place] = _phase(g, dy, turned, phase, forward)
        else:
            dx[place] = 0
    return dx


def _turn(g: Geometry, w: torch.Tensor) -> torch.Tensor:
    """Return the weights with input and output channels swapped in each group."""
    grouped = w.reshape(g.groups, g.group_out, g.group_in, *g.kernel).transpose(1, 2)
    return grouped.reshape(g.in_channels, g.group_out, *g.kernel)


def _phase(
    g: Geometry, dy: torch.Tensor, w: torch.Tensor, phase: tuple[Axis, ...], forward: Forward
) -> torch.Tensor:
    """Compute one phase. Its first tap reads ``dy`` at ``offset``, the next one ``step`` before."""
    lows, highs = [], []
    for axis, size in zip(phase, g.out_size, strict=True):
        reach = (axis.num_taps - 1) * axis.step
        lows.append(reach - axis.offset)  # positions missing before dy; surplus if negative
        highs.append(axis.offset + axis.num - size)
    taps = (slice(None), slice(None), *(slice(a.taps[0], None, a.taps[1]) for a in phase))
    kernel = w[taps].flip(tuple(range(2, g.num_dims + 2)))
    source, padding = _fit(dy, lows, highs)
    turned = replace(
        g,
        in_channels=g.out_channels,
        out_channels=g.in_channels,
        in_size=tuple(source.shape[2:]),
        out_size=tuple(axis.num for axis in phase),
        kernel=tuple(axis.num_taps for axis in phase),
        stride=(1,) * g.num_dims,
        padding=padding,
        dilation=tuple(max(1, axis.step) for axis in phase),
    )
    return forward(turned, source, kernel)


def _fit(
    dy: torch.Tensor, lows: list[int], highs: list[int]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return ``dy`` cut or padded to the range that a phase reads, and the padding left to do.

    Equal padding at both edges is left to the algorithm. The rest is padded here.
    """
    cut = dy
    padding, pads = [], []
    for axis, (low, high) in enumerate(zip(lows, highs, strict=True)):
        size = dy.shape[axis + 2]
        cut = cut.narrow(axis + 2, max(0, -low), size - max(0, -low) - max(0, -high))
        low, high = max(0, low), max(0, high)
        padding.append(min(low, high))
        pads.append((low - padding[-1], high - padding[-1]))
    if any(low or high for low, high in pads):
        flat = [amount for pair in reversed(pads) for amount in pair]
        cut = torch.nn.functional.pad(cut, flat)
    return cut, tuple(padding)
