"""The settings under which a loader is run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from penstock.verify.settings import list_settings, reason_not_to_spawn

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("workers", [[2, 4], [0, 1, 2, 5], [3], [1]])
def test_the_first_setting_is_the_reference_and_others_change_one_thing(workers: list[int]) -> None:
    settings = list_settings(workers, takes_workers=True)
    names = [setting.name for setting in settings]
    assert names[1] == f"{names[0]}, again"
    assert settings[0].arguments == {"num_workers": workers[0]}
    assert len(set(names)) == len(names)
    for setting in settings:
        assert setting.name.startswith(str(setting.arguments["num_workers"]))


def test_a_loader_that_is_made_as_it_is_is_run_as_it_is() -> None:
    settings = list_settings([0, 2], takes_workers=False)
    assert settings
    assert all(setting.arguments == {} for setting in settings)


def test_a_script_without_a_guard_is_not_spawned_by_another_loader(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/train.py"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=path))
    assert reason_not_to_spawn([]) == ""  # there is nothing to run again
    for text, is_refused in (("train()", True), ("if __name__ == '__main__': train()", False)):
        with open(path, "w", encoding="utf-8") as script:
            script.write(text)
        assert bool(reason_not_to_spawn([])) == is_refused
