"""Errors have four parts and data for programs, and can be pickled."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from penstock import errors

pytestmark = pytest.mark.legacy

ALSO = {
    errors.WorkerDied: (RuntimeError,),
    errors.WorkerTimeout: (RuntimeError,),
    errors.StartFailed: (RuntimeError,),
    errors.SampleTimeout: (RuntimeError,),
    errors.Stuck: (RuntimeError,),
    errors.TooManyBad: (RuntimeError,),
    errors.NoSubstitute: (RuntimeError,),
    errors.SharedDraw: (RuntimeError,),
    errors.CannotTravel: (TypeError, pickle.PicklingError),
    errors.MismatchedSamples: (RuntimeError,),
    errors.BadArgument: (ValueError,),
    errors.BadTarget: (ValueError,),
    errors.BadTrace: (ValueError,),
    errors.BadState: (ValueError,),
    errors.NoSuchDevice: (RuntimeError,),
    errors.DeviceFailed: (RuntimeError,),
    errors.BadStore: (ValueError,),
    errors.Damaged: (OSError,),
    errors.CannotPack: (ValueError,),
    errors.CannotWrite: (OSError,),
    errors.AlreadyThere: (FileExistsError,),
    errors.StorageFailed: (OSError,),
    errors.BadImage: (ValueError,),
    errors.MissingExtra: (ImportError,),
}


def test_a_missing_extra_is_installed_by_the_requirements_of_the_project() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for extra, requirements in errors.MissingExtra.requirements.items():
        listed = ", ".join(f'"{one}"' for one in requirements)
        assert f"\n{extra} = [{listed}]\n" in project
        error = errors.MissingExtra.named(extra, "it is not installed")
        assert error.remedy == f"pip install {listed.replace(',', '')}"
        assert "penstock" not in error.remedy  # it is not on PyPI
    assert '\nimages = ["pillow"]\n' not in project  # control


def all_errors() -> set[type[errors.PenstockError]]:
    return {
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.PenstockError)
        and value is not errors.PenstockError
    }


def test_every_error_is_known_to_these_tests() -> None:
    assert all_errors() == set(ALSO)


def test_the_tree_in_the_module_docstring_lists_every_error_with_its_code() -> None:
    listed = re.findall(r"^ +\+-- (\w+) +\[(\w+)\]", errors.__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted((kind.__name__, kind.code) for kind in all_errors())


@pytest.mark.parametrize("kind", ALSO, ids=lambda kind: kind.__name__)
def test_the_tree_names_the_builtin_base_of_each_error(kind: Any) -> None:
    (line,) = re.findall(rf"^ +\+-- {kind.__name__} +\[.*", errors.__doc__ or "", re.MULTILINE)
    if kind is errors.DeviceFailed:
        assert "also the type torch raised:" in line
        return
    for other in ALSO[kind]:
        assert re.search(rf" (also|and) (\w+\.)?{other.__name__}\b", line)


@pytest.mark.parametrize("kind", ALSO, ids=lambda kind: kind.__name__)
def test_each_is_also_what_torch_or_python_raises_there(kind: Any) -> None:
    error = kind("what")
    assert isinstance(error, errors.PenstockError)
    for other in ALSO[kind]:
        assert isinstance(error, other)


def test_the_four_parts_come_in_order() -> None:
    error = errors.WorkerDied(
        "worker 2 died", where="data.py:57", likely="memory", remedy="num_workers=2"
    )
    assert str(error).splitlines() == [
        "[W01] worker 2 died",
        "  In: data.py:57",
        "  Likely: memory",
        "  Try: num_workers=2",
    ]


def test_parts_that_are_not_known_are_left_out() -> None:
    assert str(errors.BadArgument("no")).splitlines() == ["[A01] no"]


def test_facts_are_attributes() -> None:
    error: Any = errors.WorkerDied("x", exit_code=-9, sample_index=4)
    assert (error.exit_code, error.sample_index, error.what) == (-9, 4, "x")
    assert not hasattr(error, "worker")


@pytest.mark.parametrize("kind", ALSO, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_an_error_survives_a_pickle_with_all_it_has(kind: Any, through: Any) -> None:
    error = kind("what", where="w", likely="l", remedy="r", sample_index=4)
    again = through(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.sample_index == 4
