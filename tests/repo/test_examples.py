"""The examples in docstrings run and print the documented results."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.order.event_loop import loop_of_thread

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
SOURCE = Path(penstock.__file__).parent


def module_names() -> Iterator[str]:
    yield "penstock"
    for info in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not info.name.endswith("__main__"):
            yield info.name


def source_of(name: str) -> str:
    path = SOURCE.parent / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.read_text(encoding="utf-8")


WITH_EXAMPLES = [name for name in module_names() if ">>>" in source_of(name)]


@pytest.fixture(scope="module", autouse=True)
def event_loop_of_this_thread() -> None:
    """Create it before the first test, because it is kept."""
    loop_of_thread()


def run_examples(module: types.ModuleType) -> doctest.TestResults:
    return doctest.testmod(module, optionflags=FLAGS, verbose=False)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_module_run(name: str) -> None:
    results = run_examples(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_there_are_modules_with_examples() -> None:
    assert "penstock.loader" in WITH_EXAMPLES
    assert len(WITH_EXAMPLES) >= 5


def test_an_example_that_is_wrong_would_be_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert run_examples(module).failed == 1
    assert "Expected" in capsys.readouterr().out
