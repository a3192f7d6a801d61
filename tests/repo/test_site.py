"""The site builds, and its reference covers the names in the code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from support.paths import REPO

VARIABLE = re.compile(r"\bPENSTOCK_[A-Z_]*[A-Z]\b")
CONSTANTS = {"PENSTOCK_DATA"}
"""A placeholder in a page, not a variable."""


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hook", REPO / "tools" / "site" / "hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None and "CI" not in os.environ:
        pytest.skip("the site is not built: pip install -r requirements/docs.txt")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=REPO,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "penstock.DataLoader" in (tmp_path / "site" / "reference" / "api.html").read_text()


def test_the_reference_names_every_public_name_and_every_command(hook: ModuleType) -> None:
    pages = hook.made_pages()
    for name in penstock.__all__:
        if name not in ("__version__", "conv", "errors", "legacy"):
            assert f"### `penstock.{name}`" in pages["reference/api.md"], name
    assert "### `penstock.errors.WorkerDied`" in pages["reference/api.md"]
    assert "| `max_restarts` | `100` |" in pages["reference/api.md"]
    commands = ("demo", "doctor", "verify", "pack", "bench", "run", "trace show", "trace compare")
    for command in commands:
        assert f"## penstock {command}\n" in pages["reference/cli.md"], command
    assert "`--trace FILE`" in pages["reference/cli.md"]


def test_links_out_of_the_documents_lead_to_the_page_made_of_that_file(hook: ModuleType) -> None:
    text = "[a](../benchmarks/README.md#x) [b](../src/a.py) [c](faults.md)\n```\n[d](../b)\n```\n"
    turned = hook.turn_links(text, "docs/index.md", "index.md")
    assert turned == "[a](benchmarks.md#x) b [c](faults.md)\n```\n[d](../b)\n```\n"
    up = hook.turn_links("[e](../docs/seeds.md#s)", "benchmarks/README.md", "benchmarks.md")
    assert up == "[e](seeds.md#s)"


def variables_in(folder: Path, pattern: str) -> set[str]:
    found: set[str] = set()
    for path in folder.rglob(pattern):
        found |= set(VARIABLE.findall(path.read_text(encoding="utf-8")))
    return found - CONSTANTS


def test_the_page_has_every_variable_of_the_code_and_no_other() -> None:
    page = (REPO / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(PENSTOCK_\w+)` \|", page, flags=re.MULTILINE))
    assert listed == variables_in(REPO / "src", "*.py")


def test_a_variable_that_nobody_wrote_down_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('os.environ["PENSTOCK_NEW"]  # and "__PENSTOCK_DATA__"')
    assert variables_in(tmp_path, "*.py") == {"PENSTOCK_NEW"}
