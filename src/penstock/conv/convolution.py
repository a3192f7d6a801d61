"""A convolution as torch's dispatcher asks for it, computed by one of the algorithms.

Everything that depends on shapes alone is worked out once and kept as a :class:`ConvolutionPlan`:
the geometry, and the layout of the results. What torch computes without a convolution library, or
refuses, has no plan (None) and is left to torch: its results and its errors are then the same
because they are torch's own.

Results lie in memory as torch predicts it, because compiled code is made for those strides:
``_select_conv_backend`` names the library that would have run, and
``_conv_determine_backend_memory_format`` how its results lie. The first also checks shapes, with
torch's own errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.conv import tuning
from penstock.conv.algorithms import triton_launch
from penstock.conv.algorithms.candidates import Candidate
from penstock.conv.geometry import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Geometry,
    Pass,
    output_size,
    transposed_size,
)

_TYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    }
)
Arguments = tuple[Any, ...]
"""Stride, padding, dilation, transposed, output padding and groups, as the dispatcher has them."""

_select_backend: Any = torch._C._select_conv_backend
_format_of: Any = getattr(torch._C, "_conv_determine_backend_memory_format", None)
"""Not there before torch 2; nothing is compiled there either."""
EMPTY_BACKENDS = frozenset({"Empty", "MkldnnEmpty"})
"""Of convolutions of nothing, which no library computes."""

_OUT_OF_MEMORY: type[Exception] = getattr(torch.cuda, "OutOfMemoryError", MemoryError)

CAP_VARIABLE = "PENSTOCK_CONV_MEMORY_MB"
DEFAULT_CAPS = {"cpu": 32 << 20, "cuda": 512 << 20}
"""On the CPU columns should stay near the caches; on a GPU large products are faster. Guesses that
the curve of benchmarks/convolution.py checks."""


def memory_cap_from_environment() -> int | None:
    """The cap in bytes that ``PENSTOCK_CONV_MEMORY_MB`` sets."""
    text = os.environ.get(CAP_VARIABLE, "")
    return int(text) << 20 if text.isdecimal() and int(text) else None


@dataclass(frozen=True, kw_only=True)
class ConvolutionPlan:
    """What was worked out for calls with the same shapes and settings.

    Args:
        kind: The probe's word for such convolutions.
        chosen: The algorithms, once they are settled.
    """

    geometry: Geometry
    is_transposed: bool
    kind: str
    chosen: dict[Any, Candidate] = field(default_factory=dict, repr=False, compare=False)


def make_plan(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    arguments: Arguments,
    sizes: Any = None,
) -> ConvolutionPlan | None:
    """The plan of a call, or None if it is torch's to compute or to refuse.

    Raises:
        RuntimeError: As torch would: shapes that do not fit.
    """
    if x.dtype not in _TYPES or w.dtype != x.dtype or w.device != x.device:
        return None
    if b is not None and (b.dtype != x.dtype or b.device != x.device):
        return None
    if arguments[5] <= 0 or any(d <= 0 for d in arguments[2]):
        return None
    backend = _backend_of(x, w, b, sizes, arguments)
    if str(backend).rpartition(".")[2] in EMPTY_BACKENDS or not w.numel():
        return None
    geometry = geometry_of(x, w, arguments)
    if geometry is None:
        return None
    last = _is_channels_last(x, w, backend)
    kind = "transposed" if arguments[3] else geometry.kind
    return ConvolutionPlan(
        geometry=replace(geometry, is_channels_last=last), is_transposed=arguments[3], kind=kind
    )


def geometry_of(x: torch.Tensor, w: torch.Tensor, arguments: Arguments) -> Geometry | None:
    """The sizes of a call, or None if torch refuses them."""
    num = w.dim() - 2
    if num not in (1, 2, 3) or x.dim() != w.dim():
        return None
    stride, padding, dilation, is_transposed, extra, groups = arguments
    stride, padding, dilation, extra = (
        tuple(values) * (num if len(values) == 1 else 1)
        for values in (stride, padding, dilation, extra)
    )
    size, kernel = tuple(x.shape[2:]), tuple(w.shape[2:])
    if is_transposed:
        # The input of this call is the output of the ordinary convolution.
        large = transposed_size(size, kernel, stride, padding, dilation, extra)
        small, channels = size, (w.shape[1] * groups, w.shape[0])
        if any(n <= 0 for n in large) or any(
            e >= s and e >= d for e, s, d in zip(extra, stride, dilation, strict=True)
        ):
            return None
    else:
        large, small = size, output_size(size, kernel, stride, padding, dilation)
        channels = (x.shape[1], w.shape[0])
        if any(n <= 0 for n in small):
            return None
    return Geometry(
        batch=x.shape[0],
        in_channels=channels[0],
        out_channels=channels[1],
        groups=groups,
        in_size=large,
        out_size=small,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )


def _backend_of(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, sizes: Any, arguments: Arguments
) -> Any:
    """The library that torch would call. Raises what torch raises for shapes that do not fit.

    Args:
        sizes: Those of the bias in a backward call, or None.
        arguments: Stride, padding, dilation, transposed, output padding and groups.
    """
    if b is None and sizes is not None and _format_of is not None:
        return _select_backend(x, w, None, *arguments, sizes)
    return _select_backend(x, w, b, *arguments)


def _is_channels_last(x: torch.Tensor, w: torch.Tensor, backend: Any) -> bool:
    """Whether the results have their channels innermost."""
    if w.dim() == 3:
        x, w = x.contiguous().unsqueeze(2), w.unsqueeze(2)
    if _format_of is None:
        kind = torch.channels_last if w.dim() == 4 else torch.channels_last_3d
        return any(not t.is_contiguous() and t.is_contiguous(memory_format=kind) for t in (x, w))
    return _format_of(x, w, backend) in (torch.channels_last, torch.channels_last_3d)


def to_layout(t: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """``t`` in exactly that layout; itself where it lies so already."""
    if not channels_last:
        return t.contiguous()
    if t.dim() == 3:
        return t.unsqueeze(2).contiguous(memory_format=torch.channels_last).squeeze(2)
    kind = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.contiguous(memory_format=kind)


class ConvolutionRunner:
    """Computes planned convolutions, and counts the algorithms used.

    Args:
        cap_bytes: For buffers of a call; None: the default of the device.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.counts: dict[str, int] = {}

    def forward(
        self, plan: ConvolutionPlan, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> torch.Tensor:
        """What ``aten::convolution`` gives."""
        which = INPUT_GRADIENT if plan.is_transposed else FORWARD
        y = self._run(plan, which, x, w)
        return y if b is None else y.add_(b.view(-1, *(1,) * plan.geometry.num_dims))

    def backward(
        self,
        plan: ConvolutionPlan,
        dy: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        mask: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """What ``aten::convolution_backward`` gives: the gradients of x, w and the bias."""
        dx = dw = db = None
        if mask[0]:
            which = FORWARD if plan.is_transposed else INPUT_GRADIENT
            dx = self._run(plan, which, dy, w.conj() if w.is_complex() else w)
        if mask[1]:
            seen = x.conj() if x.is_complex() else x
            pair = (dy, seen) if plan.is_transposed else (seen, dy)
            dw = self._run(plan, WEIGHT_GRADIENT, *pair)
        if mask[2]:
            db = dy.sum((0, *range(2, dy.dim())))
        return dx, dw, db

    def _run(
        self, plan: ConvolutionPlan, which: Pass, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        if a.is_cuda and a.device.index != torch.cuda.current_device():
            with torch.cuda.device(a.device):  # Triton starts kernels on the current one
                return self._run(plan, which, a, b)
        last = plan.geometry.is_channels_last
        a = to_layout(a.resolve_conj(), channels_last=last)
        if which == WEIGHT_GRADIENT:
            b = to_layout(b.resolve_conj(), channels_last=last)
        else:
            b = b.resolve_conj()
        cap = self.cap_bytes or DEFAULT_CAPS.get(a.device.type, DEFAULT_CAPS["cpu"])
        key = (which, cap, torch.are_deterministic_algorithms_enabled())
        algorithm = plan.chosen.get(key)
        if algorithm is None:
            algorithm, is_final = tuning.choose(plan.geometry, which, a, b, cap)
            if is_final:
                plan.chosen[key] = algorithm
        try:
            result = algorithm.run(plan.geometry, a, b, cap)
        except Exception as error:
            if not algorithm.needs_triton or isinstance(error, _OUT_OF_MEMORY):
                raise
            triton_launch.disable(error)
            plan.chosen.clear()
            return self._run(plan, which, a, b)
        self.counts[algorithm.name] = self.counts.get(algorithm.name, 0) + 1
        return to_layout(result, channels_last=last)
