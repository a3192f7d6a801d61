"""Current GPU usage, read with the available tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.machine import gpu_usage, nvidia
from penstock.machine.facts import Gpu
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.gpu_usage import read_gpu_usage
from penstock.machine.vendor_tools import ToolFailed, ToolMissing, ToolTimedOut

pytestmark = pytest.mark.legacy

MIB = 1 << 20

# Output formats of ROCm 5 and ROCm 6.
ROCM_SMI = {
    "card0": {
        "GPU use (%)": "37",
        "Temperature (Sensor edge) (C)": "61.0",
        "Temperature (Sensor junction) (C)": "70.0",
        "VRAM Total Memory (B)": str(6128 * MIB),
        "VRAM Total Used Memory (B)": str(1024 * MIB),
        "Average Graphics Package Power (W)": "88.0",
        "Card series": "Navi 10 [Radeon RX 5600 OEM/5600 XT / 5700/5700 XT]",
    },
    "system": {"Driver version": "5.16.9"},
}
AMD_SMI = [
    {
        "gpu": 0,
        "usage": {"gfx_activity": {"value": 12, "unit": "%"}},
        "power": {"socket_power": {"value": 140, "unit": "W"}},
        "temperature": {"edge": "N/A", "hotspot": {"value": 45, "unit": "C"}},
        "mem_usage": {
            "total_vram": {"value": 196592, "unit": "MB"},
            "used_vram": {"value": 283, "unit": "MB"},
        },
    }
]


class Tools:
    """The tools of a machine, with their output or failure."""

    def __init__(self) -> None:
        self.answers: dict[str, str | Exception] = {}
        self.asked: list[str] = []

    def ask(self, command: Sequence[str], limit_s: float) -> str:
        self.asked.append(command[0])
        answer = self.answers.get(command[0], ToolMissing(f"no {command[0]}"))
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    tools = Tools()

    def no_library() -> Any:
        raise ToolMissing("no NVML")

    monkeypatch.setattr(nvidia, "cards_by_nvml", no_library)
    monkeypatch.setattr(nvidia, "run_tool", tools.ask)
    monkeypatch.setattr(gpu_usage, "run_tool", tools.ask)
    return tools


def test_nobody_to_ask_is_empty_with_a_reason(tools: Tools) -> None:
    seen = read_gpu_usage(1.0)
    assert seen.readings == ()
    assert "no tool to read GPUs found" in seen.trouble


def test_nvml(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (Gpu(name="A", vendor="nvidia"), GpuReading(index=0, name="A", use_percent=5.0))
    monkeypatch.setattr(nvidia, "cards_by_nvml", lambda: [card])
    seen = read_gpu_usage(1.0)
    assert seen.seen_by == "nvml"
    assert seen.readings == (card[1],)
    assert tools.asked == []


def test_nvidia_smi(tools: Tools) -> None:
    tools.answers["nvidia-smi"] = "NVIDIA H200, 580.1, 9.0, 143771, 100, 97, 61, 640.5\n"
    assert read_gpu_usage(1.0).readings == (
        GpuReading(
            index=0,
            name="NVIDIA H200",
            use_percent=97.0,
            temperature_c=61.0,
            memory_used_bytes=100 * MIB,
            memory_total_bytes=143771 * MIB,
            power_w=640.5,
        ),
    )


def test_rocm_smi(tools: Tools) -> None:
    tools.answers["rocm-smi"] = json.dumps(ROCM_SMI)
    seen = read_gpu_usage(1.0)
    assert seen.seen_by == "rocm-smi"
    (reading,) = seen.readings
    assert (reading.use_percent, reading.temperature_c, reading.power_w) == (37.0, 61.0, 88.0)
    assert reading.memory_used_bytes == 1024 * MIB
    assert reading.memory_total_bytes == 6128 * MIB
    assert "5600" in reading.name


@pytest.mark.parametrize("wrapped", [AMD_SMI, {"gpu_data": AMD_SMI}])
@pytest.mark.parametrize("indent", [None, 4])
def test_amd_smi(tools: Tools, wrapped: Any, indent: int | None) -> None:
    tools.answers["amd-smi"] = json.dumps(wrapped, indent=indent)
    (reading,) = read_gpu_usage(1.0).readings
    assert (reading.use_percent, reading.temperature_c, reading.power_w) == (12.0, 45.0, 140.0)
    assert reading.memory_total_bytes == 196592 * MIB


def test_warnings_around_the_json_are_passed_over(tools: Tools) -> None:
    text = "[WARNING] AMD GPU is in low-power state\n" + json.dumps(ROCM_SMI, indent=2) + "\nBye\n"
    tools.answers["rocm-smi"] = text
    assert len(read_gpu_usage(1.0).readings) == 1


@pytest.mark.parametrize("tool", ["rocm-smi", "amd-smi"])
@pytest.mark.parametrize("text", ["", "rubbish", "{", "[1, 2", "\x00", '{"card0": '])
def test_rubbish_is_told(tools: Tools, tool: str, text: str) -> None:
    tools.answers[tool] = text
    seen = read_gpu_usage(1.0)
    assert seen.readings == ()
    assert f"{tool} printed" in seen.trouble


@pytest.mark.parametrize("text", ["{}", "[]", '{"gpu_data": 3}', '[{"gpu": "x"}]', "[3, null]"])
@pytest.mark.parametrize("tool", ["rocm-smi", "amd-smi"])
def test_json_of_another_shape_breaks_nothing(tools: Tools, tool: str, text: str) -> None:
    tools.answers[tool] = text
    for reading in read_gpu_usage(1.0).readings:
        assert reading.use_percent is None


@pytest.mark.parametrize("value", ["N/A", None, "nan", "inf", [], {}, {"value": "N/A"}, True])
def test_a_value_that_is_no_number_is_unknown(tools: Tools, value: Any) -> None:
    tools.answers["rocm-smi"] = json.dumps({"card0": {"GPU use (%)": value}})
    assert read_gpu_usage(1.0).readings == (GpuReading(index=0, name="AMD GPU"),)


def test_a_tool_that_fails_is_told_and_the_next_is_asked(tools: Tools) -> None:
    tools.answers["amd-smi"] = ToolFailed("amd-smi failed with exit code 1")
    tools.answers["rocm-smi"] = json.dumps(ROCM_SMI)
    assert read_gpu_usage(1.0).seen_by == "rocm-smi"
    del tools.answers["rocm-smi"]
    assert read_gpu_usage(1.0).trouble == "amd-smi failed with exit code 1"


def test_after_a_tool_that_hangs_nobody_else_is_asked(tools: Tools) -> None:
    tools.answers["nvidia-smi"] = ToolTimedOut("nvidia-smi did not answer in 1 s")
    assert read_gpu_usage(1.0).trouble == "nvidia-smi did not answer in 1 s"
    assert tools.asked == ["nvidia-smi"]
