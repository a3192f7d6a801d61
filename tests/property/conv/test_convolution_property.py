"""Any convolution through the bypass: torch's results, errors and strides.

The results are compared with those of contiguous tensors in float64. torch 2.13's own weight
gradients are wrong in bfloat16 on the CPU for some memory layouts, and in all types for groups of a
single sample whose strides are those of both layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from penstock.conv import bypass_convolutions

pytestmark = pytest.mark.legacy

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "samples last": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "part": lambda t: torch.stack([t, t], -1)[..., 0],
    "one channel": lambda t: t[:, :1].expand(t.shape),
}
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.05}
# torch 1.13's transposed convolutions in bfloat16 have a wrong size if they are dilated.
IS_OLD = torch.__version__ < "2"
TYPES = [t for t in TOLERANCES if t != torch.bfloat16 or not IS_OLD]
layouts = st.sampled_from(sorted(LAYOUTS))


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one convolution."""

    is_transposed: bool
    batch: int
    in_channels: int
    out_channels: int
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    has_bias: bool
    dtype: torch.dtype
    layouts: tuple[str, str, str]
    """Those of ``x``, ``w`` and ``dy``."""

    def tensors(self) -> list[torch.Tensor]:
        """Return ``x``, ``w`` and the bias in their layouts."""
        generator = torch.Generator().manual_seed(0)
        pair = (self.out_channels, self.in_channels)
        pair = pair[::-1] if self.is_transposed else pair
        shapes = [
            (self.batch, self.in_channels, *self.size),
            (pair[0], pair[1] // self.groups, *self.kernel),
            (self.out_channels,),
        ][: 2 + self.has_bias]
        made = [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]
        names = (*self.layouts[:2], "contiguous")[: len(made)]
        return [LAYOUTS[name](t) for name, t in zip(names, made, strict=True)]

    def compute(
        self, tensors: list[torch.Tensor], *, in_layout: bool = True
    ) -> list[torch.Tensor] | str:
        """Return ``y`` and the gradients, or torch's error."""
        leaves = [t.detach().requires_grad_() for t in tensors]
        x, w, b = (*leaves, None)[:3]
        try:
            if self.is_transposed:
                function: Any = getattr(functional, f"conv_transpose{len(self.size)}d")
                extra = self.output_padding
                y = function(x, w, b, self.stride, self.padding, extra, self.groups, self.dilation)
            else:
                function = getattr(functional, f"conv{len(self.size)}d")
                y = function(x, w, b, self.stride, self.padding, self.dilation, self.groups)
        except RuntimeError as error:
            return str(error)
        generator = torch.Generator().manual_seed(1)
        dy = torch.randn(y.shape, generator=generator).to(self.dtype)
        dy = LAYOUTS[self.layouts[2]](dy).to(y.dtype)
        dy = dy if in_layout else dy.contiguous()
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@st.composite
def calls(draw: Any) -> Call:
    num_dims = draw(st.integers(1, 3))

    def each(*values: int) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(num_dims))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = st.sampled_from([1, 2, 5, 16, 33])
    return Call(
        is_transposed=draw(st.booleans()),
        batch=draw(st.sampled_from([1, 2, 3])),
        in_channels=groups * draw(channels),
        out_channels=groups * draw(channels),
        groups=groups,
        size=tuple(draw(st.integers(1, (15, 11, 6)[num_dims - 1])) for _ in range(num_dims)),
        kernel=each(3, 1, 2, 5),
        stride=each(1, 1, 2, 3),
        padding=each(1, 0, 2, 3),
        dilation=each(1, 1, 2),
        output_padding=each(0, 0, 1),
        has_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(TYPES)),
        layouts=(draw(layouts), draw(layouts), draw(layouts)),
    )


def is_close(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    limit = TOLERANCES[dtype] * max(1.0, float(exact.abs().max()))
    return bool(((result.double() - exact).abs() <= limit).all())


def strides(t: torch.Tensor) -> list[int]:
    """Return the strides along axes with more than one element."""
    return [step for step, num in zip(t.stride(), t.shape, strict=True) if num > 1]


@settings(max_examples=150)
@given(call=calls(), cap_bytes=st.sampled_from([None, 1000]))
def test_any_convolution_gives_torch_s_result(call: Call, cap_bytes: int | None) -> None:
    tensors = call.tensors()
    native = call.compute(tensors)
    with bypass_convolutions("on", devices=("cpu",), memory_cap_bytes=cap_bytes):
        ours = call.compute(tensors)
    if isinstance(native, str) or isinstance(ours, str):
        assert ours == native
        return
    assert IS_OLD or strides(ours[0]) == strides(native[0])  # nothing depends on them in 1.13
    exact = call.compute([t.double().contiguous() for t in tensors], in_layout=False)
    if isinstance(exact, str):  # torch refuses an empty result in some layouts only
        assert ours[0].shape == native[0].shape
        assert ours[0].numel() == 0
        return
    for result, expected in zip(ours, exact, strict=True):
        assert result.dtype == call.dtype
        assert result.shape == expected.shape
        assert is_close(result, expected, call.dtype)


def test_a_wrong_result_is_noticed() -> None:
    x = torch.randn((2, 3, 4), generator=torch.Generator().manual_seed(0))
    for dtype in TOLERANCES:
        assert is_close(x.to(dtype), x.to(dtype).double(), dtype)
        assert not is_close(x.roll(1, -1).to(dtype), x.double(), dtype)
