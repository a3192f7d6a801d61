"""The convolution bypass for the layers of a single model, without the dispatcher.

:func:`patch_modules` changes only the convolution layers of one model. Calls of
``torch.nn.functional``, and layers that override ``forward``, are left unchanged.
:func:`penstock.conv.bypass_convolutions` intercepts those too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.conv.bypass import bypass_convolutions
from penstock.conv.convolution import ConvolutionRunner
from penstock.errors import BadArgument

LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_runner = ConvolutionRunner()


class _Convolution(torch.autograd.Function):
    """A convolution computed by Penstock, with first and second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: Any, arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.arguments, ctx.bias = arguments, None if b is None else list(b.shape)
        y = _runner.forward(x, w, b, arguments)
        if y is None:  # empty, or not supported here
            return torch.convolution(x, w, b, *arguments)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        return (*_Backward.apply(grads[0], x, w, ctx.arguments, ctx.bias, mask), None)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dy: Any, x: Any, w: Any, arguments: Any, bias: Any, mask: Any
    ) -> tuple[Any, Any, Any]:
        ctx.save_for_backward(dy, x, w)
        ctx.arguments = arguments
        found = _runner.backward(dy, x, w, bias, (*arguments, mask))
        if found is None:
            aten: Any = torch.ops.aten
            dx, dw, db = aten.convolution_backward(dy, x, w, bias, *arguments, mask)
            return dx, dw, db
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Compute second derivatives.

        ``dx`` is linear in ``dy`` and ``w``, and ``dw`` is linear in ``dy`` and ``x``.
        """
        dy, x, w = ctx.saved_tensors
        ddx, ddw, ddb = grads
        gdy = gx = gw = None
        if ddx is not None:
            gdy = convolve(ddx, w, None, ctx.arguments)
            gw = _gradients(dy, ddx, w, ctx.arguments)[1]
        if ddw is not None:
            part = convolve(x, ddw, None, ctx.arguments)
            gdy = part if gdy is None else gdy + part
            gx = _gradients(dy, x, ddw, ctx.arguments)[0]
        if ddb is not None:
            part = ddb.view(1, -1, *(1,) * (x.dim() - 2)).expand_as(dy)
            gdy = part if gdy is None else gdy + part
        return gdy, gx, gw, None, None, None


def _gradients(dy: Any, x: Any, w: Any, arguments: Any) -> Any:
    return _Backward.apply(dy, x, w, arguments, None, [True, True, False])  # type: ignore[no-untyped-call]


def convolve(x: torch.Tensor, w: torch.Tensor, b: Any, arguments: Any) -> torch.Tensor:
    """Compute a differentiable convolution with Penstock's algorithms, without the dispatcher hook.

    Args:
        arguments: Stride, padding, dilation, transposed, output padding and groups, as
            ``torch.convolution`` takes them.

    Example:
        >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2)
        >>> convolve(x, w, None, ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)).flatten().tolist()
        [4.0, 4.0, 4.0, 4.0]
    """
    return _Convolution.apply(x, w, b, arguments)  # type: ignore[no-any-return, no-untyped-call]


def _layer_forward(layer: Any, x: torch.Tensor, output_size: Any = None) -> torch.Tensor:
    """Do what the layer's own ``forward`` does, with Penstock's convolution."""
    num = layer.weight.dim() - 2
    is_unbatched = x.dim() == num + 1
    x = x.unsqueeze(0) if is_unbatched else x
    w, b = layer.weight, layer.bias
    kind = _autocast_type(x.device.type)
    if kind is not None:
        x, w, b = x.to(kind), w.to(kind), None if b is None else b.to(kind)
    padding = layer.padding
    if layer.transposed:
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, num, layer.dilation
        )
        arguments: Any = (layer.stride, padding, layer.dilation, True, extra, layer.groups)
    else:
        if layer.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x = nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * num
        arguments = (layer.stride, padding, layer.dilation, False, (0,) * num, layer.groups)
    y = convolve(x, w, b, tuple(list(v) if isinstance(v, tuple) else v for v in arguments))
    return y.squeeze(0) if is_unbatched else y


def _autocast_type(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to, or None if autocast is off."""
    get: Any = getattr(torch, "get_autocast_dtype", None)
    if get is not None:
        return get(device) if torch.is_autocast_enabled(device) else None
    if device == "cuda":  # before torch 2.4
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


