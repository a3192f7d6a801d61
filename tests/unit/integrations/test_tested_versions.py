"""Tested versions of third-party libraries are defined once, and newer versions are reported."""

from __future__ import annotations

import re
import sys
import types
import warnings

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

import penstock
from penstock.integrations import tested_versions as libraries
from penstock.integrations.tested_versions import LIBRARIES, Library, untested_here
from support.paths import REPO

pytestmark = pytest.mark.legacy

TIMM = next(library for library in LIBRARIES if library.name == "timm")


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_told", set())
    for library in LIBRARIES:  # installed versions must not matter
        monkeypatch.delitem(sys.modules, library.name, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, version: object, name: str = "timm") -> None:
    module = types.ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("version", ["0.4.12", "1.0.14", "1.1", "2.0.0rc1"])
def test_a_version_outside_its_range_is_told_once_with_the_line_to_paste(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, version)
    (line,) = untested_here()
    assert line.startswith(f"timm {version} is untested with Penstock")
    assert f'pip install "{TIMM.requirement}"' in line
    assert list(untested_here()) == []


@pytest.mark.parametrize("version", ["1.0.15", "1.0.30+local", "1.0.99.post1", None, 7])
def test_a_version_inside_its_range_or_none_at_all_is_not_told(
    version: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, version)
    assert list(untested_here()) == []


def test_a_library_that_is_not_imported_is_not_looked_at() -> None:
    assert list(untested_here()) == []


def test_one_that_is_imported_later_is_told_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "0.1")
    assert len(list(untested_here())) == 1
    pretend(monkeypatch, "0.1", "accelerate")
    assert [line.split()[0] for line in untested_here()] == ["accelerate"]


def test_under_a_patch_it_is_a_warning_and_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "99.0")
    with penstock.patched() as report, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert [batch.tolist() for batch in TorchDataLoader([1, 2])] == [[1], [2]]  # type: ignore[arg-type]
    assert ["timm 99.0 is untested with Penstock" in str(one.message) for one in caught] == [True]
    assert len(report.notes) == 1
    assert report.changes == []


def test_the_extras_of_the_package_name_the_same_ranges() -> None:
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    extras = dict(re.findall(r'^(\w+) = \["([\w-]+>=[\d.]+,<[\d.]+)"\]$', project, re.MULTILINE))
    assert set(extras.values()) == {library.requirement for library in LIBRARIES}
    short = {"pytorch_lightning": "lightning"}
    assert set(extras) == {short.get(library.name, library.name) for library in LIBRARIES}


def test_what_the_vision_leg_installs_is_within_the_ranges() -> None:
    pins = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (REPO / "constraints/vision.txt").read_text(), re.M)
    )
    for library in LIBRARIES:
        names = (library.package, f"{library.package}-opencv-headless")
        version = next(pins[name] for name in names if name in pins)
        assert library.is_tested(version), library
    assert not Library(name="x", package="x", first="2", below="3").is_tested("3.0")
