"""The Python blocks of each document run, top to bottom, as one script.

The examples that need only torch and the cells of the notebook run too. Blocks with a title and
commands are covered by test_commands.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import scripts
from support.paths import REPO

TIMEOUT_S = 600

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


EXAMPLES = {
    "text_ragged.py": "loss",
    "time_series.py": "batches left after resuming: 8",
    "custom_stream.py": "every line exactly once, also after resuming: True",
    "first_steps.ipynb": "127 of 128 samples",
    "readme_picture.py": "run.svg",
}
"""Files in examples/ (the last one in tools/site/), with a line that each prints."""


def source_of(path: Path) -> str:
    """Return the code of a file: a script, the cells of a notebook, or the blocks of a document."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return "\n\n".join("".join(cell["source"]) for cell in cells)
    return text if path.suffix == ".py" else script_of(text)


READER = """
import os, sys, traceback, types

def run(path):
    sys.argv, module = [path], types.ModuleType("__main__")
    sys.modules["__main__"], module.__file__ = module, path
    os.chdir(os.path.dirname(path))
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), vars(module))

for path in sys.argv[1:]:
    with open(path + ".said", "w") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    try:
        run(path)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    with open(path + ".status", "w") as file:
        file.write(str(status))
"""
"""Runs scripts in sequence, each as a main module in its own folder.

Torch is imported once for all scripts and for the process that starts their workers.
"""


@dataclass(frozen=True)
class Outcome:
    status: str
    said: str


def run_scripts(texts: Sequence[str], folders: Sequence[Path]) -> list[Outcome]:
    """Run the scripts of documents as a reader would: as files, each in its own folder."""
    paths = [folder / "script.py" for folder in folders]
    for path, script in zip(paths, texts, strict=True):
        path.write_text(script, encoding="utf-8")
    reader = subprocess.run(
        [sys.executable, "-W", "default", "-c", READER, *map(str, paths)],
        cwd=folders[0],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    outcomes = []
    for path in paths:
        said, status = (path.with_name(f"script.py.{kind}") for kind in ("said", "status"))
        text = said.read_text("utf-8") if said.exists() else reader.stderr
        outcomes.append(Outcome(status.read_text() if status.exists() else "none", text))
    return outcomes


DOCUMENTS_WITH_CODE = [path for path in documents() if BLOCK.search(path.read_text("utf-8"))]
FOLDERS = {"readme_picture.py": REPO / "tools" / "site"}
WITH_CODE = [
    *DOCUMENTS_WITH_CODE,
    *(FOLDERS.get(name, REPO / "examples") / name for name in EXAMPLES),
]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Any]:
    """Run the scripts of the selected documents (for example with -k) to completion."""
    cases = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {case.params.get("path") for case in cases if case is not None}

    def run(part: int) -> dict[Path, Outcome]:
        paths = [path for path in WITH_CODE if path in wanted][part::2]
        texts = [source_of(path) for path in paths]
        folders = [scripts.make_folder(tmp_path_factory, "document") for _ in paths]
        return dict(zip(paths, run_scripts(texts, folders) if paths else [], strict=True))

    parts = scripts.run_all(run, [0, 1])
    return {**scripts.told(parts[0]), **scripts.told(parts[1])}


@pytest.mark.timeout(900)  # the scripts share one setup
@pytest.mark.parametrize(
    "path", DOCUMENTS_WITH_CODE, ids=lambda path: path.relative_to(REPO).as_posix()
)
def test_the_python_blocks_of_a_document_run(path: Path, results: dict[Path, Any]) -> None:
    result = results[path]
    print(result.said)  # warnings are printed and are not errors
    assert result.status == "0", result.said


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", WITH_CODE[len(DOCUMENTS_WITH_CODE) :], ids=lambda path: path.name)
def test_an_example_runs_and_says_what_it_should(path: Path, results: dict[Path, Any]) -> None:
    result = results[path]
    assert result.status == "0", result.said
    assert EXAMPLES[path.name] in result.said


def test_the_readme_has_code_that_runs() -> None:
    assert REPO / "README.md" in DOCUMENTS_WITH_CODE


def test_only_python_blocks_are_taken_and_lines_keep_their_numbers() -> None:
    text = "a\n\n```python\nx = 1\n```\n\n```text\nnot code\n```\n\n```python\ny = x\n```\n"
    assert script_of(text).splitlines() == ["", "", "", "x = 1", *[""] * 7, "y = x"]


def test_a_block_that_fails_would_be_noticed_and_keeps_no_other_from_running(
    tmp_path: Path,
) -> None:
    failing = script_of("```python\nx = 1\n```\n```python\nassert x == 2\n```\n")
    texts = [failing, "print('runs')", "raise SystemExit", "import os; os._exit(0)"]
    folders = [tmp_path / str(number) for number in range(len(texts))]
    for folder in folders:
        folder.mkdir()
    first, second, third, fourth = run_scripts(texts, folders)
    assert first.status == "1"
    assert "line 5" in first.said
    assert second == Outcome("0", "runs\n")
    assert (third.status, fourth.status) == ("1", "none")
