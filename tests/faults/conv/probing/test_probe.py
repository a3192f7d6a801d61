"""Convolution libraries that raise, return wrong results, crash or hang: probe and bypass."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.conv import ProbeResult, bypass_convolutions, probe, reset
from penstock.conv.probing.probe import run_steps
from penstock.conv.probing.steps import ProbeStep
from support import broken_convolution, leftovers, scripts

pytestmark = [pytest.mark.fault, pytest.mark.legacy]


class UNet(nn.Module):
    """Downsampling, a transposed convolution and a skip, with groups and a depthwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, groups=2), nn.ReLU())
        self.deep = nn.Conv2d(16, 16, 3, padding=2, dilation=2)
        self.each = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        return self.last(torch.cat([a, self.up(self.each(self.deep(self.down(a))))], 1))


NUM_LAYERS = 6


def train(num_steps: int = 3, *, is_half: bool = False) -> list[float]:
    torch.manual_seed(0)
    net, x = UNet(), torch.randn(2, 3, 16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_unet_trains_without_one_native_convolution(fault: str, is_half: bool) -> None:
    expected = train(is_half=is_half)
    with broken_convolution.breaking(f"all:{fault}") as native:
        with bypass_convolutions("on", devices=("cpu",)) as bypass:
            losses = train(is_half=is_half)
        assert native.num_calls == 0
    assert losses == pytest.approx(expected, rel=2e-2 if is_half else 1e-5)
    assert bypass.num_caught == 3 * (3 * NUM_LAYERS - 1)  # the first layer has no input gradient


def test_without_the_bypass_it_fails() -> None:
    with broken_convolution.breaking("all:raises") as native:
        with pytest.raises(RuntimeError, match="miopenStatusUnknownError"):
            train()
        assert native.num_calls == 1


def test_without_the_bypass_wrong_numbers_change_the_losses() -> None:
    expected = train()
    with broken_convolution.breaking("all:wrong"):
        assert train() != pytest.approx(expected, rel=1e-2)


def step(kind: str, which: str = "forward") -> ProbeStep:
    return ProbeStep(kind=kind, dtype="float32", layout="contiguous", which=which)


MIXED = "plain:raises,strided:crashes,dilated:hangs,grouped:wrong"


@pytest.mark.slow
def test_the_probe_tells_the_five_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in broken_convolution.environment(MIXED, tmp_path).items():
        monkeypatch.setenv(name, value)
    kinds = ("depthwise", "plain", "strided", "grouped", "dilated", "1-d")
    verdicts = run_steps("cpu", [step(kind) for kind in kinds], limit_s=4.0)
    words = {verdict.step.kind: verdict.word for verdict in verdicts}
    assert words == {
        "depthwise": "right",
        "plain": "raises",
        "strided": "crashes",
        "grouped": "wrong",
        "dilated": "hangs",
        "1-d": "right",
    }
    notes = {verdict.step.kind: verdict.note for verdict in verdicts}
    assert broken_convolution.MESSAGE in notes["plain"]
    assert "SIGSEGV" in notes["strided"]


HANGING = """
from penstock.conv.probing.probe import run_steps
from penstock.conv.probing.steps import ProbeStep

step = ProbeStep(kind="dilated", dtype="float32", layout="contiguous", which="forward")
run_steps("cpu", [step], limit_s=600.0)
"""


def test_a_child_that_hangs_ends_with_a_parent_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in broken_convolution.environment("dilated:hangs", tmp_path).items():
        monkeypatch.setenv(name, value)
    with scripts.running(HANGING, tmp_path) as process:
        family = scripts.wait_for_family(process.pid, 1, limit_s=60.0)
        process.kill()
        process.wait()
        try:
            assert leftovers.wait_until_gone(family) == []
        finally:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


PARTLY = "plain:raises,depthwise:raises"
AUTO = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from test_probe import train
from penstock.conv import probe
from penstock.conv.bypass import current
bypass = current()
assert bypass is not None, "PENSTOCK_CONV did nothing"
assert not any(kind not in ("plain", "depthwise") for kind, *_ in bypass.broken), bypass.broken
train()
assert bypass.num_caught and bypass.num_native, bypass
from support import broken_convolution
assert broken_convolution.native.num_calls
print(bypass)
print(probe("cpu").advice)
"""


@pytest.mark.slow
def test_auto_bypasses_what_is_broken_and_nothing_else(tmp_path: Path) -> None:
    environ = broken_convolution.environment(PARTLY, tmp_path)
    folder = str(Path(__file__).parent)
    source = "import penstock\n" + AUTO
    result = scripts.run(source, tmp_path, folder, PENSTOCK_CONV="auto", **environ)
    assert result.returncode == 0, result.stderr
    assert "passed to torch" in result.stdout
    assert "bypass_convolutions" in result.stdout  # ATen's kernels are broken too
    kept = list((tmp_path / "cache").glob("conv-probe-*.json"))
    assert len(kept) == 1


def test_a_kept_result_is_used_again_and_forgotten_by_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    calls: list[Any] = []
    few = [step("plain"), step("1-d")]
    monkeypatch.setattr("penstock.conv.probing.probe.all_steps", lambda: few)
    first = probe("cpu", on_verdict=calls.append)
    again = probe("cpu", on_verdict=calls.append)
    assert (len(calls), again.verdicts) == (2, first.verdicts)
    monkeypatch.setenv("MIOPEN_FIND_MODE", "NORMAL")  # different settings give a different result
    probe("cpu", on_verdict=calls.append)
    assert len(calls) == 4
    assert reset() == 2
    assert list(tmp_path.iterdir()) == []
    assert isinstance(first, ProbeResult)
