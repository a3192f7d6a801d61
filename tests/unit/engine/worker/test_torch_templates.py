"""A module that torch generates is run from memory, and no file is written."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.worker import torch_templates
from penstock.engine.worker.torch_templates import _Finder, keep_generated_modules_in_memory

pytestmark = pytest.mark.legacy

WRITER = """
import importlib, os, sys, tempfile
_TEMP_DIR = tempfile.TemporaryDirectory()
sys.path.append(_TEMP_DIR.name)
def _write(out_path, text):
    with open(out_path, "w") as file:
        file.write(text)
def make(name, text):
    _write(os.path.join(_TEMP_DIR.name, name + ".py"), text)
    importlib.invalidate_caches()
    return importlib.import_module(name)
"""
SOURCE = "def answer():\n    return 42\n"


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a module that writes other modules like torch's generator."""
    name = "writing_module"
    (tmp_path / "imports").mkdir()
    (tmp_path / "folders").mkdir()
    (tmp_path / "imports" / f"{name}.py").write_text(WRITER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "imports")])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(torch_templates, "_NAME", name)
    yield name
    for made in (name, "generated_module"):
        sys.modules.pop(made, None)


def test_a_generated_module_is_there_and_no_folder_is(writer: str, tmp_path: Path) -> None:
    keep_generated_modules_in_memory()
    before = list(sys.path)
    make = __import__(writer).make
    made = make("generated_module", SOURCE)
    assert made.answer() == 42
    assert "return 42" in inspect.getsource(made.answer)
    assert list((tmp_path / "folders").iterdir()) == []
    assert sys.path == before
    assert tempfile.TemporaryDirectory.__module__ == "tempfile"


def test_without_it_there_is_a_folder(writer: str, tmp_path: Path) -> None:
    module = __import__(writer)
    assert module.make("generated_module", SOURCE).answer() == 42
    assert len(list((tmp_path / "folders").iterdir())) == 1
    module._TEMP_DIR.cleanup()


def test_a_module_that_writes_in_another_way_is_left_as_it_is(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "imports" / f"{writer}.py"
    path.write_text(WRITER.replace("_write", "_save"))
    keep_generated_modules_in_memory()
    module = __import__(writer)
    assert module.make("generated_module", SOURCE).answer() == 42
    assert len(list((tmp_path / "folders").iterdir())) == 1
    module._TEMP_DIR.cleanup()


def test_it_is_installed_once_and_finds_nothing_else(writer: str) -> None:
    keep_generated_modules_in_memory()
    keep_generated_modules_in_memory()
    (finder,) = (one for one in sys.meta_path if isinstance(one, _Finder))
    assert finder.find_spec("json", None) is None
