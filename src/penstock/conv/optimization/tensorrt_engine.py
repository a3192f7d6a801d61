"""A serialised TensorRT engine as a module. Written after torch_tensorrt's interface; not run here:
none of our machines has TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from penstock.errors import BadArgument, MissingExtra


def load_engine(path: str | Path) -> nn.Module:
    """Wrap a TensorRT engine file (``.engine``, ``.plan``) as a module.

    Inputs and outputs are in the engine's own order.

    Raises:
        BadArgument: There is no such file.
        MissingExtra: tensorrt or torch_tensorrt is not installed.

    Example:
        >>> load_engine("nowhere.engine")
        Traceback (most recent call last):
        ...
        penstock.errors.BadArgument: BadArgument [A01]: there is no engine at 'nowhere.engine' ...
    """
    file = Path(path)
    if not file.is_file():
        raise BadArgument(
            f"there is no engine at {str(path)!r} ({Path.cwd()})",
            remedy='penstock.conv.load_engine("model.engine")',
        )
    try:
        import tensorrt
        from torch_tensorrt.dynamo.runtime import TorchTensorRTModule
    except ImportError as error:
        raise MissingExtra(
            f"{error.name or 'torch_tensorrt'} is not installed, and runs TensorRT's engines",
            remedy="pip install torch-tensorrt",
        ) from error
    content = file.read_bytes()
    inputs, outputs = _names(tensorrt, content)
    module: nn.Module = TorchTensorRTModule(
        serialized_engine=content, input_binding_names=inputs, output_binding_names=outputs
    )
    return module


def _names(tensorrt: Any, content: bytes) -> tuple[list[str], list[str]]:
    """The names of an engine's inputs and outputs, in its order."""
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BadArgument(
            "TensorRT cannot read this engine",
            likely="it was built by another version of TensorRT, or for another GPU",
            remedy="build it again on this machine",
        )
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    is_input = {name: engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names}
    return [n for n in names if is_input[n]], [n for n in names if not is_input[n]]
