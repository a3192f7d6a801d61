"""Lists AMD's GPUs from the files of the Linux kernel's compute driver (KFD).

Nothing is opened and no ROCm is needed: the files are there whenever the ``amdgpu`` module is. They
name the real architecture, whatever ``HSA_OVERRIDE_GFX_VERSION`` makes the libraries believe.
"""

from __future__ import annotations

from pathlib import Path

from penstock.machine.facts import Gpu
from penstock.machine.kernel_files import parse_count, read_text

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
DRM = Path("/sys/class/drm")
NAMES = Path("/usr/share/libdrm/amdgpu.ids")
DRIVER = Path("/sys/module/amdgpu/version")

_LOCAL_HEAPS = {1, 2}
"""Kinds of memory bank on the card itself: visible to the host, and private."""


def cards_by_kfd(
    nodes: Path = NODES, drm: Path = DRM, names: Path = NAMES, driver: Path = DRIVER
) -> list[Gpu]:
    """The AMD GPUs that can compute here; empty without the driver.

    Example:
        >>> all(gpu.vendor == "amd" for gpu in cards_by_kfd())
        True
    """
    version = read_text(driver)
    found = []
    for node in sorted(_folders(nodes), key=lambda path: (len(path.name), path.name)):
        facts = _properties(node / "properties")
        if not facts.get("gfx_target_version"):
            continue  # a processor's node, or a card this process may not look at
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
    """The compiler's name of an architecture, from the number by which the kernel knows it.

    Two decimal digits each for minor and stepping, which the name writes as one hex digit each.

    Example:
        >>> architecture_of(100100), architecture_of(90010), architecture_of(110501)
        ('gfx1010', 'gfx90a', 'gfx1151')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _name(node: Path, card: Path, facts: dict[str, int], names: Path) -> str:
    """The name on the box, else the chip's code name, else that it is an AMD GPU."""
    boxed = read_text(card / "product_name")  # only some server cards know it
    if not boxed:
        boxed = _marketing_name(facts.get("device_id", 0), read_text(card / "revision"), names)
    return boxed or read_text(node / "name") or "AMD GPU"


def _marketing_name(device_id: int, revision: str, names: Path) -> str:
    """What libdrm's table calls this chip: lines of ``device, revision, name`` in hexadecimal."""
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
    """Memory on the card. An integrated GPU has only the part that the firmware set aside."""
    banks = [_properties(bank / "properties") for bank in _folders(node / "mem_banks")]
    local = [
        bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS
    ]
    return sum(local) or parse_count(read_text(card / "mem_info_vram_total")) or None


def _properties(path: Path) -> dict[str, int]:
    """The numbers in a file of ``name value`` lines; what is no such line is left out."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: parse_count(pair[1]) or 0 for pair in pairs if len(pair) == 2}


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except OSError:
        return []
