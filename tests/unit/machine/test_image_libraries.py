"""Available JPEG decoders are found without importing them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.machine import image_libraries as decoders
from penstock.machine.image_libraries import KNOWN, find_decoders, has_turbo

pytestmark = pytest.mark.legacy


def put(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text("raise AssertionError('imported')\n")


def test_decoders_are_found_in_the_order_of_the_list_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in KNOWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert find_decoders() == ()
    put(tmp_path, "cv2")
    put(tmp_path, "simplejpeg")
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert find_decoders() == ("simplejpeg", "cv2")
    assert "cv2" not in sys.modules


def test_a_blocked_or_strange_module_is_not_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    strange = ModuleType("simplejpeg")
    strange.__spec__ = None
    monkeypatch.setitem(sys.modules, "simplejpeg", strange)
    assert not {"cv2", "simplejpeg"} & set(find_decoders())


def put_pillow(monkeypatch: pytest.MonkeyPatch, check_feature: Any) -> None:
    features: Any = ModuleType("PIL.features")
    features.check_feature = check_feature
    monkeypatch.setitem(sys.modules, "PIL", ModuleType("PIL"))
    monkeypatch.setitem(sys.modules, "PIL.features", features)
    monkeypatch.setattr(decoders, "_is_importable", lambda name: True)


@pytest.mark.parametrize("answer", [True, False, None])
def test_pillow_says_whether_it_has_turbo(
    monkeypatch: pytest.MonkeyPatch, answer: bool | None
) -> None:
    put_pillow(monkeypatch, lambda name: answer)
    assert has_turbo() is answer


def test_a_broken_pillow_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> bool:
        raise RuntimeError("built against another libjpeg")

    put_pillow(monkeypatch, fail)
    assert has_turbo() is None
    monkeypatch.setitem(sys.modules, "PIL.features", None)  # importing it fails
    assert has_turbo() is None


def test_without_pillow_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_is_importable", lambda name: False)
    assert has_turbo() is None
