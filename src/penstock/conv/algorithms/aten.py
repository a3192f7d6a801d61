"""torch's own kernels, which call no convolution library.

torch computes depthwise convolutions with one kernel for each pass. Other convolutions are products
over the columns of one sample at a time, so these kernels are only offered for a single group.

Error: sums in float32. Weight gradients in half types are rounded after each sample, which exceeds
the bounds of the other algorithms, so they are not offered. Memory in addition to inputs and
results: none for depthwise convolutions, otherwise the columns of one sample. An input gradient
allocates an input that is never written, because torch's operator takes one for its size.

torch has no argument that turns the library off for a backward pass, only a global setting. It is
changed for the duration of a call, under :data:`library_setting`.

Tested by ``tests/gpu/conv/test_conv_algorithms_cuda.py``.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from penstock.conv.geometry import FORWARD, WEIGHT_GRADIENT, Geometry, Pass

NAME = "aten"
_aten: Any = torch.ops.aten
_c: Any = torch._C
_native_key: Any = _c.DispatchKey.CompositeExplicitAutograd
library_setting = threading.RLock()
"""Held while the library is off, and while the setting is read to plan or run other calls."""


def can(g: Geometry, which: Pass, dtype: torch.dtype) -> bool:
    """Return True if torch's kernels compute this pass in one piece and without extra rounding."""
    if dtype.is_complex:
        return False
    is_half = dtype in (torch.float16, torch.bfloat16)
    return g.is_depthwise or (g.groups == 1 and not (is_half and which == WEIGHT_GRADIENT))


def run(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int, which: Pass) -> torch.Tensor:
    """Compute one pass, with the library off."""
    if which == FORWARD:
        forward = _aten._convolution.default
        return forward._op_dk(  # type: ignore[no-any-return]
            _native_key, a, b, None, *_arguments(g), False, True, False, False
        )
    if which == WEIGHT_GRADIENT:
        w = a.new_empty((g.out_channels, g.group_in, *g.kernel))
        return backward(g, b, a, w, [False, True, False])[1]
    x = a.new_empty((g.batch, g.in_channels, *g.in_size))
    return backward(g, a, x, b, [True, False, False])[0]


def backward(
    g: Geometry, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of x, w and a bias that the mask selects, in one call."""
    operator = _aten.convolution_backward.default
    with library_setting:
        was_on = _c._get_cudnn_enabled()
        _c._set_cudnn_enabled(False)
        try:
            return operator._op_dk(  # type: ignore[no-any-return]
                _native_key, dy, x, w, None, *_arguments(g), mask
            )
        finally:
            _c._set_cudnn_enabled(was_on)


def _arguments(g: Geometry) -> tuple[Any, ...]:
    return [*g.stride], [*g.padding], [*g.dilation], False, [0] * g.num_dims, g.groups
