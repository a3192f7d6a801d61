"""Answers of NVML and nvidia-smi, from a fake with NVML's calling conventions."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from typing import Any

import pytest

from penstock.machine import nvidia
from penstock.machine.facts import Gpu
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.nvidia import cards_by_nvml, cards_by_tool
from penstock.machine.vendor_tools import ToolFailed, ToolMissing

pytestmark = pytest.mark.legacy

NOT_SUPPORTED = 3
# Recorded from an H200. The fake returns the same values.
H200 = Gpu(
    name="NVIDIA H200",
    vendor="nvidia",
    architecture="sm_90",
    memory_bytes=150754820096,
    driver="580.159.04",
)
H200_READING = GpuReading(
    index=0,
    name="NVIDIA H200",
    use_percent=0.0,
    temperature_c=32.0,
    memory_used_bytes=644939776,
    memory_total_bytes=150754820096,
    power_w=123.35,
)
H200_LINE = "NVIDIA H200, 580.159.04, 9.0, 143771, 0, 0, 31, 107.01\n"


class FakeNvml:
    """NVML with ``num_gpus`` H200s. The queries in ``refused`` are not supported."""

    def __init__(self, num_gpus: int = 1, refused: tuple[str, ...] = (), init_code: int = 0):
        self.num_gpus, self.refused, self.init_code = num_gpus, refused, init_code
        self.num_open = 0
        self.nvmlErrorString = lambda code: b"Driver Not Loaded"
        self.nvmlErrorString.restype = None  # type: ignore[attr-defined]

    def nvmlInit_v2(self) -> int:
        self.num_open += self.init_code == 0
        return self.init_code

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> int:
        return self._write("nvmlSystemGetDriverVersion", buffer, b"580.159.04")

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.num_gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return NOT_SUPPORTED if f"gpu {index}" in self.refused else 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> int:
        return self._write("nvmlDeviceGetName", buffer, b"NVIDIA H200")

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return self._code("nvmlDeviceGetCudaComputeCapability")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 150754820096, 644939776
        return self._code("nvmlDeviceGetMemoryInfo")

    def nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        return self._code("nvmlDeviceGetUtilizationRates")

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, celsius: Any) -> int:
        celsius._obj.value = 32
        return self._code("nvmlDeviceGetTemperature")

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 123350
        return self._code("nvmlDeviceGetPowerUsage")

    def _code(self, question: str) -> int:
        return NOT_SUPPORTED if question in self.refused else 0

    def _write(self, question: str, buffer: Any, text: bytes) -> int:
        if question not in self.refused:
            buffer.value = text
        return self._code(question)


def test_nvml_describes_every_card_and_is_closed_again() -> None:
    nvml = FakeNvml(num_gpus=2)
    second = replace(H200_READING, index=1)
    assert cards_by_nvml(lambda: nvml) == [(H200, H200_READING), (H200, second)]
    assert nvml.num_open == 0


def test_no_card_is_an_empty_list() -> None:
    assert cards_by_nvml(lambda: FakeNvml(num_gpus=0)) == []


def test_what_a_card_does_not_support_is_unknown_and_the_rest_is_known() -> None:
    refused = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetName")
    ((gpu, reading),) = cards_by_nvml(lambda: FakeNvml(refused=refused))
    assert (gpu.memory_bytes, reading.memory_used_bytes, reading.power_w) == (None, None, None)
    assert (gpu.name, gpu.architecture) == ("NVIDIA GPU", "sm_90")


def test_a_card_that_is_lost_does_not_hide_the_others() -> None:
    cards = cards_by_nvml(lambda: FakeNvml(num_gpus=3, refused=("gpu 1",)))
    assert [reading.index for _, reading in cards] == [0, 2]


def test_a_question_that_an_old_library_lacks_is_unknown() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetPowerUsage = None  # type: ignore[assignment]

    assert cards_by_nvml(Old)[0][1].power_w is None


def test_a_library_without_its_driver_says_so() -> None:
    nvml = FakeNvml(init_code=9)
    with pytest.raises(ToolFailed, match="9: Driver Not Loaded"):
        cards_by_nvml(lambda: nvml)
    assert nvml.num_open == 0


def test_a_machine_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    for platform in ("linux", "win32", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        with pytest.raises(ToolMissing):
            cards_by_nvml()


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(nvidia, "run_tool", lambda command, limit_s: text)


def test_the_tool_s_table(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, H200_LINE * 2)
    (gpu, reading), (second_gpu, second_reading) = cards_by_tool(1.0)
    assert (second_gpu, second_reading) == (gpu, replace(reading, index=1))
    assert (gpu.name, gpu.driver, gpu.architecture) == ("NVIDIA H200", "580.159.04", "sm_90")
    assert gpu.memory_bytes == reading.memory_total_bytes == 143771 << 20
    assert (reading.temperature_c, reading.power_w) == (31.0, 107.01)


def test_a_cell_that_is_not_supported_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "Quadro K600, 470.1, 3.0, 981, 3, [Not Supported], 40, [N/A]\n")
    ((gpu, reading),) = cards_by_tool(1.0)
    assert (reading.use_percent, reading.power_w, gpu.architecture) == (None, None, "sm_30")


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA-SMI has failed because it could not communicate with the driver.\n",
        *("\x00\ufffd\n", ", , , , , , , \n", "a,b\n", H200_LINE + "and a warning\n"),
    ],
)
def test_rubbish_is_no_card(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    say(monkeypatch, text)
    with pytest.raises(ToolFailed, match="not the expected table"):
        cards_by_tool(1.0)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_nothing_printed_is_no_card(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    say(monkeypatch, text)
    assert cards_by_tool(1.0) == []
