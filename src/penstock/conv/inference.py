"""Makes a model faster for inference with TensorRT, Inductor, or channels_last and autocast.

Backends are tried in this order. The first backend that builds, matches the outputs of eager mode
within its tolerance, and is not slower, is used. The report gives the reason for each rejected
backend.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import BadArgument, MissingExtra

NUM_WARM, NUM_TIMED = 3, 10
Inputs = tuple[Any, ...]


class BackendUnavailable(Exception):
    """A backend cannot be used on this machine or for this model. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class InferenceBackend:
    """A backend that makes a model faster.

    Args:
        make: Makes a faster module from a model and its inputs, or raises.
        tolerance: The largest error allowed, relative to the largest output of eager mode.
    """

    name: str
    make: Callable[[nn.Module, Inputs], nn.Module]
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class OptimizeReport:
    """Result of :func:`optimize`.

    Attributes:
        backend: The backend in use: ``"tensorrt"``, ``"inductor"``, ``"autocast"``, or ``"eager"``
            if none was better.
        ran_on: Device, dtype, and the number of compiled graphs and graph breaks.
        build_s: Seconds to build the module, including the first call.
        ms_before: Milliseconds per call in eager mode.
        ms_after: Milliseconds per call of the returned module.
        largest_error: Relative to the largest output of eager mode.
        rejected: Backends that were tried before and rejected, with the reason.
    """

    backend: str
    ran_on: str
    build_s: float
    ms_before: float
    ms_after: float
    largest_error: float
    rejected: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.backend} on {self.ran_on}: {self.ms_before:.2f} -> {self.ms_after:.2f} ms, "
            f"built in {self.build_s:.1f} s, largest error {self.largest_error:.1e}"
        ]
        lines += [f"  {name} rejected: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


def optimize(
    model: nn.Module, example_inputs: Any, target: str = "auto"
) -> tuple[nn.Module, OptimizeReport]:
    """Make a model faster for inference, and report what was done.

    Args:
        model: In evaluation mode, on the device where it will run.
        example_inputs: A tensor or a tuple of inputs, with the shapes used later.
        target: ``"auto"`` tries TensorRT, Inductor and autocast, in this order. ``"tensorrt"``,
            ``"inductor"`` or ``"autocast"`` starts at that backend.

    Returns:
        A module whose outputs were checked against eager mode, and the report.

    Raises:
        BadArgument: The target is unknown, or the model is in training mode.

    Example:
        >>> module, report = optimize(nn.Linear(2, 2).eval(), torch.ones(1, 2), target="autocast")
        >>> module(torch.ones(1, 2)).shape
        torch.Size([1, 2])
        >>> report.backend in ("autocast", "eager")
        True
    """
    if target != "auto" and target not in BACKENDS:
        known = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise BadArgument(
            f"target={target!r} must be one of {known}",
            remedy='penstock.conv.optimize(model, inputs, target="auto")',
        )
    if model.training:
        raise BadArgument(
            "the model is in training mode, but optimize() is for inference",
            remedy="penstock.conv.optimize(model.eval(), inputs)",
        )
    inputs: Inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    names = [*BACKENDS] if target == "auto" else [*BACKENDS][[*BACKENDS].index(target) :]
    rejected: list[tuple[str, str]] = []
    with torch.no_grad():
        expected = model(*inputs)
        ms_before = _time_ms(lambda: model(*inputs), device_of(model, inputs))
        for name in names:
            try:
                module, found = _try(BACKENDS[name], model, inputs, expected, ms_before)
            except BackendUnavailable as reason:
                rejected.append((name, str(reason)))
            except Exception as error:  # compilers raise any kind of exception
                text = " ".join(str(error).split())
                rejected.append((name, f"{type(error).__name__}: {text[:200]}"))
            else:
                return module, replace(found, rejected=tuple(rejected))
    report = OptimizeReport(
        backend="eager",
        ran_on=_describe(device_of(model, inputs), expected),
        build_s=0.0,
        ms_before=ms_before,
        ms_after=ms_before,
        largest_error=0.0,
        rejected=tuple(rejected),
    )
    return model, report


def _try(
    backend: InferenceBackend, model: nn.Module, inputs: Inputs, expected: Any, ms_before: float
) -> tuple[nn.Module, OptimizeReport]:
    """Build, check and time one backend. Raises BackendUnavailable if it is wrong or slower."""
    device = device_of(model, inputs)
    counted = _graphs()
    started_s = time.perf_counter()
    module = backend.make(model, inputs)
    # Clone, because replayed graphs overwrite these outputs with the next ones.
    found = [t.detach().clone() for t in _tensors(module(*inputs))]
    _wait(device)
    build_s = time.perf_counter() - started_s
    error = _largest_error(found, expected)
    if not error <= backend.tolerance:
        raise BackendUnavailable(
            f"its outputs are off by {error:.1e}, but only {backend.tolerance:g} is allowed"
        )
    ms_after = _time_ms(lambda: module(*inputs), device)
    if ms_after > ms_before:
        raise BackendUnavailable(f"it takes {ms_after:.2f} ms, but eager mode {ms_before:.2f} ms")
    graphs, breaks = (after - before for after, before in zip(_graphs(), counted, strict=True))
    ran_on = _describe(device, found)
    if graphs:
        ran_on += f", {graphs} graph{'s' if graphs > 1 else ''}, {breaks} breaks"
    report = OptimizeReport(
        backend=backend.name,
        ran_on=ran_on,
        build_s=build_s,
        ms_before=ms_before,
        ms_after=ms_after,
        largest_error=error,
    )
    return module, report


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if torch.is_tensor(outputs):
        return [outputs]
    if isinstance(outputs, dict):
        return [t for key in outputs for t in _tensors(outputs[key])]
    if isinstance(outputs, (list, tuple)):
        return [t for item in outputs for t in _tensors(item)]
    return []


def _largest_error(found: Any, expected: Any) -> float:
    ours, theirs = _tensors(found), _tensors(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    errors = [0.0]
    for a, b in zip(ours, theirs, strict=True):
        scale = float(b.abs().max()) if b.numel() else 0.0
        if b.numel():
            off = float((a.double() - b.double()).abs().max())
            errors.append(off / scale if scale else off)
    return max(errors, key=lambda value: (value != value, value))  # nan counts as the largest


def _time_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median time of a call."""
    for _ in range(NUM_WARM):
        run()
    times = []
    for _ in range(NUM_TIMED):
        _wait(device)
        started_s = time.perf_counter()
        run()
        _wait(device)
        times.append((time.perf_counter() - started_s) * 1e3)
    return sorted(times)[len(times) // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _graphs() -> tuple[int, int]:
    """Return torch's counts of compiled graphs and graph breaks."""
    if "torch._dynamo.utils" not in sys.modules:  # nothing was compiled; importing takes seconds
        return 0, 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def _describe(device: torch.device, outputs: Any) -> str:
    types = dict.fromkeys(str(t.dtype).rpartition(".")[2] for t in _tensors(outputs))
    return f"{device.type} ({', '.join(types) or 'no tensors'})"


# -- backends --------------------------------------------------------------------------------------


class InferenceModule(nn.Module):
    """A module that holds a model and runs it through ``call`` without gradients."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's outputs."""
        with torch.no_grad():
            return self._call(*inputs, **named)


def device_of(model: nn.Module, inputs: Inputs) -> torch.device:
    """Return the device of the model's weights, or of its inputs if it has no weights."""
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, inputs)]
    return tensors[0].device if tensors else torch.device("cpu")


