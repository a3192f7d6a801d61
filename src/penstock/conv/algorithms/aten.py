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
from collections.abc import Callable
from typing import Any

import torch

from penstock.conv.geometry import (
    FORWARD,
    WEIGHT_GRADIENT,
    Geometry,
    Pass,
    Prepared,
    output_size,
)

NAME = "aten"
_aten: Any = torch.ops.aten
_c: Any = torch._C
_native_key: Any = _c.DispatchKey.CompositeExplicitAutograd
library_setting = threading.RLock()
"""Held while the library is off, and while the setting is read to plan or run other calls."""


def can(g: Geometry, which: Pass, dtype: torch.dtype) -> bool:
    """Return True if torch's kernels compute this pass in one piece and without extra rounding.

    They take their output size from the input. It is larger than that of ``g`` if the pass belongs
    to a dilated transposed convolution whose output padding is not below its stride.
    """
    if dtype.is_complex:
        return False
    if g.out_size != output_size(g.in_size, g.kernel, g.stride, g.padding, g.dilation):
        return False
    is_half = dtype in (torch.float16, torch.bfloat16)
    return g.is_depthwise or (g.groups == 1 and not (is_half and which == WEIGHT_GRADIENT))


def prepare(g: Geometry, a: torch.Tensor, b: torch.Tensor, cap_bytes: int, which: Pass) -> Prepared:
    """Compute one pass, with the library off."""
    if which == FORWARD:
        forward, given = _aten._convolution.default._op_dk, (None, *_arguments(g), *_FLAGS)
        return lambda x, w: forward(_native_key, x, w, *given)
    both = prepare_backward(g, [which != WEIGHT_GRADIENT, which == WEIGHT_GRADIENT, False])
    if which == WEIGHT_GRADIENT:
        weights = (g.out_channels, g.group_in, *g.kernel)
        return lambda x, dy: both(dy, x, x.new_empty(weights))[1]
    inputs = (g.batch, g.in_channels, *g.in_size)
    return lambda dy, w: both(dy, dy.new_empty(inputs), w)[0]


def prepare_backward(g: Geometry, mask: list[bool]) -> Callable[..., Any]:
    """Return a function of dy, x and w for the gradients of x, w and a bias, in one call."""
    backward, given = _aten.convolution_backward.default._op_dk, (None, *_arguments(g), mask)

    def run(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        with library_setting:
            was_on = _c._get_cudnn_enabled()
            _c._set_cudnn_enabled(False)
            try:
                return backward(_native_key, dy, x, w, *given)
            finally:
                _c._set_cudnn_enabled(was_on)

    return run


_FLAGS = (False, True, False, False)
"""Arguments of ``aten::_convolution``: benchmark, deterministic, library enabled, TF32."""


def _arguments(g: Geometry) -> tuple[Any, ...]:
    return [*g.stride], [*g.padding], [*g.dilation], False, [0] * g.num_dims, g.groups
