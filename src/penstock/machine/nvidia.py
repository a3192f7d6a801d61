"""Lists NVIDIA GPUs and their current load with ``nvidia-smi`` or the NVML library.

Neither creates a CUDA context. But NVML leaves a thread in the calling process. Use it only in a
process that will not fork, or where the tool is missing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from penstock.machine.facts import Gpu
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.vendor_tools import ToolFailed, ToolMissing, run_tool

_LINUX_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_WINDOWS_LIBRARIES = (
    r"%SystemRoot%\System32\nvml.dll",
    r"%ProgramFiles%\NVIDIA Corporation\NVSMI\nvml.dll",  # drivers before 2018
)
Card = tuple[Gpu, GpuReading]
"""The description of a GPU and its current state."""

_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE; the driver version is shorter
_SMI_FIELDS = (
    "name",
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
)


class _MemoryInfo(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def load_nvml() -> Any:
    """Load the library that comes with the driver.

    Raises:
        ToolMissing: There is no NVIDIA driver.
    """
    if sys.platform == "darwin":
        raise ToolMissing("there is no NVIDIA driver for macOS")
    is_windows = sys.platform == "win32"
    for name in _WINDOWS_LIBRARIES if is_windows else _LINUX_LIBRARIES:
        try:
            return ctypes.CDLL(os.path.expandvars(name))
        except OSError:
            continue
    raise ToolMissing("NVML is not installed")


def cards_by_nvml(load: Callable[[], Any] = load_nvml) -> list[Card]:
    """Return the GPUs that NVML lists, with their current state.

    Raises:
        ToolMissing: NVML is not installed.
        ToolFailed: NVML cannot reach its driver.
    """
    nvml = load()
    _check(nvml, nvml.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _check(nvml, nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        driver = _text(nvml.nvmlSystemGetDriverVersion)
        cards = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                cards.append(_card(nvml, index, handle, driver))
        return cards
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int, handle: ctypes.c_void_p, driver: str | None) -> Card:
    """Return one GPU. Values that the driver does not support are None."""
    memory, use = _MemoryInfo(), _Utilization()
    major, minor, temperature, milliwatts = (ctypes.c_int() for _ in range(4))

    def is_known(question: str, *arguments: Any) -> bool:
        function = getattr(nvml, question, None)  # older libraries lack newer functions
        return function is not None and function(handle, *arguments) == 0

    by = ctypes.byref
    knows_arch = is_known("nvmlDeviceGetCudaComputeCapability", by(major), by(minor))
    knows_memory = is_known("nvmlDeviceGetMemoryInfo", by(memory))
    knows_use = is_known("nvmlDeviceGetUtilizationRates", by(use))
    knows_temperature = is_known("nvmlDeviceGetTemperature", 0, by(temperature))
    knows_power = is_known("nvmlDeviceGetPowerUsage", by(milliwatts))
    name = _text(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"
    gpu = Gpu(
        name=name,
        vendor="nvidia",
        architecture=f"sm_{major.value}{minor.value}" if knows_arch else None,
        memory_bytes=memory.total if knows_memory else None,
        driver=driver,
    )
    reading = GpuReading(
        index=index,
        name=name,
        use_percent=float(use.gpu) if knows_use else None,
        temperature_c=float(temperature.value) if knows_temperature else None,
        memory_used_bytes=memory.used if knows_memory else None,
        memory_total_bytes=gpu.memory_bytes,
        power_w=milliwatts.value / 1000 if knows_power else None,
    )
    return gpu, reading


def _text(question: Callable[..., int], *arguments: Any) -> str | None:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    if question(*arguments, buffer, ctypes.c_uint(_NAME_BYTES)) != 0:
        return None
    return buffer.value.decode("utf-8", errors="replace") or None


def _check(nvml: Any, code: int) -> None:
    if code == 0:
        return
    try:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        reason = nvml.nvmlErrorString(code).decode("ascii", errors="replace")
    except (AttributeError, ctypes.ArgumentError):
        reason = "no reason given"
    raise ToolFailed(f"NVML error {code}: {reason}")


def cards_by_tool(limit_s: float) -> list[Card]:
    """Return the GPUs that ``nvidia-smi`` lists, with their current state.

    Raises:
        ToolMissing: ``nvidia-smi`` is not installed.
        ToolFailed: It failed, hung, or printed unexpected output.
    """
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    text = run_tool(["nvidia-smi", query, "--format=csv,noheader,nounits"], limit_s)
    lines = [line for line in text.splitlines() if line.strip()]
    return [_card_of_row(index, line.split(",")) for index, line in enumerate(lines)]


def _card_of_row(index: int, row: list[str]) -> Card:
    if len(row) != len(_SMI_FIELDS) or not row[0].strip():
        raise ToolFailed(f"nvidia-smi printed {', '.join(row)[:80]!r}, not the expected table")
    name, driver, capability = (cell.strip() for cell in row[:3])
    total_mib, used_mib, use, temperature, power_w = (_number(cell) for cell in row[3:])
    gpu = Gpu(
        name=name,
        vendor="nvidia",
        architecture=f"sm_{capability.replace('.', '')}" if _number(capability) else None,
        memory_bytes=None if total_mib is None else int(total_mib) << 20,
        driver=driver if _number(driver.partition(".")[0]) is not None else None,
    )
    reading = GpuReading(
        index=index,
        name=name,
        use_percent=use,
        temperature_c=temperature,
        memory_used_bytes=None if used_mib is None else int(used_mib) << 20,
        memory_total_bytes=gpu.memory_bytes,
        power_w=power_w,
    )
    return gpu, reading


def _number(cell: str) -> float | None:
    """Return the number in a cell, or None (``[N/A]``, ``[Not Supported]``)."""
    cell = cell.strip()
    is_number = cell.isascii() and cell.replace(".", "", 1).isdigit()
    return float(cell) if is_number else None
