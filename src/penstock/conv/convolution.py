"""Computes a convolution, given the dispatcher's arguments, with one of the algorithms.

Everything that depends only on shapes, strides and settings is computed once and kept as a
:class:`ConvolutionPlan`: the geometry, the memory layout of the results, and the prepared
algorithms. A later call only looks up its plan. Convolutions that torch computes without a
convolution library, or rejects, have no plan and are left to torch. Their results and errors are
therefore exactly torch's own.

Results have the strides that torch predicts, because compiled code relies on them.
``_select_conv_backend`` returns the library that torch would have called, and
``_conv_determine_backend_memory_format`` the memory layout of its results. The first also checks
shapes, with torch's own errors.

Tested by ``tests/integration/conv/test_bypass.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    Prepared,
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

_c: Any = torch._C
_current_device: Any = getattr(_c, "_cuda_getDevice", None)
_select_backend: Any = _c._select_conv_backend
_format_of: Any = getattr(torch._C, "_conv_determine_backend_memory_format", None)
"""None before torch 2, where nothing is compiled and strides need not be predicted."""
MAX_PLANS = 4096
"""The number of plans kept. When it is exceeded, all plans are discarded and made again."""
_BOTH = "both gradients"
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
    """The plan for calls with the same shapes, strides and settings.

    Args:
        kind: The probe's name for this kind of convolution.
        cap_bytes: Limit for the buffers of a call.
        chosen: The algorithm of each pass, once the choice is final.
        tried: The algorithm of each pass until then.
        prepared: The algorithms used so far, prepared for the strides of this plan.
    """

    geometry: Geometry
    is_transposed: bool
    kind: str
    cap_bytes: int = DEFAULT_CAPS["cpu"]
    chosen: dict[Pass, Candidate] = field(default_factory=dict, repr=False, compare=False)
    tried: dict[Pass, Candidate] = field(default_factory=dict, repr=False, compare=False)
    prepared: dict[Any, Prepared] = field(default_factory=dict, repr=False, compare=False)


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


IsOurs = Callable[[ConvolutionPlan, torch.dtype, Sequence[Pass]], bool]


class ConvolutionRunner:
    """Computes convolutions and counts the algorithms used.

    Args:
        cap_bytes: Limit for the buffers of a call. None uses the default of the device.
        is_ours: Returns False for calls to leave to torch.
    """

    def __init__(self, cap_bytes: int | None = None, is_ours: IsOurs = lambda *_: True) -> None:
        self.cap_bytes = cap_bytes
        self.counts: dict[str, int] = {}
        self.plans: dict[Any, ConvolutionPlan | None] = {}
        self._is_ours = is_ours

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, arguments: Arguments
    ) -> torch.Tensor | None:
        """Return the result of ``aten::convolution``, or None to leave the call to torch."""
        stride, padding, dilation, is_transposed, extra, groups = arguments
        key = (
            *(x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device),
            None if b is None else (b.shape, b.dtype, b.device),
            *(tuple(stride), tuple(padding), tuple(dilation), is_transposed, tuple(extra), groups),
            *_settings(),
        )
        try:
            plan = self.plans[key]
        except KeyError:
            with aten.library_setting:
                plan = self._keep(key, make_plan(x, w, b, arguments), x, (FORWARD,))
        if plan is None:
            return None
        y = self._run(plan, INPUT_GRADIENT if is_transposed else FORWARD, x, w)
        return y if b is None else y.add_(b.view(-1, *(1,) * plan.geometry.num_dims))

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, sizes: Any, rest: Arguments
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None:
        """Return the result of ``aten::convolution_backward``, or None to leave it to torch.

        Args:
            sizes: The sizes of the bias, or None.
            rest: The arguments of the convolution, and which gradients to compute: of x, of w and
                of the bias.
        """
        stride, padding, dilation, is_transposed, extra, groups, (of_x, of_w, of_b) = rest
        key = (
            *(dy.shape, dy.stride(), dy.dtype, dy.device, x.shape, x.stride(), x.dtype, x.device),
            *(w.shape, w.stride(), w.dtype, w.device, None if sizes is None else tuple(sizes)),
            *(tuple(stride), tuple(padding), tuple(dilation), is_transposed, tuple(extra), groups),
            *(of_x, of_w, *_settings()),
        )
        try:
            plan = self.plans[key]
        except KeyError:
            with aten.library_setting:
                plan = make_plan(x, w, None, rest[:6], sizes)
                plan = plan if plan is not None and _fits(plan, dy, x) else None
                asked = [INPUT_GRADIENT] * of_x + [WEIGHT_GRADIENT] * of_w
                plan = self._keep(key, plan, x, asked)
        if plan is None:
            return None
        dx = dw = db = None
        if _BOTH in plan.prepared:
            dx, dw = plan.prepared[_BOTH](dy, x, w)  # type: ignore[call-arg]
            self.counts[aten.NAME] = self.counts.get(aten.NAME, 0) + 2
        else:
            if of_x:
                which = FORWARD if is_transposed else INPUT_GRADIENT
                dx = self._run(plan, which, dy, w.conj() if w.is_complex() else w)
            if of_w:
                x = x.conj() if x.is_complex() else x
                dw = self._run(plan, WEIGHT_GRADIENT, *((dy, x) if is_transposed else (x, dy)))
        if of_b:
            db = dy.sum((0, *range(2, dy.dim())))
        return dx, dw, db

    def _keep(
        self, key: Any, plan: ConvolutionPlan | None, x: torch.Tensor, passes: Sequence[Pass]
    ) -> ConvolutionPlan | None:
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        if plan is not None:
            cap = self.cap_bytes or DEFAULT_CAPS.get(x.device.type, DEFAULT_CAPS["cpu"])
            plan = replace(plan, cap_bytes=cap) if self._is_ours(plan, x.dtype, passes) else None
        self.plans[key] = plan
        return plan

    def _run(
        self, plan: ConvolutionPlan, which: Pass, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        if a.is_cuda and a.get_device() != _current_device():
            with torch.cuda.device(a.device):  # Triton uses the current device
                return self._run(plan, which, a, b)
        algorithm = plan.chosen.get(which)
        if algorithm is None:
            algorithm = plan.tried.get(which)
            if algorithm is None or tuning.has_time():
                algorithm = plan.tried[which] = self._choose(plan, which, a, b)
        name = algorithm.name
        try:
            run = plan.prepared.get((which, name))
            result = run(a, b) if run else self._prepare(plan, which, algorithm, a, b)
        except Exception as error:
            if not algorithm.needs_triton or isinstance(error, _OUT_OF_MEMORY):
                raise
            triton_launch.disable(error)
            tuning.forget_measurements()  # they could start with another Triton kernel
            plan.chosen.clear()
            plan.tried.clear()
            return self._run(plan, which, a, b)
        self.counts[name] = self.counts.get(name, 0) + 1
        return result

    def _choose(
        self, plan: ConvolutionPlan, which: Pass, a: torch.Tensor, b: torch.Tensor
    ) -> Candidate:
        """Choose an algorithm for tensors in the layout that algorithms take."""
        g = plan.geometry
        a, b = (settle(t) for settle, t in zip(_settlers(g, which, a, b), (a, b), strict=True))
        algorithm, is_final = tuning.choose(g, which, a, b, plan.cap_bytes)
        if is_final:
            plan.chosen[which] = algorithm
            pair = [plan.chosen.get(one) for one in (INPUT_GRADIENT, WEIGHT_GRADIENT)]
            if not plan.is_transposed and all(one and one.name == aten.NAME for one in pair):
                plan.prepared[_BOTH] = _prepare_both(g)
        return algorithm

    def _prepare(
        self, plan: ConvolutionPlan, which: Pass, algorithm: Candidate, *pair: torch.Tensor
    ) -> torch.Tensor:
        """Prepare an algorithm for tensors like these, and return its result for them."""
        g, last = plan.geometry, plan.geometry.is_channels_last
        first, second = settlers = _settlers(g, which, *pair)
        a, b = (settle(t) for settle, t in zip(settlers, pair, strict=True))
        run = inner = algorithm.prepare(g, a, b, plan.cap_bytes)
        if first is not _same or second is not _same:
            run = lambda a, b: inner(first(a), second(b))  # noqa: E731
        result = inner(a, b)
        settled = to_layout(result, channels_last=last)
        if settled.data_ptr() != result.data_ptr():
            last_run = run
            run = lambda a, b: to_layout(last_run(a, b), channels_last=last)  # noqa: E731
        plan.prepared[which, algorithm.name] = run
        return settled


def _same(t: torch.Tensor) -> torch.Tensor:
    return t


def _settlers(
    g: Geometry, which: Pass, a: torch.Tensor, b: torch.Tensor
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return functions that give tensors like these the layout that algorithms take.

    Weights keep their layout.
    """
    last = g.is_channels_last

    def settle(t: torch.Tensor) -> torch.Tensor:
        return to_layout(t.resolve_conj(), channels_last=last)

    def is_settled(t: torch.Tensor) -> bool:
        return to_layout(t, channels_last=last).data_ptr() == t.data_ptr()

    if not a.is_complex():
        is_weight = which != WEIGHT_GRADIENT
        return [_same if is_settled(a) else settle, _same if is_weight or is_settled(b) else settle]
    return [settle, settle if which == WEIGHT_GRADIENT else torch.Tensor.resolve_conj]


def _prepare_both(g: Geometry) -> Callable[..., Any]:
    """Return torch's own kernels for both gradients, in one call."""
    backward = aten.prepare_backward(g, [True, True, False])

    def run(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        last = g.is_channels_last
        return [to_layout(t, channels_last=last) for t in backward(dy, x, w)[:2]]

    return run


def _fits(plan: ConvolutionPlan, dy: torch.Tensor, x: torch.Tensor) -> bool:
    """Return True if ``dy`` matches the output. If not, torch raises its own error."""
    g = plan.geometry
    shape = (g.batch, g.in_channels, *g.in_size)
    if not plan.is_transposed:
        shape = (g.batch, g.out_channels, *g.out_size)
    return tuple(dy.shape) == shape and dy.dtype == x.dtype and dy.device == x.device


def _settings() -> tuple[bool, bool, bool]:
    """Return the global settings that a plan depends on."""
    with aten.library_setting:
        return (
            _c._get_cudnn_enabled(),
            _c._get_mkldnn_enabled(),
            _c._get_deterministic_algorithms(),
        )
