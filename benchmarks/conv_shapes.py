"""The eleven layers, and the contenders: the library, ATen, unfold + matmul, and Penstock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from penstock.conv.bypass import bypass_convolutions


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One convolution of a network, with the batch size it is measured at."""

    name: str
    batch: int
    channels: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1

    def scaled(self, divisor: int) -> Layer:
        return Layer(**{**self.__dict__, "batch": max(1, self.batch // divisor)})


LAYERS = (
    Layer(name="YOLOv8 stem 3>16 3x3/2 @640", batch=8, channels=3, outputs=16, size=640,
          kernel=3, stride=2, padding=1),
    Layer(name="YOLOv8 32>64 3x3/2 @160", batch=8, channels=32, outputs=64, size=160,
          kernel=3, stride=2, padding=1),
    Layer(name="YOLOv8 64>64 3x3 @80", batch=8, channels=64, outputs=64, size=80,
          kernel=3, padding=1),
    Layer(name="YOLOv8 192>128 1x1 @80", batch=8, channels=192, outputs=128, size=80, kernel=1),
    Layer(name="ResNet stem 3>64 7x7/2 @224", batch=32, channels=3, outputs=64, size=224,
          kernel=7, stride=2, padding=3),
    Layer(name="ResNet 64>64 3x3 @56", batch=32, channels=64, outputs=64, size=56,
          kernel=3, padding=1),
    Layer(name="ResNet 128>128 3x3/2 @56", batch=32, channels=128, outputs=128, size=56,
          kernel=3, stride=2, padding=1),
    Layer(name="ResNet 256>256 3x3 @14", batch=32, channels=256, outputs=256, size=14,
          kernel=3, padding=1),
    Layer(name="ResNet 256>1024 1x1 @14", batch=32, channels=256, outputs=1024, size=14, kernel=1),
    Layer(name="ResNeXt 256>256 3x3 g32 @28", batch=32, channels=256, outputs=256, size=28,
          kernel=3, padding=1, groups=32),
    Layer(name="depthwise 144 3x3 @56", batch=32, channels=144, outputs=144, size=56,
          kernel=3, padding=1, groups=144),
)  # fmt: skip


class Problem:
    """A layer with its tensors."""

    def __init__(self, layer: Layer, device: str, dtype: torch.dtype, *, is_last: bool) -> None:
        self.layer = layer
        kind = torch.channels_last if is_last else torch.contiguous_format
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator)
            return values.to(device=device, dtype=dtype).contiguous(memory_format=kind)

        size = (layer.size, layer.size)
        self.x = make(layer.batch, layer.channels, *size).requires_grad_()
        shape = (layer.outputs, layer.channels // layer.groups, layer.kernel, layer.kernel)
        self.w = (make(*shape) * 0.1).detach().requires_grad_()
        out = (layer.size + 2 * layer.padding - layer.kernel) // layer.stride + 1
        self.dy = make(layer.batch, layer.outputs, out, out)

    def native(self) -> tuple[torch.Tensor, ...]:
        """Run forward and backward with torch's own function."""
        a = self.layer
        y = functional.conv2d(self.x, self.w, None, a.stride, a.padding, 1, a.groups)
        return (y, *torch.autograd.grad(y, (self.x, self.w), self.dy))

    def exact(self) -> tuple[torch.Tensor, ...]:
        """Run the same in float64, with the library."""
        a = self.layer
        x, w = (t.detach().double().requires_grad_() for t in (self.x, self.w))
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            y = functional.conv2d(x, w, None, a.stride, a.padding, 1, a.groups)
            return (y.detach(), *torch.autograd.grad(y, (x, w), self.dy.double()))

    def unfold(self) -> tuple[torch.Tensor, ...]:
        """Run unfold and matmul, one group after the other."""
        a = self.layer
        parts = []
        xs, ws = self.x.chunk(a.groups, 1), self.w.chunk(a.groups, 0)
        for x, w in zip(xs, ws, strict=True):
            columns = functional.unfold(x, a.kernel, padding=a.padding, stride=a.stride)
            parts.append(torch.matmul(w.flatten(1), columns))
        y = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        y = y.view(self.dy.shape)
        return (y, *torch.autograd.grad(y, (self.x, self.w), self.dy))


@contextmanager
def _without_library(device: str) -> Iterator[None]:
    if device == "cuda":
        with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
            yield
    else:
        torch._C._set_mkldnn_enabled(False)  # mkldnn.flags would warn about TF32 on the GPU
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(True)


@contextmanager
def _ours(device: str, cap_bytes: int | None) -> Iterator[None]:
    with bypass_convolutions("on", devices=(device,), memory_cap_bytes=cap_bytes):
        yield


def contenders(device: str, cap_bytes: int | None = None) -> dict[str, tuple[Any, str]]:
    """Return, by name, a factory of the context for each turn and the timed method of Problem."""
    library = "cuDNN" if device == "cuda" else "oneDNN"
    return {
        library: (lambda: nullcontext(), "native"),
        "ATen (library off)": (lambda: _without_library(device), "native"),
        "unfold + matmul": (lambda: nullcontext(), "unfold"),
        "Penstock": (lambda: _ours(device, cap_bytes), "native"),
    }


def time_ms(run: Callable[[], Any], device: str, num: int) -> float:
    """Return the mean time of a call in milliseconds, over ``num`` calls."""
    if device == "cpu":
        started_s = time.perf_counter()
        for _ in range(num):
            run()
        return (time.perf_counter() - started_s) / num * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak GPU memory of a call, without the memory allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
