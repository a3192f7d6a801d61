"""The convolution bypass on a real GPU: interception, results, strides, memory. Needs CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.conv import bypass_convolutions, probe
from support import conv_opinfo
from support.paths import REPO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # from torch itself: odd samples, TF32, compilers
]


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1, groups=4),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.Conv2d(64, 16, 1),
        nn.ConvTranspose2d(16, 8, 3, 2, 1, 1),
    ).cuda()


def losses(step: Any, net: nn.Module, x: torch.Tensor, num: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    found = []
    for _ in range(num):
        optimizer.zero_grad()
        loss = step(x).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(autouse=True)
def no_tf32() -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def one_compiler() -> Iterator[None]:
    """Limit Inductor to one compile process. The default keeps one per core."""
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=1):
        yield


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("manner", ["eager", "autocast", "compiled"])
@pytest.mark.usefixtures("one_compiler")
def test_training_gives_the_native_losses_without_the_library(manner: str, kind: Any) -> None:
    x = torch.randn(4, 3, 64, 64, device="cuda").contiguous(memory_format=kind)

    def train() -> list[float]:
        net = small_net().to(memory_format=kind)
        step: Any = torch.compile(net) if manner == "compiled" else net

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=manner == "autocast"):
                return step(x)

        return losses(forward, net, x)

    native = train()
    torch._dynamo.reset()
    bypass = bypass_convolutions("on", devices=("cuda",))
    with bypass, torch.profiler.profile() as profile:
        ours = train()
    torch._dynamo.reset()
    assert ours == pytest.approx(native, rel=2e-2 if manner == "autocast" else 1e-3)
    assert bypass.num_caught >= (40 if manner == "compiled" else 3 * 17)  # x needs no gradient
    assert bypass.num_native == 0
    names = {event.key for event in profile.key_averages()}
    assert not {name for name in names if "cudnn_conv" in name or "miopen_conv" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_at_most_four_times_cudnn_s(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for channels, size, groups, stride in ((64, 56, 1, 2), (128, 28, 32, 1), (48, 30, 48, 1)):
        x = torch.randn(4, channels, size, size, device="cuda").to(dtype).requires_grad_()
        w = torch.randn(channels, channels // groups, 3, 3, device="cuda").to(dtype)
        w = (w * 0.1).requires_grad_()

        def passes(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
            y = functional.conv2d(x, w, None, stride, 1, 1, groups)  # noqa: B023
            return [y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))]

        truth = passes(x.double(), w.double())
        native = passes(x, w)
        with bypass_convolutions("on", devices=("cuda",)):
            ours = passes(x, w)
        for a, b, c in zip(ours, native, truth, strict=True):
            floor = torch.finfo(dtype).eps * c.abs().max().item()
            theirs = max((b.double() - c).abs().max().item(), floor)
            assert (a.double() - c).abs().max().item() <= 4 * theirs


def significant(t: torch.Tensor) -> list[int]:
    """Return the strides of the axes that have more than one element."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()]


def test_opinfo_samples_on_cuda() -> None:
    for op in map(conv_opinfo.operator, conv_opinfo.NAMES):
        for sample in op.sample_inputs("cuda", torch.float32, requires_grad=False):
            native = op(sample.input, *sample.args, **sample.kwargs)
            with bypass_convolutions("on", devices=("cuda",)):
                ours = op(sample.input, *sample.args, **sample.kwargs)
            torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)
            assert significant(ours) == significant(native)


def test_cuda_graphs_capture_it() -> None:
    net, x = small_net().eval(), torch.randn(2, 3, 64, 64, device="cuda")
    with torch.no_grad(), bypass_convolutions("on", devices=("cuda",)):
        expected = net(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = net(x)
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


YOLO = """
import sys, torch
sys.path.insert(0, sys.argv[1])
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(4 * 2**30 / total)
from conv_models import training_step
from penstock.conv.algorithms import triton_launch
if sys.argv[2] == "without":
    triton_launch.switch_off("a test")
from penstock.conv import bypass_convolutions
step = training_step("YOLOv8n", "cuda", is_half=False)
with bypass_convolutions("on", devices=("cuda",)) as bypass:
    for _ in range(3):
        loss = step()
assert loss.isfinite()
print(torch.cuda.max_memory_reserved() // 2**20, "MiB;", bypass)
"""


@pytest.mark.parametrize("triton", ["with", "without"])
def test_yolov8n_at_batch_8_and_640_pixels_fits_in_4_gb(triton: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", YOLO, str(REPO / "benchmarks"), triton],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PENSTOCK_CONV_TUNE_S": "20"},
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stderr


def test_the_probe_finds_a_healthy_card_healthy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    findings = probe("cuda")
    assert findings.broken == frozenset(), str(findings)
    assert len(findings.verdicts) > 100


def test_torch_s_own_kernels_leave_the_library_switched_on() -> None:
    """They switch it off for a call, also if the call raises."""
    from penstock.conv.algorithms import aten
    from support import conv_cases

    case = conv_cases.CASES[0]
    g, exact = case.geometry(is_channels_last=False), conv_cases.exact(case, torch.float32, "cuda")
    run = aten.prepare(g, exact.dy, exact.w, 0, "input gradient")
    found = run(exact.dy, exact.w)
    assert (
        conv_cases.distance(found, exact.results["input gradient"], exact.scales["input gradient"])
        < 1e-5
    )
    assert torch.backends.cudnn.enabled
    with pytest.raises(RuntimeError):
        run(exact.dy[:, :1], exact.w)
    assert torch.backends.cudnn.enabled


def test_torch_s_own_kernels_are_not_timed_if_they_are_wrong() -> None:
    from penstock.conv import tuning
    from penstock.conv.algorithms.candidates import Candidate, candidates, unprepared
    from support import conv_cases

    case = conv_cases.CASES[0]
    g, exact = case.geometry(is_channels_last=False), conv_cases.exact(case, torch.float32, "cuda")
    ways = candidates(g, "forward", torch.float32, "cuda")
    right = next(way for way in ways if way.name == "columns")
    wrong = Candidate("aten", unprepared(lambda *given: right.run(*given).roll(1, -1)))
    given = (g, exact.x, exact.w, 1 << 20)
    for one, best in ((wrong, right.name), (Candidate("aten", right.prepare), "aten")):
        trial = tuning.Trial([one], right)
        while trial.left:
            tuning._continue(trial, *given)
            torch.cuda.synchronize()
        assert trial.best.name == best
    assert tuning._agrees(right, right, *given)
    assert not tuning._agrees(wrong, right, *given)


def test_the_fastest_candidate_is_chosen_in_any_order() -> None:
    from penstock.conv import tuning
    from penstock.conv.algorithms.candidates import Candidate, candidates, unprepared
    from support import conv_cases

    case = conv_cases.CASES[0]
    g, exact = case.geometry(is_channels_last=False), conv_cases.exact(case, torch.float32, "cuda")
    ways = candidates(g, "forward", torch.float32, "cuda")
    fast = next(way for way in ways if way.name == "columns")

    def repeat(*given: Any) -> torch.Tensor:
        for _ in range(9):
            result = fast.run(*given)
        return result

    slow = Candidate("slow", unprepared(repeat))
    for order in ([slow, fast], [fast, slow]):
        trial = tuning.Trial(order, slow)
        while trial.left:
            tuning._continue(trial, g, exact.x, exact.w, 1 << 20)
            torch.cuda.synchronize()
        assert trial.best.name == "columns"
        assert 0 < trial.best_ms < 100
