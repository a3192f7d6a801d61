"""Changes that loading in this process makes to a dataset are undone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.parent.dataset_changes import DatasetChanges

pytestmark = pytest.mark.legacy


def test_what_was_bound_while_watching_is_taken_back() -> None:
    inner = SimpleNamespace(handle=None, is_open=False)
    outer = SimpleNamespace(parts=[inner], name="x")
    traces = DatasetChanges(outer)
    for handle in (object(), object()):  # the original value counts, not an intermediate one
        with traces.watching():
            inner.handle, inner.is_open, outer.late = handle, True, 1
    traces.undo()
    assert vars(inner) == {"handle": None, "is_open": False}
    assert vars(outer) == {"parts": [inner], "name": "x"}


def test_what_the_user_binds_stays() -> None:
    dataset = SimpleNamespace(epoch=0, handle=None)
    traces = DatasetChanges(dataset)
    dataset.epoch = 1
    with traces.watching():
        dataset.handle = object()
    dataset.epoch = dataset.handle = 2
    traces.undo()
    assert vars(dataset) == {"epoch": 2, "handle": 2}


def test_what_a_failing_sample_bound_is_taken_back_too() -> None:
    dataset = SimpleNamespace(handle=None)
    traces = DatasetChanges(dataset)
    try:
        with traces.watching():
            dataset.handle = object()
            raise KeyError
    except KeyError:
        traces.undo()
    assert dataset.handle is None


def test_objects_that_refuse_to_be_looked_at_are_left_alone() -> None:
    class Closed:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    traces = DatasetChanges([Closed(), 3, "text", {"a": 1}])
    with traces.watching():
        pass
    traces.undo()
