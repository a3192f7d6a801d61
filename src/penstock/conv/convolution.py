"""Computes a convolution, given the dispatcher's arguments, with one of the algorithms.

Everything that depends only on shapes is computed once and kept as a :class:`ConvolutionPlan`: the
geometry, and the memory layout of the results. Convolutions that torch computes without a
convolution library, or rejects, have no plan (None) and are left to torch. Their results and errors
are therefore exactly torch's own.

Results have the strides that torch predicts, because compiled code relies on them.
``_select_conv_backend`` returns the library that torch would have called, and
``_conv_determine_backend_memory_format`` the memory layout of its results. The first also checks
shapes, with torch's own errors.

Tested by ``tests/integration/conv/test_bypass.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.conv import tuning
from penstock.conv.algorithms import aten, triton_launch
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
"""Stride, padding, dilation, transposed, output padding and groups, in the dispatcher's form."""

_select_backend: Any = torch._C._select_conv_backend
_format_of: Any = getattr(torch._C, "_conv_determine_backend_memory_format", None)
"""None before torch 2, where nothing is compiled and strides need not be predicted."""
EMPTY_BACKENDS = frozenset({"Empty", "MkldnnEmpty"})
"""Backends that torch selects for convolutions of empty tensors. No library is called."""

_OUT_OF_MEMORY: type[Exception] = getattr(torch.cuda, "OutOfMemoryError", MemoryError)

CAP_VARIABLE = "PENSTOCK_CONV_MEMORY_MB"
DEFAULT_CAPS = {"cpu": 32 << 20, "cuda": 512 << 20}
"""On the CPU the columns should be near the size of the caches. On a GPU large products are faster.
These values are estimates; benchmarks/convolution.py measures the curve."""


def memory_cap_from_environment() -> int | None:
    """Return the cap in bytes set by ``PENSTOCK_CONV_MEMORY_MB``, or None."""
    text = os.environ.get(CAP_VARIABLE, "")
    return int(text) << 20 if text.isdecimal() and int(text) else None


@dataclass(frozen=True, kw_only=True)
class ConvolutionPlan:
    """The plan for calls with the same shapes and settings.

    Args:
        kind: The probe's name for this kind of convolution.
        chosen: The algorithms chosen so far.
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
    """Return the plan of a call, or None if torch should compute or reject it.

    Raises:
        RuntimeError: Shapes do not match. The error is torch's own.
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
    """Return the sizes of a call, or None if torch rejects them."""
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
    """Return the library that torch would call. Raises torch's error if shapes do not match.

    Args:
        sizes: The sizes of the bias in a backward call, or None.
        arguments: Stride, padding, dilation, transposed, output padding and groups.
    """
    if b is None and sizes is not None and _format_of is not None:
        return _select_backend(x, w, None, *arguments, sizes)
    return _select_backend(x, w, b, *arguments)


def _is_channels_last(x: torch.Tensor, w: torch.Tensor, backend: Any) -> bool:
    """Return True if the results are in channels_last layout."""
    if w.dim() == 3:
        x, w = x.contiguous().unsqueeze(2), w.unsqueeze(2)
    if _format_of is None:
        kind = torch.channels_last if w.dim() == 4 else torch.channels_last_3d
        return any(not t.is_contiguous() and t.is_contiguous(memory_format=kind) for t in (x, w))
    return _format_of(x, w, backend) in (torch.channels_last, torch.channels_last_3d)


def to_layout(t: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return ``t`` in this memory layout. No copy is made if it already has it."""
    if not channels_last:
        return t.contiguous()
    if t.dim() == 3:
        return t.unsqueeze(2).contiguous(memory_format=torch.channels_last).squeeze(2)
    kind = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.contiguous(memory_format=kind)


class ConvolutionRunner:
    """Computes planned convolutions and counts the algorithms used.

    Args:
        cap_bytes: Limit for the buffers of a call. None uses the default of the device.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        self.cap_bytes = cap_bytes
        self.counts: dict[str, int] = {}

    def forward(
        self, plan: ConvolutionPlan, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the result of ``aten::convolution``."""
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
        """Return the result of ``aten::convolution_backward``: gradients of x, w and the bias."""
        dx = dw = db = None
        if mask[0] and mask[1] and self._are_aten(plan, dy):
            dx, dw, _ = aten.backward(plan.geometry, dy, x, w, [True, True, False])
            self.counts[aten.NAME] = self.counts.get(aten.NAME, 0) + 2
            last = plan.geometry.is_channels_last
            dx, dw = (to_layout(t, channels_last=last) for t in (dx, dw))
            mask = (False, False, mask[2])
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

    def _are_aten(self, plan: ConvolutionPlan, dy: torch.Tensor) -> bool:
        """Return True if torch's own kernels were chosen for both gradients."""
        keys = (self._key(which, dy) for which in (INPUT_GRADIENT, WEIGHT_GRADIENT))
        chosen = [plan.chosen.get(key) for key in keys]
        return not plan.is_transposed and all(one and one.name == aten.NAME for one in chosen)

    def _key(self, which: Pass, a: torch.Tensor) -> tuple[Pass, int, bool]:
        cap = self.cap_bytes or DEFAULT_CAPS.get(a.device.type, DEFAULT_CAPS["cpu"])
        return which, cap, torch.are_deterministic_algorithms_enabled()

    def _run(
        self, plan: ConvolutionPlan, which: Pass, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        if a.is_cuda and a.device.index != torch.cuda.current_device():
            with torch.cuda.device(a.device):  # Triton uses the current device
                return self._run(plan, which, a, b)
        last = plan.geometry.is_channels_last
        a = to_layout(a.resolve_conj(), channels_last=last)
        if which == WEIGHT_GRADIENT:
            b = to_layout(b.resolve_conj(), channels_last=last)
        else:
            b = b.resolve_conj()
        key = self._key(which, a)
        cap = key[1]
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
