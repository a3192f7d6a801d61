"""Sizes of a convolution, and the slices, strides and tensors derived from them.

A transposed convolution is the input gradient of an ordinary one, so every algorithm implements
only the three passes of ordinary convolutions:

    forward           x, w   -> y
    input gradient    dy, w  -> dx
    weight gradient   x, dy  -> dw

Tested by ``tests/integration/conv/test_bypass.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

import torch

Pass = Literal["forward", "input gradient", "weight gradient"]
FORWARD: Pass = "forward"
INPUT_GRADIENT: Pass = "input gradient"
WEIGHT_GRADIENT: Pass = "weight gradient"
PASSES: tuple[Pass, ...] = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)

Sizes = tuple[int, ...]
Run = Callable[["Geometry", torch.Tensor, torch.Tensor, int], torch.Tensor]
"""One pass of an algorithm. Takes the geometry, two tensors (x, w; dy, w; or x, dy), and the memory
cap in bytes."""
Prepared = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The same for one geometry and cap, and for two tensors with known dtype, device and strides."""
Prepare = Callable[["Geometry", torch.Tensor, torch.Tensor, int], Prepared]
"""Prepares a pass for tensors like the given ones, which are not kept."""
Step = Callable[[torch.Tensor], torch.Tensor]
"""A step of a prepared algorithm, from one tensor to the next."""
MakeResult = Callable[[torch.Tensor], torch.Tensor]
"""Allocates a result on the device of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """An ordinary convolution from ``[batch, in_channels, *in_size]`` to ``[..., *out_size]``.

    Args:
        is_channels_last: True if the results have the channels innermost in memory.

    Example:
        >>> Geometry(batch=2, in_channels=8, out_channels=16, groups=1, in_size=(9, 9),
        ...          out_size=(5, 5), kernel=(3, 3), stride=(2, 2), padding=(1, 1),
        ...          dilation=(1, 1)).kind
        'strided'
    """

    batch: int
    in_channels: int
    out_channels: int
    groups: int
    in_size: Sizes
    out_size: Sizes
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    is_channels_last: bool = False

    @property
    def num_dims(self) -> int:
        return len(self.kernel)

    @property
    def group_in(self) -> int:
        """The number of input channels of one group."""
        return self.in_channels // self.groups

    @property
    def group_out(self) -> int:
        """The number of output channels of one group."""
        return self.out_channels // self.groups

    @property
    def num_taps(self) -> int:
        return prod(self.kernel)

    @property
    def num_positions(self) -> int:
        """The number of output positions of one sample."""
        return prod(self.out_size)

    @property
    def padded_size(self) -> Sizes:
        return tuple(n + 2 * p for n, p in zip(self.in_size, self.padding, strict=True))

    @property
    def is_pointwise(self) -> bool:
        return self.num_taps == 1 and not any(self.padding)

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.group_in == 1

    @property
    def is_unit_stride(self) -> bool:
        return all(s == 1 for s in self.stride)

    @property
    def is_undilated(self) -> bool:
        return all(d == 1 for d in self.dilation)

    @property
    def kind(self) -> str:
        """The probe's name for this kind of convolution."""
        if self.num_dims != 2:
            return f"{self.num_dims}-d"
        if self.is_depthwise:
            return "depthwise"
        if self.groups > 1:
            return "grouped"
        if not self.is_undilated:
            return "dilated"
        return "plain" if self.is_unit_stride else "strided"

    def strides(self, channels: int, size: Sizes) -> Sizes:
        """Return the strides of a result ``[batch, channels, *size]`` in this memory layout.

        Example:
            >>> Geometry(batch=2, in_channels=8, out_channels=16, groups=1, in_size=(9, 9),
            ...          out_size=(9, 9), kernel=(1, 1), stride=(1, 1), padding=(0, 0),
            ...          dilation=(1, 1), is_channels_last=True).strides(8, (9, 9))
            (648, 1, 72, 8)
        """
        spatial = [prod(size[axis + 1 :]) for axis in range(len(size))]
        if self.is_channels_last:
            return (channels * prod(size), 1, *(channels * step for step in spatial))
        return (channels * prod(size), prod(size), *spatial)

    def taps(self) -> Iterator[Sizes]:
        """Iterate over the taps of the kernel, as indices along each axis."""
        return product(*(range(k) for k in self.kernel))

    def tap_slices(self, tap: Sizes) -> tuple[slice, ...]:
        """Return the part of the padded input that one tap reads, along each axis."""
        axes = zip(tap, self.dilation, self.out_size, self.stride, strict=True)
        return tuple(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in axes)

    @property
    def unpadded_slices(self) -> tuple[slice, ...]:
        """The part of the padded input that is not padding, along each axis."""
        return tuple(slice(p, p + n) for p, n in zip(self.padding, self.in_size, strict=True))


def turned(g: Geometry) -> Geometry:
    """Return the convolution of ``dy`` that computes the input gradient. The stride is 1.

    Its taps are in reverse. Its padding is negative if that of ``g`` exceeds the kernel.
    """
    axes = zip(g.kernel, g.padding, g.dilation, strict=True)
    return replace(
        g,
        in_channels=g.out_channels,
        out_channels=g.in_channels,
        in_size=g.out_size,
        out_size=g.in_size,
        padding=tuple(d * (k - 1) - p for k, p, d in axes),
    )


def empty(g: Geometry, channels: int, size: Sizes, dtype: torch.dtype) -> MakeResult:
    """Return a function that allocates ``[batch, channels, *size]`` in the geometry's layout."""
    shape, strides = (g.batch, channels, *size), g.strides(channels, size)

    def make(like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)

    return make


def dense(
    g: Geometry, t: torch.Tensor, channels: int, size: Sizes
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function for tensors like ``t``, which copies them if they lack the layout."""
    ordered = t.movedim(1, -1) if g.is_channels_last else t
    if ordered.is_contiguous():
        return lambda t: t
    make = empty(g, channels, size, t.dtype)
    return lambda t: make(t).copy_(t)


def sum_dtype(t: torch.Tensor) -> torch.dtype:
    """Return the dtype for sums of products: float32 for half types, else that of the tensor."""
    return torch.float32 if t.element_size() == 2 else t.dtype


def samples_under(cap_bytes: int, sample_bytes: int, batch: int) -> int:
    """Return how many samples to compute at a time under the memory cap. At least one."""
    return max(1, min(batch, cap_bytes // max(1, sample_bytes)))


def output_size(
    in_size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Sizes:
    """Return the output size of an ordinary convolution.

    Example:
        >>> output_size((9, 9), (3, 3), (2, 2), (1, 1), (1, 1))
        (5, 5)
    """
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(in_size, kernel, stride, padding, dilation, strict=True)
    )


def transposed_size(
    in_size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, extra: Sizes
) -> Sizes:
    """Return the output size of a transposed convolution. ``extra`` is its output padding.

    Example:
        >>> transposed_size((5, 5), (3, 3), (2, 2), (1, 1), (1, 1), (0, 0))
        (9, 9)
    """
    sizes = zip(in_size, kernel, stride, padding, dilation, extra, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in sizes)
