"""The PCIe link of a GPU, from sysfs or ``nvidia-smi``.

An idle GPU slows its link down to save power, so the current and the maximum speed are reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.machine.kernel_files import parse_count, read_text
from penstock.machine.vendor_tools import ToolFailed, run_tool

SYSFS = Path("/sys/bus/pci/devices")
_LIMIT_S = 5.0
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane in one direction, by generation, after line coding."""
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Generation by the speed that sysfs reports, in GT/s."""
_SMI_FIELDS = {
    "generation": "pcie.link.gen.current",
    "width": "pcie.link.width.current",
    "max_generation": "pcie.link.gen.max",
    "max_width": "pcie.link.width.max",
}


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """A PCIe link. None means unknown."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth at the best generation and the current width.

        Example:
            >>> PcieLink(generation=1, width=16, max_generation=5).bytes_per_s // 1e9
            63.0
        """
        lane = _LANE_BYTES_PER_S.get(self.max_generation or self.generation or 0)
        return lane * self.width if lane and self.width else None

    def __str__(self) -> str:
        best = self.max_generation or self.generation
        if best is None or self.width is None:
            return "unknown"
        text = f"PCIe {best} x{self.width}"
        if self.bytes_per_s:
            text += f", up to {self.bytes_per_s / 1e9:.3g} GB/s"
        if self.generation is not None and self.generation < best:
            text += f" (currently PCIe {self.generation} to save power)"
        if self.max_width is not None and self.width < self.max_width:
            text += f"; the card supports x{self.max_width}"
        return text


def pcie_link(bus_id: str, root: Path = SYSFS) -> PcieLink | None:
    """Return the link of the device at a PCI address such as ``0000:3b:00.0``, or None if unknown.

    Example:
        >>> pcie_link("ffff:ff:1f.7") is None
        True
    """
    link = _by_files(root / bus_id.lower())
    return _by_tool(bus_id) if link is None else link


def _by_files(folder: Path) -> PcieLink | None:
    generations = [_generation(folder / f"{when}_link_speed") for when in ("current", "max")]
    widths = [_width(folder / f"{when}_link_width") for when in ("current", "max")]
    if generations == [None, None]:
        return None
    (generation, max_generation), (width, max_width) = generations, widths
    return PcieLink(
        generation=generation, width=width, max_generation=max_generation, max_width=max_width
    )


def _generation(path: Path) -> int | None:
    speed = re.match(r"[\d.]+(?= GT/s)", read_text(path))
    return _GENERATIONS.get(float(speed[0])) if speed else None


def _width(path: Path) -> int | None:
    """Return a link width. Virtual devices report 0 or 255, which give None."""
    width = parse_count(read_text(path))
    return width if width and width <= 32 else None


def _by_tool(bus_id: str) -> PcieLink | None:
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    command = ["nvidia-smi", f"--id={bus_id}", query, "--format=csv,noheader,nounits"]
    try:
        cells = run_tool(command, _LIMIT_S).strip().split(",")
    except ToolFailed:
        return None
    counts = [parse_count(cell) for cell in cells]
    if len(counts) != len(_SMI_FIELDS) or not any(counts):
        return None
    return PcieLink(**dict(zip(_SMI_FIELDS, counts, strict=True)))
