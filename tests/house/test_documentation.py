"""Does the code in the documents run? Each file's Python blocks, top to bottom, as one script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scripting

REPO = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120

BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """List the documents of the project that a reader may copy code from."""
    return [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]


def script_of(text: str) -> str:
    """Join the Python blocks of a document. Line numbers stay those of the document."""
    script = ""
    for match in BLOCK.finditer(text):
        first_line = text.count("\n", 0, match.start(1))
        script += "\n" * (first_line - script.count("\n")) + match.group(1)
    return script


def run_script(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a document's script the way a reader would: a file, in a folder of its own."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "default", str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


DOCUMENTS_WITH_CODE = [path for path in documents() if BLOCK.search(path.read_text("utf-8"))]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Any]:
    """The scripts of the documents that were asked for (with -k, say), each run to its end."""
    cases = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {case.params.get("path") for case in cases if case is not None}

    def run(path: Path) -> Any:
        return run_script(script_of(path.read_text("utf-8")), tmp_path_factory.mktemp("document"))

    return scripting.run_all(run, [path for path in DOCUMENTS_WITH_CODE if path in wanted])


@pytest.mark.timeout(300)  # the scripts share one set-up
@pytest.mark.parametrize(
    "path", DOCUMENTS_WITH_CODE, ids=lambda path: path.relative_to(REPO).as_posix()
)
def test_the_python_blocks_of_a_document_run(path: Path, results: dict[Path, Any]) -> None:
    result = scripting.told(results[path])
    print(result.stdout, result.stderr, sep="\n")  # warnings are shown, not errors
    assert result.returncode == 0, result.stderr


def test_the_readme_has_code_that_runs() -> None:
    assert REPO / "README.md" in DOCUMENTS_WITH_CODE


def test_only_python_blocks_are_taken_and_lines_keep_their_numbers() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n```text\nnot code\n```\n\n```python\ny = x\n```\n"
    assert script_of(text).splitlines() == ["", "", "", "x = 1", *[""] * 7, "y = x"]


def test_a_block_that_fails_would_be_noticed(tmp_path: Path) -> None:
    result = run_script(
        script_of("```python\nx = 1\n```\n```python\nassert x == 2\n```\n"), tmp_path
    )
    assert result.returncode != 0
    assert "line 5" in result.stderr
