"""One input channel for each group: shifted multiply-adds, or ATen's own kernel.

*Shifts*: each tap of the kernel is one shifted view of the padded input times a number for each
channel, added up (in float32 for half types). Error: one rounding for each tap, and one at the end.
Memory in elements, beside inputs and results: the padded input; for half types twice the result.

*ATen*: ``aten::_conv_depthwise2d`` on a GPU is torch's own kernel and calls no vendor library. It
has no backward of its own; with stride 1 the input gradient is the same kernel with the taps in
reverse. Error and memory as ATen's: sums in float32, nothing beside the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from penstock.conv.geometry import Geometry

_aten: Any = torch.ops.aten


def _taps(g: Geometry, padded: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Each tap with what it sees of the padded input, as a view like the output."""
    for place in product(*(range(k) for k in g.kernel)):
        spans = (
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(place, g.dilation, g.out_size, g.stride, strict=True)
        )
        whole = (slice(None), slice(None), *spans)
        yield place, padded[whole]


def _pad(g: Geometry, x: torch.Tensor) -> torch.Tensor:
    pads = [amount for p in reversed(g.padding) for amount in (p, p)]
    return torch.nn.functional.pad(x, pads) if any(pads) else x


def _by_channel(g: Geometry, dy: torch.Tensor) -> torch.Tensor:
    """``[batch, channel, output of the channel, places]``."""
    return dy.reshape(dy.shape[0], g.in_channels, g.group_out, *dy.shape[2:])


def _sums(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.element_size() == 2 else x.dtype


def forward(g: Geometry, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``y``; a group may have several outputs."""
    many = g.group_out
    padded = _pad(g, x)
    # axes: batch, channel, output of the channel, places
    y = _zeros(g, x, (g.in_channels, many), g.out_size)
    kernels = w.reshape(1, g.in_channels, many, *g.kernel, *(1,) * g.num_dims).to(_sums(x))
    for place, seen in _taps(g, padded):
        y.addcmul_(seen.unsqueeze(2), kernels[(slice(None),) * 3 + place])
    return y.flatten(1, 2).to(x.dtype)


def input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``dx``: each tap adds its share to the places it saw."""
    many = g.group_out
    padded = _zeros(g, dy, (g.in_channels,), g.padded_size)
    errors = _by_channel(g, dy)
    kernels = w.reshape(1, g.in_channels, many, *g.kernel, *(1,) * g.num_dims).to(_sums(dy))
    for place, seen in _taps(g, padded):
        kernel = kernels[(slice(None),) * 3 + place]
        if many == 1:
            seen.addcmul_(errors.squeeze(2), kernel.squeeze(2))
        else:
            seen.add_((errors * kernel).sum(2))
    spans = (slice(p, p + n) for p, n in zip(g.padding, g.in_size, strict=True))
    whole = (slice(None), slice(None), *spans)
    return padded[whole].to(dy.dtype)


def weight_gradient(g: Geometry, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """``dw``: for each tap, what it saw times what came of it."""
    padded = _pad(g, x)
    errors = _by_channel(g, dy)
    dw = x.new_empty((g.in_channels, g.group_out, *g.kernel), dtype=_sums(x))
    axes = (0, *range(3, g.num_dims + 3))
    for place, seen in _taps(g, padded):
        dw[(slice(None),) * 2 + place] = (seen.unsqueeze(2) * errors).sum(axes, dtype=_sums(x))
    return dw.to(x.dtype).view(g.out_channels, 1, *g.kernel)


def _zeros(
    g: Geometry, like: torch.Tensor, channels: tuple[int, ...], size: tuple[int, ...]
) -> torch.Tensor:
    if not g.is_channels_last:
        return like.new_zeros((g.batch, *channels, *size), dtype=_sums(like))
    last = like.new_zeros((g.batch, *size, *channels), dtype=_sums(like))
    num = len(size)
    return last.permute(0, *range(num + 1, num + 1 + len(channels)), *range(1, num + 1))


# -- ATen's kernel ---------------------------------------------------------------------------------


def aten_forward(g: Geometry, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``y`` by ``aten::_conv_depthwise2d`` (CUDA and ROCm, two axes)."""
    return _aten._conv_depthwise2d(  # type: ignore[no-any-return]
        x, w, list(g.kernel), None, list(g.stride), list(g.padding), list(g.dilation)
    )


def aten_input_gradient(g: Geometry, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``dx`` by the same kernel; stride 1, one output for each group."""
    padding = [d * (k - 1) - p for d, k, p in zip(g.dilation, g.kernel, g.padding, strict=True)]
    return _aten._conv_depthwise2d(  # type: ignore[no-any-return]
        dy, w.flip((2, 3)), list(g.kernel), None, [1, 1], padding, list(g.dilation)
    )


def can_aten_input_gradient(g: Geometry) -> bool:
    """May the kernel with reversed taps compute ``dx`` here?"""
    reach = zip(g.dilation, g.kernel, g.padding, strict=True)
    return g.is_unit_stride and g.group_out == 1 and all(d * (k - 1) >= p for d, k, p in reach)
