"""The report on fastai loaders, which the patch does not cover."""

from __future__ import annotations

import sys
import types

import pytest

from penstock.integrations.fastai import explain_unreached


def test_a_script_with_fastai_is_told_that_its_own_loader_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fastai.data.load", types.ModuleType("fastai.data.load"))
    (line,) = explain_unreached()
    assert "loads without Penstock" in line


def test_one_without_it_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fastai.data.load", raising=False)
    assert list(explain_unreached()) == []
