"""Unmodified third-party networks train on a machine whose convolutions fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.conv import bypass_convolutions
from support import broken_convolution, scripts
from support.paths import EXAMPLES

pytestmark = [pytest.mark.vision, pytest.mark.timeout(300)]


def resnet18() -> nn.Module:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=10)


def efficientnet() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model("efficientnet_b0", num_classes=10, drop_rate=0.0)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision ResNet-18": resnet18,
    "timm EfficientNet": efficientnet,
}


def losses(make: Callable[[], nn.Module], *, is_half: bool, num_steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    model = make().train()
    x, labels = torch.randn(4, 3, 48, 48), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("name", "is_half"),
    [(name, False) for name in NETWORKS] + [("torchvision ResNet-18", True)],
)
def test_a_network_trains_to_the_native_losses(name: str, is_half: bool) -> None:
    num_steps = 1 if is_half else 2  # bfloat16 is slow on CPUs that lack its instructions
    native = losses(NETWORKS[name], is_half=is_half, num_steps=num_steps)
    with broken_convolution.breaking("all:raises") as broken:
        with bypass_convolutions("on", devices=("cpu",)) as bypass:
            ours = losses(NETWORKS[name], is_half=is_half, num_steps=num_steps)
        assert broken.num_calls == 0
    assert ours == pytest.approx(native, rel=1e-1 if is_half else 1e-3)
    assert ours[0] == pytest.approx(native[0], rel=1e-2 if is_half else 1e-5)
    assert bypass.num_native == 0
    assert bypass.num_caught > 50 * num_steps


@pytest.mark.parametrize("name", NETWORKS)
def test_without_the_bypass_it_fails(name: str) -> None:
    fails = pytest.raises(RuntimeError, match="miopenStatusUnknownError")
    with broken_convolution.breaking("all:raises"), fails:
        losses(NETWORKS[name], is_half=False)


YOLO = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
from ultralytics import YOLO
from ultralytics_yolo import draw_squares
folder = Path("squares").resolve()
data = draw_squares(folder)
for path in sorted((folder / "images" / "train").iterdir())[16:]:
    path.unlink()
model = YOLO("yolov8n.yaml")
model.train(data=data, epochs=1, imgsz=64, batch=8, workers=0, device="cpu", val=False,
            project=folder / "runs", exist_ok=True, plots=False)
print("loss", *(loss.item() for loss in model.trainer.tloss.values()), flush=True)
"""
RUNS = {
    "healthy": ("", "off"),
    "broken, auto": ("all:raises", "auto"),
    "broken, off": ("all:raises", "off"),
}


@pytest.fixture(scope="module")
def yolo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("ultralytics")

    def one(name: str) -> subprocess.CompletedProcess[str]:
        spec, conv = RUNS[name]
        folder = tmp_path_factory.mktemp("yolo")
        (folder / "train.py").write_text(YOLO)
        environ = broken_convolution.environment(spec, folder)
        options = ["--seed", "0", "--conv", conv, "train.py"]
        return subprocess.run(
            [sys.executable, "-m", "penstock", "run", *options],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=240,
            env={
                **os.environ,
                **environ,
                "OMP_NUM_THREADS": "1",
                "YOLO_OFFLINE": "true",
                "YOLO_CONFIG_DIR": str(folder),
            },
            check=False,
        )

    return scripts.run_all(one, list(RUNS))


def loss_of(result: subprocess.CompletedProcess[str]) -> list[float]:
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("loss "))
    return [float(word) for word in line.split()[1:]]


@pytest.mark.slow
def test_yolov8n_trains_through_penstock_run(yolo: dict[str, Any]) -> None:
    broken, healthy = (scripts.told(yolo[name]) for name in ("broken, auto", "healthy"))
    assert healthy.returncode == 0, healthy.stderr[-3000:]
    assert broken.returncode == 0, broken.stderr[-3000:]
    assert loss_of(broken) == pytest.approx(loss_of(healthy), rel=1e-2)
    assert "convolutions intercepted on cpu" in broken.stderr
    assert "passed to torch" not in broken.stderr


@pytest.mark.slow
def test_yolov8n_fails_without_it(yolo: dict[str, Any]) -> None:
    result = scripts.told(yolo["broken, off"])
    assert result.returncode != 0
    assert "miopenStatusUnknownError" in result.stderr + result.stdout
