"""Which convolution is this? Its sizes, as plain numbers, apart from any tensor.

A transposed convolution is the input gradient of an ordinary one, so every algorithm knows only the
ordinary kind and its three passes:

    forward           x, w   -> y
    input gradient    dy, w  -> dx
    weight gradient   x, dy  -> dw
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Pass = Literal["forward", "input gradient", "weight gradient"]
FORWARD: Pass = "forward"
INPUT_GRADIENT: Pass = "input gradient"
WEIGHT_GRADIENT: Pass = "weight gradient"
PASSES: tuple[Pass, ...] = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """An ordinary convolution of ``[batch, in_channels, *in_size]`` to ``[..., *out_size]``.

    Args:
        is_channels_last: Do the results lie in memory with the channels innermost?

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
        """Input channels of one group."""
        return self.in_channels // self.groups

    @property
    def group_out(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.groups

    @property
    def num_taps(self) -> int:
        return prod(self.kernel)

    @property
    def num_positions(self) -> int:
        """Places of the output, without the batch."""
        return prod(self.out_size)

    @property
    def num_multiplications(self) -> int:
        return self.batch * self.num_positions * self.out_channels * self.group_in * self.num_taps

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
        """The word under which the probe looks at such convolutions."""
        if self.num_dims != 2:
            return f"{self.num_dims}-d"
        if self.is_depthwise:
            return "depthwise"
        if self.groups > 1:
            return "grouped"
        if not self.is_undilated:
            return "dilated"
        return "plain" if self.is_unit_stride else "strided"


def output_size(
    in_size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Sizes:
    """The size of the output of an ordinary convolution.

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
    """The size of the output of a transposed convolution; ``extra`` is its output padding.

    Example:
        >>> transposed_size((5, 5), (3, 3), (2, 2), (1, 1), (1, 1), (0, 0))
        (9, 9)
    """
    sizes = zip(in_size, kernel, stride, padding, dilation, extra, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in sizes)