class FallbackConv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` computed by Penstock, with the same arguments and weights.

    Example:
        >>> layer = FallbackConv2d(3, 8, 3, stride=2, padding=1)
        >>> layer(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 8, 4, 4])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the convolution of ``input``."""
        return _layer_forward(self, input)

    @classmethod
    def of(cls, layer: nn.Conv2d) -> FallbackConv2d:
        """Return a layer that shares the weights of ``layer`` and is computed by Penstock."""
        new = cls.__new__(cls)
        new.__dict__ = layer.__dict__
        return new


@dataclass(frozen=True, kw_only=True)
class Patched:
    """Result of :func:`patch_modules`: one line for each layer, with its name in the model."""

    layers: tuple[str, ...]
    left: tuple[str, ...] = ()

    @property
    def num_patched(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        lines = [f"{self.num_patched} convolution layers are computed by Penstock"]
        lines += [f"  {line}" for line in self.layers]
        lines += [f"  not patched: {line}" for line in self.left]
        return "\n".join(lines)


def patch_modules(model: nn.Module) -> Patched:
    """Patch every convolution layer of a model so that Penstock computes it.

    Weights, hooks and names do not change. :func:`unpatch_modules` reverts the patch. Layers that
    override ``forward`` are not patched, and are listed in the result.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3))
        >>> print(patch_modules(model))
        2 convolution layers are computed by Penstock
          0: Conv2d 3 -> 8, kernel (3, 3), groups 1
          2: ConvTranspose2d 8 -> 3, kernel (3, 3), groups 1
    """
    _check_model(model, "patch_modules")
    layers, left = [], []
    for name, layer in model.named_modules():
        if not isinstance(layer, LAYERS) or isinstance(layer, FallbackConv2d):
            continue
        text = _describe(name or type(layer).__name__, layer)
        own = layer.__dict__.get("forward")
        is_ours = getattr(own, "__func__", None) is _layer_forward
        if own is None and type(layer).forward not in [kind.forward for kind in LAYERS]:
            own = type(layer).forward
        if own is not None and not is_ours:
            left.append(f"{text} (has its own forward)")
            continue
        layer.forward = _layer_forward.__get__(layer)
        layers.append(text)
    return Patched(layers=tuple(layers), left=tuple(left))


def unpatch_modules(model: nn.Module) -> int:
    """Revert :func:`patch_modules`. Returns the number of layers.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
        >>> _ = patch_modules(model)
        >>> unpatch_modules(model)
        1
    """
    num = 0
    for layer in model.modules():
        own = layer.__dict__.get("forward")
        if getattr(own, "__func__", None) is _layer_forward:
            del layer.forward
            num += 1
    return num


def apply_full_patch(
    model: nn.Module | None = None, *, say: Callable[[str], None] = print
) -> Patched:
    """Switch on the bypass for all convolutions, and list the convolution layers of a given model.

    Existing scripts for broken GPUs use this name. It intercepts all convolutions on the GPU and
    the CPU, like :func:`penstock.conv.bypass_convolutions`.

    Example:
        >>> from penstock.conv.bypass import current
        >>> patched = apply_full_patch(nn.Sequential(nn.Conv2d(3, 8, 1)), say=lambda line: None)
        >>> patched.num_patched
        1
        >>> current().undo()
    """
    if model is not None:
        _check_model(model, "apply_full_patch")
    bypass_convolutions("on", devices=("cuda", "cpu"))
    modules = [] if model is None else model.named_modules()
    layers = [_describe(name, layer) for name, layer in modules if isinstance(layer, LAYERS)]
    found = Patched(layers=tuple(layers))
    say(str(found) if model is not None else "all convolutions are computed by Penstock")
    return found


def _check_model(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise BadArgument(
            f"model must be a torch.nn.Module, got {type(model).__name__}",
            remedy=f"penstock.conv.{function}(model)",
        )


def _describe(name: str, layer: Any) -> str:
    return (
        f"{name}: {type(layer).__name__} {layer.in_channels} -> {layer.out_channels}, "
        f"kernel {tuple(layer.kernel_size)}, groups {layer.groups}"
    )
