"""The PCIe link of a GPU: read from sysfs, else from nvidia-smi, else unknown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.machine.pcie import PcieLink, pcie_link

BUS = "0000:3B:00.0"


def files(root: Path, **contents: str) -> Path:
    folder = root / BUS.lower()
    folder.mkdir(parents=True)
    for name, text in contents.items():
        (folder / name).write_text(text + "\n")
    return root


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_the_systems_files_tell_it(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        current_link_speed="2.5 GT/s PCIe",
        current_link_width="8",
        max_link_speed="32.0 GT/s PCIe",
        max_link_width="16",
    )
    link = pcie_link(BUS, root)
    assert link == PcieLink(generation=1, width=8, max_generation=5, max_width=16)
    assert str(link) == (
        "PCIe 5 x8, up to 31.5 GB/s (currently PCIe 1 to save power); the card supports x16"
    )


@pytest.mark.parametrize("speed", ["Unknown", "", "99 GT/s PCIe", "\udcff"])
def test_files_that_say_nothing_are_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: str
) -> None:
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / BUS.lower()
    folder.mkdir()
    for name in ("current_link_speed", "max_link_speed"):
        (folder / name).write_bytes(speed.encode("utf-8", "surrogateescape"))
    (folder / "current_link_width").write_text("255")
    assert pcie_link(BUS, tmp_path) is None


def test_where_the_files_are_not_to_be_seen_the_tool_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, monkeypatch, f'[ "$1" = "--id={BUS}" ] && echo "4, 16, 5, 16"')
    link = pcie_link(BUS, tmp_path)
    assert link == PcieLink(generation=4, width=16, max_generation=5, max_width=16)


@pytest.mark.parametrize(
    "body", ["exit 9", "echo No devices were found", "echo [N/A], [N/A], [N/A], [N/A]", "echo"]
)
def test_a_tool_that_knows_nothing_leaves_it_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    tool(tmp_path, monkeypatch, body)
    assert pcie_link(BUS, tmp_path) is None


def test_what_is_not_known_is_not_made_up() -> None:
    assert PcieLink().bytes_per_s is None
    assert str(PcieLink()) == "unknown"
    assert str(PcieLink(generation=3, width=16)) == "PCIe 3 x16, up to 15.8 GB/s"
