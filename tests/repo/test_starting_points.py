"""Every example is run by a test, and the notebook is clean.

test_documentation.py runs the examples that need only torch. tests/compat runs the others.
"""

from __future__ import annotations

import json
import re
from typing import Any

from support.paths import REPO

EXAMPLES = REPO / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def test_the_notebook_is_clean() -> None:
    """The notebook has no outputs, no execution counts and no details of the author's machine."""
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not re.search(r"/(home|root|tmp|Users)/", NOTEBOOK.read_text(encoding="utf-8"))
    assert len({cell["id"] for cell in cells()}) == len(cells())


def test_every_example_is_run_by_some_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (REPO / "tests").rglob("*.py"))
    stems = [path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(stems) > 10
    assert [stem for stem in stems if f'"{stem}' not in tests] == []
