"""Commands in the documents work as written, together with their files and changes.

Every code block in a document has one of these kinds:

```python               part of the document's script: test_documentation.py
```python title="x.py"  a file that the commands below it use
```diff title="x.py"    a change of that file
```console              commands after "$ ", and lines of their output
```text                 output or a drawing

``<!-- not run: reason -->`` above a block skips it. ``<!-- status: 1 -->`` sets the expected exit
status.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support import scripts, typed_commands
from support.documents import faults_of, type_documents
from support.paths import REPO

KINDS = {"python", "diff", "console", "text"}
COMMAND = re.compile(r"(\$ )?(penstock|python3?|make|pip|git|torchrun|accelerate|export) ")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks for each command")


def documents() -> list[Path]:
    """List the documents that a reader may copy commands from."""
    pages = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
    return [*pages, REPO / "benchmarks" / "README.md"]


def typed_texts() -> dict[str, str]:
    """Return the texts of the documents with commands, by name."""
    texts = {path.relative_to(REPO).as_posix(): path.read_text("utf-8") for path in documents()}
    return {
        name: text
        for name, text in texts.items()
        if not text.startswith(typed_commands.VISION)
        and any(step["kind"] == "console" for step in typed_commands.steps_of(text))
    }


TEXTS = typed_texts()


@pytest.fixture(scope="module")
def typed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    cases = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {case.params.get("name") for case in cases if case is not None}
    names = [name for name in TEXTS if name in wanted]
    folders = [scripts.make_folder(tmp_path_factory, "typed") for _ in names]
    results = type_documents([TEXTS[name] for name in names], folders)
    return dict(zip(names, results, strict=True))


@pytest.mark.timeout(300)  # the documents share one setup
@pytest.mark.parametrize("name", TEXTS)
def test_the_commands_of_a_document_work_as_written(
    name: str, typed: dict[str, list[dict[str, Any]]]
) -> None:
    assert typed[name]
    assert faults_of(typed[name]) == []


@pytest.mark.parametrize("name", ["README.md"])
def test_the_run_that_the_readme_traces_is_long_enough_to_be_judged(
    name: str, typed: dict[str, list[dict[str, Any]]]
) -> None:
    (said,) = (one["said"] for one in typed[name] if "run --trace" in one["command"])
    assert "Too short to judge" not in said
    assert "Bottleneck: " in said
    assert "Try: " in said


def test_a_command_that_fails_or_prints_something_else_would_be_noticed(tmp_path: Path) -> None:
    text = (
        '```python title="a.py"\nimport sys\nprint("one")\nsys.exit(3)\n```\n'
        '```diff title="a.py"\n-print("one")\n+print("two")\n```\n'
        "```console\n$ python a.py\none\n```\n"
        "<!-- status: 3 -->\n```console\n$ python a.py  # as it should\ntwo\n```\n"
        "```console\n$ rm a.py\n```\n"
        "<!-- not run: not here -->\n```console\n$ python b.py\n```\n"
    )
    (results,) = type_documents([text], [tmp_path])
    first, third = faults_of(results)
    assert "status 3: ['one']" in first
    assert "nobody here can type that" in third
    assert len(results) == 3


def test_a_change_can_name_a_line_that_stays() -> None:
    text = "a\nb\nc\n"
    assert typed_commands.changed(text, " b\n+d\n") == "a\nb\nd\nc\n"
    assert typed_commands.changed(text, "-a\n+x\n b\n-c\n+y\n") == "x\nb\ny\n"
    with pytest.raises(ValueError, match="not there"):
        typed_commands.changed(text, " e\n+d\n")


def strange_blocks(text: str) -> list[str]:
    """Return blocks of an unknown kind, and commands in text blocks."""
    found = []
    for match in typed_commands.FENCE.finditer(text):
        kind = match["info"].strip().split(" ")[0] or "text"
        is_left_out = (match["note"] or "").startswith("not run: ")
        if kind not in KINDS:
            found.append(f"a block of {kind!r}")
        elif kind == "text" and not is_left_out:
            found += [line for line in match["body"].splitlines() if COMMAND.match(line)]
        elif kind == "console" and is_left_out and len(match["note"]) < 15:
            found.append(f"no reason: {match['note']}")
    return found


def test_every_block_of_every_document_is_of_a_kind_that_is_run_or_says_why_not() -> None:
    found = {str(path): strange_blocks(path.read_text("utf-8")) for path in documents()}
    assert {path: blocks for path, blocks in found.items() if blocks} == {}


def test_a_strange_block_would_be_noticed() -> None:
    text = "```sh\nls\n```\n```text\npenstock doctor\n```\n```text\n a drawing\n```\n"
    assert strange_blocks(text) == ["a block of 'sh'", "penstock doctor"]


def test_a_change_whose_lines_are_not_there_is_no_change() -> None:
    assert typed_commands.changed("a\nb\nc\n", "-a\n+x\n-c\n+y\n+z\n") == "x\nb\ny\nz\n"
    with pytest.raises(ValueError, match="not there"):
        typed_commands.changed("a\n", "-b\n+c\n")
