"""The tests mirror the package: each module has a test file, or names one in its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.paths import REPO, SOURCE, TESTS

KINDS = ("unit", "property", "integration", "faults", "compat", "gpu")
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")


def files_that_test(module: Path, tests: Path = TESTS) -> list[Path]:
    """Return the test files that mirror ``module`` or that its docstring names."""
    package = module.parent.relative_to(SOURCE)
    mirrored = [tests / kind / package / f"test_{module.stem}.py" for kind in KINDS]
    named = re.findall(
        r"tests/[\w/]+\.py", ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    )
    return [path for path in (*mirrored, *(REPO / name for name in named)) if path.exists()]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_module_has_a_test_file(module: Path) -> None:
    assert files_that_test(module)


def test_control_a_module_without_a_test_file_is_noticed(tmp_path: Path) -> None:
    assert files_that_test(SOURCE / "errors.py")
    assert not files_that_test(SOURCE / "errors.py", tests=tmp_path)


@pytest.mark.parametrize("kind", ["unit", "property", "integration", "faults"])
def test_test_folders_are_packages_of_the_source(kind: str) -> None:
    for path in (TESTS / kind).rglob("test_*.py"):
        assert (SOURCE / path.parent.relative_to(TESTS / kind)).is_dir(), path


def test_names_of_test_files_are_unique() -> None:
    """pytest imports test files by name."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_helpers_are_in_support() -> None:
    outside = {path.name for path in TESTS.glob("*.py")}
    assert outside == {"conftest.py"}
