"""Convolution cases with their exact results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from penstock.conv.geometry import Geometry, Pass, output_size


@dataclass(frozen=True, kw_only=True)
class Case:
    """One convolution, with the same numbers along every axis.

    Args:
        extra: Output padding of the transposed convolution that has this one as input gradient. The
            end of the input is padded by this much less.
    """

    name: str
    channels: int = 8
    outputs: int = 8
    groups: int = 1
    size: tuple[int, ...] = (9, 11)
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    extra: int = 0
    batch: int = 2

    @property
    def num_dims(self) -> int:
        return len(self.size)

    def geometry(self, *, is_channels_last: bool) -> Geometry:
        kernel, stride, padding, dilation = (
            (n,) * self.num_dims for n in (self.kernel, self.stride, self.padding, self.dilation)
        )
        return Geometry(
            batch=self.batch,
            in_channels=self.channels,
            out_channels=self.outputs,
            groups=self.groups,
            in_size=self.size,
            out_size=output_size(
                tuple(n - self.extra for n in self.size), kernel, stride, padding, dilation
            ),
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            is_channels_last=is_channels_last,
        )


CASES = (
    Case(name="plain"),
    Case(name="wide plain", channels=40, outputs=36, size=(13, 10)),
    Case(name="pointwise", channels=20, outputs=12, kernel=1, padding=0),
    Case(name="strided pointwise", kernel=1, padding=0, stride=2),
    Case(name="stem", channels=3, outputs=16, kernel=7, stride=2, padding=3, size=(17, 20)),
    Case(name="strided", stride=2, channels=17),
    Case(name="stride beyond kernel", stride=3, kernel=2, padding=0),
    Case(name="patches", channels=3, outputs=5, kernel=4, stride=4, padding=0, size=(8, 12)),
    Case(name="3-d patches", kernel=2, stride=2, padding=0, size=(4, 5, 6)),
    Case(name="dilated", dilation=2, padding=2),
    Case(name="dilated, 48 channels", dilation=2, padding=3, channels=48, outputs=32),
    Case(name="strided and dilated", dilation=2, stride=2, padding=1),
    Case(name="padding beyond kernel", padding=3),
    Case(name="dilated, output padding", dilation=2, channels=16, outputs=16, extra=1),
    Case(name="1x1, output padding", kernel=1, padding=2, dilation=2, extra=1),
    Case(name="grouped", groups=4, channels=16, outputs=24),
    Case(name="grouped, 24 channels each", groups=2, channels=48, outputs=48),
    Case(name="grouped, strided", groups=2, channels=34, outputs=4, stride=2),
    Case(name="depthwise", groups=8),
    Case(name="depthwise, strided", groups=8, stride=2, kernel=5, padding=2),
    Case(name="depthwise, dilated", groups=8, dilation=2, padding=3),
    Case(name="depthwise, strided and dilated", groups=8, dilation=2, stride=2),
    Case(name="depthwise 7x7", groups=8, kernel=7, padding=3),
    Case(name="depthwise, two outputs each", groups=8, outputs=16),
    Case(name="1-d", size=(19,), kernel=5, padding=2),
    Case(name="1-d, 16 channels", size=(19,), channels=16, dilation=2),
    Case(name="1-d, 33 taps", size=(40,), channels=16, kernel=33, padding=16),
    Case(name="1-d, strided groups", size=(19,), stride=2, groups=2),
    Case(name="3-d", size=(5, 6, 7)),
    Case(name="3-d, 16 channels", size=(5, 6, 7), channels=16, outputs=16),
    Case(name="3-d, strided", size=(5, 6, 7), stride=2, groups=2),
    Case(name="one place", size=(1, 1), kernel=1, padding=0),
)


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Tensors of a case, and the expected result of each pass in float64."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    results: dict[Pass, torch.Tensor]
    scales: dict[Pass, torch.Tensor]
    """The same passes over absolute values, used as the scale of rounding errors."""

    def arguments(self, which: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        return {
            "forward": (self.x, self.w),
            "input gradient": (self.dy, self.w),
            "weight gradient": (self.x, self.dy),
        }[which]


def exact(
    case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0, largest: float = 1.0
) -> Exact:
    """Make the tensors of a case (rounded to ``dtype``) and compute all passes on the CPU.

    Args:
        largest: Factor for a hundredth of the values of ``x`` and ``dy``.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def make_uneven(*shape: int) -> torch.Tensor:
        t = make(*shape)
        if largest == 1:
            return t
        return torch.where(torch.rand(shape, generator=generator) < 0.01, t * largest, t)

    g = case.geometry(is_channels_last=False)
    x = make_uneven(g.batch, g.in_channels, *g.in_size)
    w = make(g.out_channels, g.group_in, *g.kernel)
    dy = make_uneven(g.batch, g.out_channels, *g.out_size)
    return Exact(
        x=x.to(device),
        w=w.to(device),
        dy=dy.to(device),
        results=_passes(case, x, w, dy),
        scales=_passes(case, x.abs(), w.abs(), dy.abs()),
    )


def _passes(
    case: Case, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
) -> dict[Pass, torch.Tensor]:
    convolve: Any = getattr(functional, f"conv{case.num_dims}d")
    x, w = (t.detach().double().detach().requires_grad_() for t in (x, w))
    padded = functional.pad(x, [case.padding, case.padding - case.extra] * case.num_dims)
    y = convolve(padded, w, None, case.stride, 0, case.dilation, case.groups)
    dx, dw = torch.autograd.grad(y, (x, w), dy.double())
    return {"forward": y.detach(), "input gradient": dx, "weight gradient": dw}


def bound(name: str, dtype: torch.dtype) -> float:
    """Return the allowed error of an algorithm for random values, in units of :func:`distance`.

    For Winograd this is stricter than the bound it states, which is relative to the largest sum.
    """
    epsilon = torch.finfo(dtype).eps
    if name.startswith("winograd"):
        return 128 * epsilon
    return 8 * epsilon


def distance(result: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the largest error, in units of the sum of absolute products at that element.

    Sums under a thousandth of the largest count as that much.
    """
    difference = (result.detach().double().cpu() - truth).abs()
    return float((difference / scale.clamp_min(scale.max() * 1e-3)).max())
