"""The rungs of the chain: each makes a faster module of a model, or says why it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[Any, ...]


class CannotHere(Exception):
    """This rung is not for this machine or model; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to make a model faster.

    Args:
        make: Gives a callable from a model and its inputs, or raises.
        tolerance: The largest error allowed, relative to the largest output of eager mode.
    """

    name: str
    make: Callable[[nn.Module, Inputs], nn.Module]
    tolerance: float


class Wrapped(nn.Module):
    """A module that calls another in given surroundings; the other's weights are its own."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's answer."""
        with torch.no_grad():
            return self._call(*inputs, **named)


def device_of(model: nn.Module, inputs: Inputs) -> torch.device:
    """Where the model runs: where its weights are, or else its inputs."""
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, inputs)]
    return tensors[0].device if tensors else torch.device("cpu")


def _compiler(backend: str | None = None, mode: str | None = None) -> Any:
    compile_model = getattr(torch, "compile", None)
    if compile_model is None:
        raise CannotHere(f"torch {torch.__version__} has no torch.compile; it came with torch 2.0")
    options = {name: value for name, value in (("backend", backend), ("mode", mode)) if value}
    return lambda model: compile_model(model, **options)


def with_tensorrt(model: nn.Module, inputs: Inputs) -> nn.Module:
    """TensorRT through torch_tensorrt's dynamo backend, where it is registered."""
    compile_model = _compiler(backend="tensorrt")
    try:
        import torch_tensorrt  # noqa: F401 (registers the backend)
    except ImportError:
        pass
    import torch._dynamo as dynamo

    listed: Sequence[str] = dynamo.list_backends(exclude_tags=())
    if "tensorrt" not in listed:
        raise CannotHere("torch_tensorrt is not installed: pip install torch-tensorrt")
    return Wrapped(model, compile_model(model))


def with_inductor(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Inductor; with CUDA graphs where every tensor is on one GPU."""
    mode = "reduce-overhead" if graphs_are_safe(model, inputs) else None
    return Wrapped(model, _compiler(mode=mode)(model))


def graphs_are_safe(model: nn.Module, inputs: Inputs) -> bool:
    """May launches be recorded once and replayed? Only on one GPU, with fixed shapes.

    Example:
        >>> graphs_are_safe(nn.Linear(2, 2), (torch.zeros(1, 2),))
        False
    """
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, inputs)]
    return bool(tensors) and all(
        t.is_cuda and t.device == tensors[0].device for t in tensors
    ) and all(torch.is_tensor(item) for item in inputs)  # fmt: skip


def with_autocast(model: nn.Module, inputs: Inputs) -> nn.Module:
    """A copy with its channels innermost, run in half precision."""
    device = device_of(model, inputs)
    turned = copy.deepcopy(model)
    for parameter in (*turned.parameters(), *turned.buffers()):
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    dtype = torch.bfloat16
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        dtype = torch.float16

    def call(*inputs: Any, **named: Any) -> Any:
        moved = [
            item.contiguous(memory_format=torch.channels_last)
            if torch.is_tensor(item) and item.dim() == 4
            else item
            for item in inputs
        ]
        with torch.autocast(device.type, dtype):
            return turned(*moved, **named)

    return Wrapped(turned, call)


RUNGS: dict[str, Rung] = {
    "tensorrt": Rung(name="tensorrt", make=with_tensorrt, tolerance=1e-2),
    "inductor": Rung(name="inductor", make=with_inductor, tolerance=1e-3),
    "autocast": Rung(name="autocast", make=with_autocast, tolerance=5e-2),
}
"""In the order in which they are tried. The tolerances are for what each may change: TensorRT may
use TF32, Inductor fuses, autocast rounds to half types."""