def _compiler(backend: str | None = None, mode: str | None = None) -> Any:
    compile_model = getattr(torch, "compile", None)
    if compile_model is None:
        raise BackendUnavailable(
            f"torch {torch.__version__} has no torch.compile; it needs torch 2.0 or newer"
        )
    options = {name: value for name, value in (("backend", backend), ("mode", mode)) if value}
    return lambda model: compile_model(model, **options)


def with_tensorrt(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Compile with TensorRT, through the dynamo backend of torch_tensorrt."""
    compile_model = _compiler(backend="tensorrt")
    try:
        import torch_tensorrt  # noqa: F401 (registers the backend)
    except ImportError:
        pass
    import torch._dynamo as dynamo

    listed: Sequence[str] = dynamo.list_backends(exclude_tags=())
    if "tensorrt" not in listed:
        raise BackendUnavailable("torch_tensorrt is not installed: pip install torch-tensorrt")
    return InferenceModule(model, compile_model(model))


def with_inductor(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Compile with Inductor, and with CUDA graphs if all tensors are on one GPU."""
    mode = "reduce-overhead" if graphs_are_safe(model, inputs) else None
    return InferenceModule(model, _compiler(mode=mode)(model))


def graphs_are_safe(model: nn.Module, inputs: Inputs) -> bool:
    """Return True if CUDA graphs can be used: all inputs are tensors, and everything is on one GPU.

    Example:
        >>> graphs_are_safe(nn.Linear(2, 2), (torch.zeros(1, 2),))
        False
    """
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, inputs)]
    return bool(tensors) and all(
        t.is_cuda and t.device == tensors[0].device for t in tensors
    ) and all(torch.is_tensor(item) for item in inputs)  # fmt: skip


