"""optimize() returns only backends that it has checked, and reports why it rejected others."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.conv import inference, load_engine, optimize
from penstock.errors import BadArgument, MissingExtra

needs_torch_2 = pytest.mark.skipif(
    torch.__version__.startswith("1."), reason="torch 1.13 has no torch.compile"
)
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()).eval()


X = torch.linspace(0, 1, 3 * 64).reshape(1, 3, 8, 8)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace timing by a constant. These tests ignore speed, and the machine may be busy."""
    monkeypatch.setattr(inference, "_time_ms", lambda run, device: 1.0)


@pytest.fixture
def tensorrt() -> Iterator[dict[str, Any]]:
    """A backend registered under TensorRT's name, like that of torch_tensorrt."""
    from torch._dynamo import register_backend
    from torch._dynamo.backends import registry

    told: dict[str, Any] = {"num_graphs": 0, "factor": 1.0, "fails": False}

    def backend(graph: Any, example_inputs: Any, **options: Any) -> Any:
        told["num_graphs"] += 1
        if told["fails"]:
            raise RuntimeError("an operator has no converter")
        return lambda *inputs: [out * told["factor"] for out in graph(*inputs)]

    register_backend(compiler_fn=backend, name="tensorrt")
    torch._dynamo.reset()
    yield told
    registry._COMPILER_FNS.pop("tensorrt", None)
    registry._BACKENDS.pop("tensorrt", None)
    torch._dynamo.reset()


@needs_torch_2
def test_tensorrt_comes_first_where_it_is(tensorrt: dict[str, Any], patient: None) -> None:
    model = small_net()
    module, report = optimize(model, X)
    assert (report.backend, report.rejected, tensorrt["num_graphs"]) == ("tensorrt", (), 1)
    assert report.largest_error < 1e-5
    assert "1 graph" in report.ran_on
    torch.testing.assert_close(module(X), model(X))


@needs_torch_2
@pytest.mark.parametrize(("fault", "reason"), [("fails", "no converter"), ("factor", "off by")])
def test_a_backend_that_fails_or_lies_is_rejected_with_its_reason(
    tensorrt: dict[str, Any], patient: None, fault: str, reason: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(tensorrt, fault, True if fault == "fails" else 1.5)
    monkeypatch.delitem(inference.BACKENDS, "inductor")  # its C++ compilation takes a minute here
    module, report = optimize(small_net(), X)
    assert report.backend == "autocast"
    ((name, why),) = report.rejected
    assert name == "tensorrt"
    assert reason in why
    torch.testing.assert_close(module(X).float(), small_net()(X), rtol=5e-2, atol=5e-2)
    assert "tensorrt rejected: " in str(report)


@needs_torch_2
def test_without_tensorrt_the_line_that_installs_it_is_named(
    patient: None, monkeypatch: Any
) -> None:
    monkeypatch.delitem(inference.BACKENDS, "inductor")
    _, report = optimize(small_net(), X)
    assert ("tensorrt", "torch_tensorrt is not installed: pip install torch-tensorrt") in (
        report.rejected
    )


@pytest.mark.slow
def test_what_is_slower_than_eager_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0])
    monkeypatch.setattr(inference, "_time_ms", lambda run, device: next(times))
    model = small_net()
    module, report = optimize(model, X, target="autocast")
    assert module is model
    assert report.backend == "eager"
    assert "takes 2.00 ms" in report.rejected[0][1]


def test_the_model_itself_is_not_changed(patient: None) -> None:
    model = small_net()
    before = [parameter.stride() for parameter in model.parameters()]
    _, report = optimize(model, X, target="autocast")
    assert report.backend == "autocast"
    assert [parameter.stride() for parameter in model.parameters()] == before


@pytest.mark.parametrize(
    ("model", "target", "text"),
    [(small_net(), "magic", "'magic'"), (nn.Linear(2, 2).train(), "auto", "training mode")],
)
def test_what_cannot_be_meant_is_refused(model: nn.Module, target: str, text: str) -> None:
    with pytest.raises(BadArgument, match=text):
        optimize(model, X, target=target)


def test_an_engine_needs_tensorrt_and_says_which_line_installs_it(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"not an engine")
    with pytest.raises(MissingExtra, match="pip install torch-tensorrt"):
        load_engine(path)


def test_an_engine_becomes_a_module_with_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses stand-ins for two packages that are not installed, and checks the calls made to them."""
    path = tmp_path / "model.engine"
    path.write_bytes(b"engine")
    modes = {"x": "input", "y": "output", "z": "output"}

    class Engine:
        num_io_tensors = 3

        def get_tensor_name(self, number: int) -> str:
            return [*modes][number]

        def get_tensor_mode(self, name: str) -> str:
            return modes[name]

    trt = types.ModuleType("tensorrt")
    trt.TensorIOMode = types.SimpleNamespace(INPUT="input")  # type: ignore[attr-defined]
    trt.Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})  # type: ignore[attr-defined]
    reader = types.SimpleNamespace(deserialize_cuda_engine=lambda data: Engine() if data else None)
    trt.Runtime = lambda logger: reader  # type: ignore[attr-defined]
    runtime = types.ModuleType("torch_tensorrt.dynamo.runtime")
    runtime.TorchTensorRTModule = lambda **told: told  # type: ignore[attr-defined]
    for name in ("torch_tensorrt", "torch_tensorrt.dynamo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch_tensorrt.dynamo.runtime", runtime)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    told: Any = load_engine(path)
    assert told["input_binding_names"] == ["x"]
    assert told["output_binding_names"] == ["y", "z"]
    assert told["serialized_engine"] == b"engine"
