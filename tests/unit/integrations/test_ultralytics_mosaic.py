"""Mosaic's buffer is found anywhere in the transforms, with and without Ultralytics."""

from __future__ import annotations

import types
from typing import Any

import pytest

from penstock.integrations.ultralytics import settle_mosaic

AUGMENT = "ultralytics.data.augment"


class Mosaic:
    def __init__(self, buffer_enabled: bool = True) -> None:
        self.buffer_enabled = buffer_enabled
        self.pre_transform = None


class Box:
    """A container of transforms, such as a Compose, a MixUp or a dataset."""

    def __init__(self, transforms: Any = None, pre_transform: Any = None) -> None:
        self.transforms = transforms
        self.pre_transform = pre_transform


@pytest.fixture(autouse=True)
def _ultralytics(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(AUGMENT)
    module.Mosaic = Mosaic  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, AUGMENT, module)


def test_every_buffer_is_switched_off_and_told_once() -> None:
    deep, beside = Mosaic(), Mosaic()
    dataset = Box(Box([Box([Box(), deep]), Box(None, pre_transform=Box([beside]))]))
    assert "Mosaic" in str(settle_mosaic(dataset))
    assert (deep.buffer_enabled, beside.buffer_enabled) == (False, False)
    assert settle_mosaic(dataset) is None


@pytest.mark.parametrize(
    "dataset", [object(), [1, 2], Box(), Box(Box([])), Box(lambda x: x), Box(Box([Mosaic(False)]))]
)
def test_datasets_without_a_buffer_are_left_alone(dataset: Any) -> None:
    assert settle_mosaic(dataset) is None


def test_without_ultralytics_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, AUGMENT)
    mosaic = Mosaic()
    assert settle_mosaic(Box(Box([mosaic]))) is None
    assert mosaic.buffer_enabled