def with_autocast(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Make a channels_last copy of the model that runs in half precision."""
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

    return InferenceModule(turned, call)


BACKENDS: dict[str, InferenceBackend] = {
    "tensorrt": InferenceBackend(name="tensorrt", make=with_tensorrt, tolerance=1e-2),
    "inductor": InferenceBackend(name="inductor", make=with_inductor, tolerance=1e-3),
    "autocast": InferenceBackend(name="autocast", make=with_autocast, tolerance=5e-2),
}
"""Backends in the order in which they are tried. Their tolerances allow for what they change:
TensorRT may use TF32, Inductor fuses operations, and autocast rounds to half types."""


# -- TensorRT engines ------------------------------------------------------------------------------


def load_engine(path: str | Path) -> nn.Module:
    """Wrap a TensorRT engine file (``.engine``, ``.plan``) as a module.

    Inputs and outputs are in the engine's own order. This function follows the documented interface
    of torch_tensorrt. It has not been run, because no test machine has TensorRT.

    Raises:
        BadArgument: The file does not exist, or TensorRT cannot read it.
        MissingExtra: tensorrt or torch_tensorrt is not installed.

    Example:
        >>> load_engine("nowhere.engine")
        Traceback (most recent call last):
        ...
        penstock.errors.BadArgument: [A01] no engine file at 'nowhere.engine' ...
    """
    file = Path(path)
    if not file.is_file():
        raise BadArgument(
            f"no engine file at {str(path)!r} (working directory: {Path.cwd()})",
            remedy='penstock.conv.load_engine("model.engine")',
        )
    try:
        import tensorrt
        from torch_tensorrt.dynamo.runtime import TorchTensorRTModule
    except ImportError as error:
        raise MissingExtra(
            f"TensorRT engines need {error.name or 'torch_tensorrt'}, which is not installed",
            remedy="pip install torch-tensorrt",
        ) from error
    content = file.read_bytes()
    inputs, outputs = _engine_names(tensorrt, content)
    module: nn.Module = TorchTensorRTModule(
        serialized_engine=content, input_binding_names=inputs, output_binding_names=outputs
    )
    return module


def _engine_names(tensorrt: Any, content: bytes) -> tuple[list[str], list[str]]:
    """Return the names of an engine's inputs and outputs, in its order."""
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BadArgument(
            "TensorRT cannot read this engine",
            likely="it was built with a different version of TensorRT, or for a different GPU",
            remedy="build it again on this machine",
        )
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    is_input = {name: engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names}
    return [n for n in names if is_input[n]], [n for n in names if not is_input[n]]
