"""AMD GPUs, read from files in the kernel's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.machine.amd import architecture_of, cards_by_kfd

pytestmark = pytest.mark.legacy

GIB = 1 << 30
CPU = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\n"
# Selected lines from the file of an RX 5600 XT. The numbers are decimal.
NAVI10 = (
    "cpu_cores_count 0\nsimd_count 72\nmem_banks_count 1\ngfx_target_version 100100\n"
    "vendor_id 4098\ndevice_id 29471\nlocation_id 2560\ndrm_render_minor 128\nnum_xcc 1\n"
)
BANK = f"heap_type 1\nsize_in_bytes {6 * GIB}\nflags 0\nwidth 192\nmem_clk_max 875\n"
NAMES = (
    "# List of AMDGPU IDs\n#\n1.0.0\n"
    "731F,\tC0,\tAMD Radeon RX 5700 XT 50th Anniversary\n731F,\tCA,\tAMD Radeon RX 5600 XT\n"
    "744C,\tC8,\tAMD Radeon RX 7900 XTX\n"
)


class Kernel:
    """A tree of the files that are read."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def gpus(self) -> list[Any]:
        root = self.root
        return cards_by_kfd(root / "nodes", root / "drm", root / "ids", root / "version")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    kernel.write("nodes/0/properties", CPU)
    kernel.write("nodes/1/properties", NAVI10)
    kernel.write("nodes/1/name", "navi10\n")
    kernel.write("nodes/1/mem_banks/0/properties", BANK)
    return kernel


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (80003, "gfx803"),
        (90006, "gfx906"),
        (90008, "gfx908"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100100, "gfx1010"),
        (100102, "gfx1012"),
        (100300, "gfx1030"),
        (100301, "gfx1031"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_the_kernel_s_number_becomes_the_compiler_s_name(version: int, name: str) -> None:
    assert architecture_of(version) == name


def test_a_card_is_described_and_a_processor_is_not_a_card(kernel: Kernel) -> None:
    (gpu,) = kernel.gpus()
    assert (gpu.name, gpu.vendor, gpu.architecture) == ("navi10", "amd", "gfx1010")
    assert (gpu.memory_bytes, gpu.driver) == (6 * GIB, None)


def test_the_name_on_the_box_is_found_by_chip_and_revision(kernel: Kernel) -> None:
    kernel.write("ids", NAMES)
    assert kernel.gpus()[0].name == "navi10"  # 731F is several cards, so the revision is needed
    kernel.write("drm/renderD128/device/revision", "0xca\n")
    assert kernel.gpus()[0].name == "AMD Radeon RX 5600 XT"
    kernel.write("drm/renderD128/device/product_name", "Radeon of the house\n")
    assert kernel.gpus()[0].name == "Radeon of the house"


def test_memory_comes_from_the_graphics_driver_where_there_are_no_banks(kernel: Kernel) -> None:
    kernel.write("nodes/1/mem_banks/0/properties", BANK.replace("heap_type 1", "heap_type 0"))
    assert kernel.gpus()[0].memory_bytes is None
    kernel.write("drm/renderD128/device/mem_info_vram_total", f"{6 * GIB}\n")
    assert kernel.gpus()[0].memory_bytes == 6 * GIB


def test_nodes_come_in_the_order_of_their_numbers(kernel: Kernel) -> None:
    for node in (10, 2):
        kernel.write(f"nodes/{node}/properties", NAVI10)
        kernel.write(f"nodes/{node}/name", f"gpu{node}")
    assert [gpu.name for gpu in kernel.gpus()] == ["navi10", "gpu2", "gpu10"]


def test_the_driver_s_version_is_told_where_it_has_one(kernel: Kernel) -> None:
    kernel.write("version", "6.3.6\n")
    assert kernel.gpus()[0].driver == "6.3.6"


@pytest.mark.parametrize(
    "text", ["", "rubbish", "gfx_target_version\n", "gfx_target_version -1\n", "\x00\xff\n"]
)
def test_an_odd_file_is_no_card(kernel: Kernel, text: str) -> None:
    kernel.write("nodes/1/properties", text)
    assert kernel.gpus() == []


def test_a_node_that_may_not_be_read_is_no_card(kernel: Kernel) -> None:
    properties = kernel.root / "nodes/1/properties"
    properties.unlink()
    properties.mkdir()  # reading it raises OSError
    assert kernel.gpus() == []


def test_without_the_driver_there_is_no_card(tmp_path: Path) -> None:
    assert Kernel(tmp_path / "missing").gpus() == []
