"""Imports run without garbage collections, and the user's setting returns afterwards."""

from __future__ import annotations

import gc

import pytest

from penstock.importing import importing

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("is_collecting", [True, False])
def test_the_setting_returns_after_an_import_that_fails(
    is_collecting: bool, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(gc.enable)
    (gc.enable if is_collecting else gc.disable)()
    seen = []

    def fail() -> None:
        with importing():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert seen == [False]
    assert gc.isenabled() is is_collecting
