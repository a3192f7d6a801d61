"""The two sets of layers, and the contenders: the library, ATen, unfold + matmul, and Penstock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.conv.bypass import bypass_convolutions


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One convolution of a network, with the batch size it is measured at.

    Args:
        size: Height and width, or all sizes.
    """

    name: str
    batch: int
    channels: int
    outputs: int
    size: int | tuple[int, ...]
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    is_transposed: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

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

OTHER_LAYERS = (
    Layer(name="ConvNeXt stem 3>96 4x4/4 @224", batch=32, channels=3, outputs=96, size=224,
          kernel=4, stride=4),
    Layer(name="ConvNeXt depthwise 96 7x7 @56", batch=32, channels=96, outputs=96, size=56,
          kernel=7, padding=3, groups=96),
    Layer(name="U-Net 320>320 3x3 @64", batch=4, channels=320, outputs=320, size=64,
          kernel=3, padding=1),
    Layer(name="U-Net 640>640 3x3 @32", batch=4, channels=640, outputs=640, size=32,
          kernel=3, padding=1),
    Layer(name="U-Net 1280>1280 3x3 @16", batch=4, channels=1280, outputs=1280, size=16,
          kernel=3, padding=1),
    Layer(name="DeepLab 256>256 3x3 d12 @33", batch=8, channels=256, outputs=256, size=33,
          kernel=3, padding=12, dilation=12),
    Layer(name="MobileNetV3 depthwise 72 5x5/2 @56", batch=32, channels=72, outputs=72, size=56,
          kernel=5, stride=2, padding=2, groups=72),
    Layer(name="MobileNetV3 40>240 1x1 @28", batch=32, channels=40, outputs=240, size=28, kernel=1),
    Layer(name="RegNet 168>168 3x3 g7 @28", batch=32, channels=168, outputs=168, size=28,
          kernel=3, padding=1, groups=7),
    Layer(name="transposed 256>128 2x2/2 @32", batch=8, channels=256, outputs=128, size=32,
          kernel=2, stride=2, is_transposed=True),
    Layer(name="3-d 64>64 3x3x3 @8x28x28", batch=4, channels=64, outputs=64, size=(8, 28, 28),
          kernel=3, padding=1),
    Layer(name="3-d stem 3>32 3x3x3/2 @16x56x56", batch=4, channels=3, outputs=32,
          size=(16, 56, 56), kernel=3, stride=2, padding=1),
    Layer(name="1-d 256>256 5 @1024", batch=16, channels=256, outputs=256, size=(1024,),
          kernel=5, padding=2),
)  # fmt: skip
"""A second set, of networks that the algorithms were not tuned to."""


class Problem:
    """A layer with its tensors."""

    def __init__(self, layer: Layer, device: str, dtype: torch.dtype, *, is_last: bool) -> None:
        self.layer = layer
        kinds = {2: torch.channels_last, 3: torch.channels_last_3d}
        num = len(layer.sizes)
        kind = kinds.get(num, torch.contiguous_format) if is_last else torch.contiguous_format
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator)
            return values.to(device=device, dtype=dtype).contiguous(memory_format=kind)

        self.x = make(layer.batch, layer.channels, *layer.sizes).requires_grad_()
        shape = (layer.outputs, layer.channels // layer.groups)
        if layer.is_transposed:
            shape = (layer.channels, layer.outputs // layer.groups)
        self.w = (make(*shape, *(layer.kernel,) * num) * 0.1).detach().requires_grad_()
        self.dy = make(*self._convolve(self.x, self.w).shape)

    def _convolve(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, num = self.layer, len(self.layer.sizes)
        lists = ([value] * num for value in (a.stride, a.padding, a.dilation))
        return torch.convolution(x, w, None, *lists, a.is_transposed, [0] * num, a.groups)

    def native(self) -> tuple[torch.Tensor, ...]:
        """Run forward and backward with torch's own function."""
        y = self._convolve(self.x, self.w)
        return (y, *torch.autograd.grad(y, (self.x, self.w), self.dy))

    def exact(self) -> tuple[torch.Tensor, ...]:
        """Run the same in float64, with the library."""
        x, w = (t.detach().double().requires_grad_() for t in (self.x, self.w))
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            y = self._convolve(x, w)
            return (y.detach(), *torch.autograd.grad(y, (x, w), self.dy.double()))

    @property
    def can_unfold(self) -> bool:
        """True for the convolutions that torch's unfold supports."""
        return len(self.layer.sizes) == 2 and not self.layer.is_transposed

    def unfold(self) -> tuple[torch.Tensor, ...]:
        """Run unfold and matmul, one group after the other."""
        a = self.layer
        parts = []
        xs, ws = self.x.chunk(a.groups, 1), self.w.chunk(a.groups, 0)
        for x, w in zip(xs, ws, strict=True):
            columns = functional.unfold(x, a.kernel, a.dilation, a.padding, a.stride)
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


def busy_ms(run: Callable[[], Any], num: int = 3) -> float:
    """Return the GPU time of a call: the sum over its kernels and copies, without gaps.

    A slower GPU than the one measured on is limited by this rather than by launches.
    """
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(num):
            run()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    events = [event for event in profiled.events() if event.device_type == gpu]
    return sum(event.time_range.elapsed_us() for event in events) / num / 1e3


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak GPU memory of a call, without the memory allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# -- costs of one way ------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch's operators read and write, and their multiply-adds times two."""

    num_bytes = 0
    num_operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        is_view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        name = function._schema.name
        if is_view or name.startswith(("aten::empty", "aten::new_empty", "aten::resize")):
            return result
        writes = [one for one in made if all(one is not other for other in given)]
        self.num_bytes += sum(map(_span_bytes, (*given, *writes)))
        if name in ("aten::mm", "aten::bmm"):
            self.num_operations += 2 * given[0].numel() * given[1].shape[-1]
        else:
            self.num_operations += sum(one.numel() for one in made)
        return result


def _span_bytes(t: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor, counting repeated elements once."""
    num = prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
    return min(num * t.element_size(), t.untyped_storage().nbytes())


def costs_of(way: Any, g: Any, which: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """Return launches, bytes and operations of one pass. Bytes of Triton kernels are not known.

    torch's own kernels are counted as a product over columns that are written and read once.
    """
    cap = 512 << 20
    run = way.prepare(g, a, b, cap)
    result = run(a, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run(a, b)
        torch.cuda.synchronize()
    costs: dict[str, Any] = {"way": way.name, "pass": which}
    costs["launches"] = sum(e.device_type == torch.autograd.DeviceType.CUDA
                            for e in profiled.events())  # fmt: skip
    if way.name == "aten":
        depth = g.group_in * g.num_taps
        columns = 0 if g.is_depthwise or g.is_pointwise else g.batch * g.num_positions * depth
        elements = a.numel() + b.numel() + result.numel() + 2 * columns
        costs["bytes"] = elements * a.element_size()
        costs["operations"] = 2 * g.batch * g.num_positions * g.out_channels * depth
    elif not way.needs_triton:
        with Traffic() as seen:
            run(a, b)
        costs |= {"bytes": seen.num_bytes, "operations": seen.num_operations}
    return costs
