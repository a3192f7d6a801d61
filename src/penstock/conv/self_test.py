"""Self-test of the bypass: compares a grid of layers on one device with float64 on the CPU.

Tested by ``tests/integration/conv/test_inference.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.conv.bypass import bypass_convolutions
from penstock.conv.dispatcher_hook import default_devices

GRID: tuple[tuple[str, int, tuple[int, ...], dict[str, Any]], ...] = (
    ("Conv2d", 3, (32, 32), {"out": 16, "kernel_size": 3, "padding": 1}),
    ("Conv2d", 16, (32, 32), {"out": 32, "kernel_size": 3, "stride": 2, "padding": 1}),
    ("Conv2d", 32, (32, 32), {"out": 32, "kernel_size": 1}),
    ("Conv2d", 64, (32, 32), {"out": 64, "kernel_size": 3, "padding": 1}),
    ("Conv2d", 64, (32, 32), {"out": 64, "kernel_size": 3, "padding": 1, "groups": 2}),
    ("Conv2d", 32, (32, 32), {"out": 32, "kernel_size": 3, "padding": 1, "groups": 32}),
    ("Conv2d", 3, (64, 64), {"out": 16, "kernel_size": 7, "stride": 2, "padding": 3}),
    ("Conv2d", 8, (20, 20), {"out": 8, "kernel_size": 3, "padding": 2, "dilation": 2}),
    ("Conv2d", 8, (20, 20), {"out": 8, "kernel_size": 5, "padding": "same"}),
    ("Conv2d", 8, (20, 20), {"out": 8, "kernel_size": 3, "padding": 1, "padding_mode": "reflect"}),
    ("ConvTranspose2d", 16, (16, 16), {"out": 8, "kernel_size": 4, "stride": 2, "padding": 1}),
    ("Conv1d", 8, (50,), {"out": 16, "kernel_size": 5, "padding": 2}),
    ("Conv3d", 4, (8, 9, 10), {"out": 8, "kernel_size": 3, "padding": 1}),
)
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class SelfTestReport:
    """Result of :func:`selftest`. True if every layer is right."""

    device: str
    lines: tuple[str, ...]
    failures: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.failures


def selftest(device: str | None = None, say: Callable[[str], None] = print) -> SelfTestReport:
    """Compute a grid of layers with the bypass and compare the results with float64 on the CPU.

    Args:
        device: ``"cuda"`` or ``"cpu"``. Defaults to the GPU if there is one.
        say: Called with each line of the report.

    Example:
        >>> report = selftest("cpu", say=lambda line: None)
        >>> bool(report), len(report.failures)
        (True, 0)
    """
    device = device or default_devices()[0]
    lines: list[str] = []
    failures: list[str] = []

    def emit(line: str) -> None:
        lines.append(line)
        say(line)

    emit(f"Penstock's convolutions on {device}")
    for number, (kind, channels, size, spec) in enumerate(GRID, 1):
        options = {name: value for name, value in spec.items() if name != "out"}
        title = ", ".join(f"{name} {value}" for name, value in options.items())
        emit(f"{number}. {kind} {channels} -> {spec['out']}, {title}")
        for line in _check(device, kind, channels, size, spec["out"], options):
            emit(f"   {line}")
            if not line.startswith("ok"):
                failures.append(f"{number}. {kind}: {line}")
    emit(f"{len(failures)} failed" if failures else f"all {len(GRID)} passed")
    return SelfTestReport(device=device, lines=tuple(lines), failures=tuple(failures))


def _check(
    device: str, kind: str, channels: int, size: tuple[int, ...], out: int, options: dict[str, Any]
) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    layer: nn.Module = getattr(nn, kind)(channels, out, **options)
    x = torch.randn((2, channels, *size), generator=generator)
    try:
        with bypass_convolutions("on", devices=("cpu",) if device == "cpu" else ("cpu", device)):
            truth = _passes(layer.double(), x.double())
            ours = _passes(layer.to(device=device, dtype=torch.float32), x.to(device))
    except Exception as error:  # any error is part of the report
        return [f"failed: {type(error).__name__}: {error}"]
    names = ("forward", "input gradient", "weight gradient", "bias gradient")
    shape = f"{tuple(x.shape)} -> {tuple(truth[0].shape)}"
    lines = []
    for name, a, b in zip(names, ours, truth, strict=True):
        off = float((a.detach().double().cpu() - b).abs().max() / b.abs().max().clamp_min(1e-30))
        word = "ok  " if off <= TOLERANCE else "wrong"
        lines.append(
            f"{word} {name} {shape if name == 'forward' else ''}".rstrip() + f" ({off:.0e})"
        )
    return lines


def _passes(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    weight: Any = layer.weight
    bias: Any = layer.bias
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight, bias))]
