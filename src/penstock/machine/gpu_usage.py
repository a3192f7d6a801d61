"""Reads the current load of the GPUs from outside the processes that use them.

Meant for a dedicated process such as ``penstock doctor --watch``. It tries NVML first, which takes
9 ms per reading once loaded (driver 580, H200) and leaves a thread in the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.machine import nvidia
from penstock.machine.gpu_reading import GpuReading
from penstock.machine.vendor_tools import (
    ToolFailed,
    ToolMissing,
    ToolTimedOut,
    call_library,
    run_tool,
)

_ROCM_SMI = (
    "rocm-smi",
    "--showproductname",
    "--showuse",
    "--showtemp",
    "--showpower",
    "--showmeminfo",
    "vram",
    "--json",
)
_AMD_SMI = ("amd-smi", "metric", "--usage", "--temperature", "--power", "--mem-usage", "--json")
_UNIT_BYTES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}  # AMD writes MB for MiB


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """All readings of one moment and their source, or the reason why there are none."""

    readings: tuple[GpuReading, ...] = ()
    seen_by: str = "nobody"
    trouble: str = ""


def read_gpu_usage(limit_s: float) -> GpuUsage:
    """Return what each GPU is doing, and the source. Each tool gets ``limit_s``.

    Example:
        >>> seen = read_gpu_usage(limit_s=5.0)
        >>> bool(seen.readings) != bool(seen.trouble)
        True
    """
    sources: dict[str, Callable[[float], list[GpuReading]]] = {
        "nvml": _by_nvml,
        "nvidia-smi": _by_nvidia_smi,
        "amd-smi": _by_amd_smi,
        "rocm-smi": _by_rocm_smi,
    }
    troubles: list[str] = []
    for name, ask in sources.items():
        try:
            found = ask(limit_s)
        except ToolMissing:
            continue
        except ToolFailed as trouble:
            troubles.append(str(trouble))
            if isinstance(trouble, ToolTimedOut):
                break  # a hanging driver also hangs the next tool
            continue
        if found:
            return GpuUsage(readings=tuple(found), seen_by=name)
    tools = ", ".join(sources)
    return GpuUsage(trouble="; ".join(troubles) or f"no tool to read GPUs found (tried {tools})")


def _by_nvml(limit_s: float) -> list[GpuReading]:
    return [reading for _, reading in call_library(nvidia.cards_by_nvml, limit_s, "NVML")]


def _by_nvidia_smi(limit_s: float) -> list[GpuReading]:
    return [reading for _, reading in nvidia.cards_by_tool(limit_s)]


def _by_rocm_smi(limit_s: float) -> list[GpuReading]:
    cards = _json_of(run_tool(_ROCM_SMI, limit_s), "rocm-smi")
    if not isinstance(cards, dict):
        raise ToolFailed("rocm-smi printed JSON that is not an object")
    return [
        _of_rocm_card(int(key[4:]), card)
        for key, card in cards.items()
        if key.startswith("card") and key[4:].isdigit() and isinstance(card, dict)
    ]


def _of_rocm_card(index: int, card: Mapping[str, Any]) -> GpuReading:
    """Match each fact by stable words in its key, because the keys differ between versions."""

    def find(*words: str) -> Any:
        names = (name for name in card if all(word in name.lower() for word in words))
        return next((card[name] for name in names), None)

    return GpuReading(
        index=index,
        name=str(find("card series") or find("card model") or "AMD GPU"),
        use_percent=_number(find("gpu use (%)")),
        temperature_c=_number(find("temperature", "edge") or find("temperature", "junction")),
        memory_used_bytes=_bytes(find("vram", "used")),
        memory_total_bytes=_bytes(card.get("VRAM Total Memory (B)")),
        power_w=_number(find("package power (w)")),
    )


def _by_amd_smi(limit_s: float) -> list[GpuReading]:
    cards = _json_of(run_tool(_AMD_SMI, limit_s), "amd-smi")
    if isinstance(cards, dict):
        cards = cards.get("gpu_data")  # since ROCm 7
    if not isinstance(cards, list):
        raise ToolFailed("amd-smi printed JSON that is not a list of GPUs")
    return [_of_amd_card(place, card) for place, card in enumerate(cards) if isinstance(card, dict)]


def _of_amd_card(place: int, card: Mapping[str, Any]) -> GpuReading:
    def find(*path: str) -> Any:
        value: Any = card
        for step in path:
            value = value.get(step) if isinstance(value, dict) else None
        return value

    temperature = _number(find("temperature", "edge"))
    if temperature is None:  # Instinct cards have no edge sensor
        temperature = _number(find("temperature", "hotspot"))
    index = card.get("gpu")
    return GpuReading(
        index=index if isinstance(index, int) else place,
        name="AMD GPU",
        use_percent=_number(find("usage", "gfx_activity")),
        temperature_c=temperature,
        memory_used_bytes=_bytes(find("mem_usage", "used_vram")),
        memory_total_bytes=_bytes(find("mem_usage", "total_vram")),
        power_w=_number(find("power", "socket_power")),
    )


def _json_of(text: str, tool: str) -> Any:
    """Return the JSON in a tool's output. Warnings may surround it."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"^[\[{]", text, re.MULTILINE):
        try:
            return decoder.raw_decode(text, start.start())[0]
        except ValueError:  # a line like "[WARNING] ..."
            continue
    raise ToolFailed(f"{tool} printed {text.strip()[:80]!r}, which is not JSON")


def _number(value: Any) -> float | None:
    """Return a number from ``3``, ``"3.0"`` or ``{"value": 3, "unit": "%"}``."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):  # N/A, None, a list
        return None
    return number if abs(number) < float("inf") else None  # also rejects NaN


def _bytes(value: Any) -> int | None:
    number = _number(value)
    unit = value.get("unit", "B") if isinstance(value, dict) else "B"
    factor = _UNIT_BYTES.get(unit) if isinstance(unit, str) else None
    return None if number is None or factor is None else int(number * factor)
