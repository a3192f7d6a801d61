"""Lists AMD GPUs from the files of the Linux kernel's compute driver (KFD).

No device is opened and ROCm is not needed. The files exist whenever the ``amdgpu`` module is
loaded. They report the real architecture even if ``HSA_OVERRIDE_GFX_VERSION`` is set.
"""

from __future__ import annotations

from pathlib import Path

from penstock.machine.facts import Gpu
from penstock.machine.kernel_files import parse_count, read_fields, read_text

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DRM = Path("/sys/class/drm")
NAMES = Path("/usr/share/libdrm/amdgpu.ids")
DRIVER = Path("/sys/module/amdgpu/version")

_LOCAL_HEAPS = {1, 2}
"""Heap types of memory on the card: visible to the host, and private."""


def cards_by_kfd(
    nodes: Path = NODES, drm: Path = DRM, names: Path = NAMES, driver: Path = DRIVER
) -> list[Gpu]:
    """Return the AMD GPUs that can run compute work. Empty without the driver.

    Example:
        >>> all(gpu.vendor == "amd" for gpu in cards_by_kfd())
        True
    """
    version = read_text(driver)
    found = []
    for node in sorted(_folders(nodes), key=lambda path: (len(path.name), path.name)):
        facts = _properties(node / "properties")
        if not facts.get("gfx_target_version"):
            continue  # a CPU node, or a card that this process is not allowed to access
        card = drm / f"renderD{facts.get('drm_render_minor', 0)}" / "device"
        found.append(
            Gpu(
                name=_name(node, card, facts, names),
                vendor="amd",
                architecture=architecture_of(facts["gfx_target_version"]),
                memory_bytes=_memory_bytes(node, card),
                driver=version or None,
            )
        )
    return found


def architecture_of(version: int) -> str:
    """Return the compiler's name of an architecture from the kernel's version number.

    The number has two decimal digits each for minor and stepping. The name has one hex digit each.

    Example:
        >>> architecture_of(100100), architecture_of(90010), architecture_of(110501)
        ('gfx1010', 'gfx90a', 'gfx1151')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _name(node: Path, card: Path, facts: dict[str, int], names: Path) -> str:
    """Return the product name, else the chip's code name, else ``"AMD GPU"``."""
    boxed = read_text(card / "product_name")  # only some server cards have it
    if not boxed:
        boxed = _marketing_name(facts.get("device_id", 0), read_text(card / "revision"), names)
    return boxed or read_text(node / "name") or "AMD GPU"


def _marketing_name(device_id: int, revision: str, names: Path) -> str:
    """Return libdrm's name for this chip, from its lines of ``device, revision, name`` in hex."""
    wanted = f"{device_id:x}"
    by_revision = {}
    for line in read_text(names).splitlines():
        cells = [cell.strip() for cell in line.split(",", 2)]
        if len(cells) == 3 and cells[0].lower() == wanted:
            by_revision[cells[1].lower().lstrip("0")] = cells[2]
    if len(by_revision) == 1:
        return next(iter(by_revision.values()))
    return by_revision.get(revision.lower().removeprefix("0x").lstrip("0"), "")


def _memory_bytes(node: Path, card: Path) -> int | None:
    """Return the memory on the card. Integrated GPUs report only what the firmware reserved."""
    banks = [_properties(bank / "properties") for bank in _folders(node / "mem_banks")]
    local = [
        bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS
    ]
    return sum(local) or parse_count(read_text(card / "mem_info_vram_total")) or None


def _properties(path: Path) -> dict[str, int]:
    """Return the numbers in a file of ``name value`` lines. Other lines are ignored."""
    return {name: parse_count(value) or 0 for name, value in read_fields(path).items()}


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []
