"""GPU queries: their order, and the report when a tool fails."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from penstock.machine import gpu, host
from penstock.machine.facts import Gpu
from penstock.machine.gpu import FoundGpus, find_gpus, find_torch_gpus
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.vendor_tools import ToolFailed, ToolMissing, ToolTimedOut, call_library

pytestmark = pytest.mark.legacy

RADEON = Gpu(name="Radeon", vendor="amd", architecture="gfx1010")
GEFORCE = Gpu(name="GeForce", vendor="nvidia", architecture="sm_86")
CARD = (GEFORCE, GpuReading(index=0, name="GeForce"))


def raising(error: Exception) -> Any:
    def ask(*arguments: Any) -> Any:
        raise error

    return ask


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a Linux machine without a GPU. Tests add GPUs."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", raising(ToolMissing("no NVML")))
    monkeypatch.setattr(gpu.nvidia, "cards_by_tool", raising(ToolMissing("no nvidia-smi")))
    monkeypatch.setattr(gpu.amd, "cards_by_kfd", list)


def test_nobody_sees_nothing_and_that_is_no_trouble() -> None:
    assert find_gpus() == FoundGpus(gpus=(), seen_by="nobody", trouble="")


def test_the_tool_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.nvidia, "cards_by_tool", lambda limit_s: [CARD])
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", raising(AssertionError("leaves a thread")))
    assert find_gpus() == FoundGpus(gpus=(GEFORCE,), seen_by="nvidia-smi")


def test_the_library_is_asked_where_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", lambda: [CARD])
    assert find_gpus() == FoundGpus(gpus=(GEFORCE,), seen_by="nvml")


def test_a_tool_that_fails_is_told_and_the_library_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu.nvidia, "cards_by_tool", raising(ToolFailed("nvidia-smi failed")))
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", lambda: [CARD])
    assert find_gpus() == FoundGpus(gpus=(GEFORCE,), seen_by="nvml", trouble="nvidia-smi failed")
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", raising(ToolFailed("NVML error 18: mismatch")))
    assert find_gpus() == FoundGpus(trouble="nvidia-smi failed; NVML error 18: mismatch")


def test_after_a_tool_that_hangs_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.nvidia, "cards_by_tool", raising(ToolTimedOut("nvidia-smi hangs")))
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", raising(AssertionError("same driver")))
    assert find_gpus() == FoundGpus(trouble="nvidia-smi hangs")


def test_with_both_makers_cards_torch_s_build_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", lambda: [CARD])
    monkeypatch.setattr(gpu.amd, "cards_by_kfd", lambda: [RADEON])
    assert find_gpus("hip") == FoundGpus(gpus=(RADEON,), seen_by="kfd")
    assert find_gpus("cuda").seen_by == "nvml"


def test_a_broken_driver_of_one_does_not_hide_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.nvidia, "cards_by_nvml", raising(ToolFailed("no driver")))
    monkeypatch.setattr(gpu.amd, "cards_by_kfd", lambda: [RADEON])
    assert find_gpus() == FoundGpus(gpus=(RADEON,), seen_by="kfd", trouble="no driver")


@pytest.mark.parametrize(("architecture", "count"), [("arm64", 1), ("x86_64", 0)])
def test_an_apple_chip_has_its_gpu_on_board(
    monkeypatch: pytest.MonkeyPatch, architecture: str, count: int
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(host, "architecture", lambda: architecture)
    monkeypatch.setattr(host, "cpu_model", lambda: "Apple M2")
    found = find_gpus()
    assert len(found.gpus) == count
    if count:
        assert (found.gpus[0].name, found.gpus[0].vendor) == ("Apple M2", "apple")
        assert found.seen_by == "platform"


def test_a_library_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    with pytest.raises(ToolTimedOut, match=r"NVML did not answer in 0\.05 s"):
        call_library(release.wait, 0.05, "NVML")
    release.set()


def test_a_library_that_raises_raises_here() -> None:
    with pytest.raises(ToolFailed, match="broken"):
        call_library(raising(ToolFailed("broken")), 5.0, "NVML")


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(gpu, "run_tool", lambda command, limit_s: text)


def test_torch_s_answer_is_found_among_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    say(
        monkeypatch,
        "some import says hello\n"
        'penstock-gpus:[{"name": "Radeon", "vendor": "amd", "architecture": "gfx1010"}]\n',
    )
    assert find_torch_gpus(1.0) == FoundGpus(gpus=(RADEON,), seen_by="torch")


@pytest.mark.parametrize(
    "text", ["", "hello\n", "penstock-gpus:[{\n", 'penstock-gpus:[{"x": 1}]\n', "penstock-gpus:3\n"]
)
def test_rubbish_from_the_child_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    say(monkeypatch, text)
    found = find_torch_gpus(1.0)
    assert found.gpus == ()
    assert "no list of GPUs" in found.trouble


def test_a_child_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run_tool", raising(ToolTimedOut("python did not answer")))
    assert find_torch_gpus(3.0) == FoundGpus(trouble="torch did not list its GPUs within 3 s")


def test_a_frozen_application_asks_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(gpu, "run_tool", raising(AssertionError("it would start itself")))
    assert "no Python interpreter can be started" in find_torch_gpus(1.0).trouble
