"""Facts that the documents repeat from the code: plan rows, peers, extras, decision records."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import penstock
from support.paths import REPO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOURCE = REPO / "src" / "penstock"
DOCS = REPO / "docs"
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS += ["eleven", "twelve", "thirteen", "fourteen", "fifteen"]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def documents() -> list[Path]:
    return [*sorted(REPO.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


# Plans


def plan_rows(text: str) -> list[list[str]]:
    """Return the row names of each plan that a document prints."""
    printed = re.findall(r"^ *pool +process +\(.*\n(?:^ *\w+ .*\(.*\n)*", text, re.MULTILINE)
    printed += re.findall(r"^ *pool +process \(.*\n(?:^ *\w+ .*\(.*\n)*", text, re.MULTILINE)
    plans = [[line.split()[0] for line in plan.splitlines()] for plan in printed]
    return [plan for number, plan in enumerate(plans) if plan not in plans[:number]]


@pytest.mark.parametrize("page", ["compatibility.md", "doctor.md"])
def test_a_printed_plan_has_the_rows_of_a_real_one(page: str) -> None:
    real = [line.split()[0] for line in str(penstock.plan(range(8), batch_size=4)).splitlines()]
    assert plan_rows(read(DOCS / page)) == [real[: real.index("randomness") + 1]]


def test_a_plan_with_a_missing_row_would_be_noticed() -> None:
    text = "```text\npool          process (rule: x)\nrandomness    sample (rule: y)\n```\n"
    assert plan_rows(text) == [["pool", "randomness"]]


# Peers


def peer_titles() -> list[str]:
    """Return the titles of the other libraries in the benchmark."""
    tree = ast.parse(read(REPO / "benchmarks" / "rivals" / "environments.py"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "id", "") == "Peer"]
    titles = [
        str(ast.literal_eval(keyword.value))
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "title"
    ]
    return [title for title in titles if title != "Penstock"]


def peer_counts(text: str) -> list[str]:
    return re.findall(r"\b(\w+) (?:other )?libraries\b", text.lower().replace("\n", " "))


def test_every_document_has_the_same_number_of_peers() -> None:
    expected = NUMBERS[len(peer_titles())]
    found = {
        path.relative_to(REPO).as_posix(): [
            count for count in peer_counts(read(path)) if count in NUMBERS
        ]
        for path in documents()
    }
    named = ("CHANGELOG.md", "README.md", "docs/index.md")
    assert {name: counts for name, counts in found.items() if counts} == {
        name: [expected] for name in named
    }


def test_the_readme_and_the_page_of_results_name_every_peer() -> None:
    readme, page = read(REPO / "README.md"), read(DOCS / "peers.md")
    for title in peer_titles():
        assert title.removesuffix(" DataLoader") in readme
        assert f"\n| {title} |" in page


def test_a_different_number_of_peers_would_be_noticed() -> None:
    assert peer_counts("work by eleven\nlibraries, or ten other libraries") == ["eleven", "ten"]


# Benchmark figures


def bold_figures(text: str) -> set[str]:
    return set(re.findall(r"\*\*([\d,.]+)(?: \w+)?\*\*", text))


def unclear_figures(page: str) -> set[str]:
    """Return the figures of comparisons whose result is inconclusive."""
    rows = [line for line in page.splitlines() if re.search(r"\| (unclear|too few)", line)]
    return {figure for row in rows for figure in re.findall(r"\| ([\d,.]+) ", row)}


def test_no_figure_is_bold_in_the_readme_if_its_comparison_is_unclear() -> None:
    unclear = unclear_figures(read(DOCS / "peers.md"))
    assert unclear
    assert bold_figures(read(REPO / "README.md")) & unclear == set()


def test_a_bold_figure_of_an_unclear_comparison_would_be_noticed() -> None:
    page = "| x | 1,343 samples/s | 1,065 samples/s (y) | 1.27 | unclear: each side wins |\n"
    assert bold_figures("| 1 | **1,343** |") & unclear_figures(page) == {"1,343"}


# Installation


def test_the_readme_says_how_to_install_with_every_extra() -> None:
    project = tomllib.loads(read(REPO / "pyproject.toml"))["project"]
    part = read(REPO / "README.md").split("## Installation\n")[1].split("\n## ")[0]
    assert "$ pip install .\n" in part
    missing = [name for name in project["optional-dependencies"] if f"`{name}`" not in part]
    assert missing == []
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in part
    (torch,) = [need for need in project["dependencies"] if need.startswith("torch")]
    assert f"PyTorch {torch.removeprefix('torch>=')} or newer" in part
    assert f"penstock-{penstock.__version__}-" in part


def test_the_first_page_of_the_documentation_says_how_to_install() -> None:
    assert "$ pip install ." in read(DOCS / "index.md")


# Decision records


def named_files(text: str) -> list[str]:
    """Return the source files that a document names, relative to the package."""
    return re.findall(r"`((?:\w+/)*\w+\.py)`", text)


def wrong_rows(text: str, source: Path) -> list[str]:
    """Return the private names whose table row names no file that uses them."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or not named_files(cells[1]):
            continue
        files = [source / name for name in named_files(cells[1])]
        code = "".join(read(file) for file in files if file.exists())
        quoted = " ".join(re.findall(r"`([^`]+)`", cells[0]))
        names = re.findall(r"(?<![\w.])_[a-zA-Z]\w+|(?<=\.)_[a-z]\w+\b(?![.\w])", quoted)
        found += [f"{name} in {cells[1]}" for name in names if name.rstrip("_*") not in code]
    return found


def test_decision_records_name_source_files_that_exist() -> None:
    for path in sorted((DOCS / "decisions").glob("*.md")):
        names = [name for name in named_files(read(path)) if "/" in name or name == "loader.py"]
        roots = (SOURCE, REPO)
        gone = [name for name in names if not any((root / name).exists() for root in roots)]
        assert gone == [], path.name


@pytest.mark.parametrize("number", ["0005", "0012"])
def test_files_that_a_decision_record_names_use_the_private_names(number: str) -> None:
    (path,) = (DOCS / "decisions").glob(f"{number}-*.md")
    text = read(path)
    assert text.count(".py` |") > 5
    assert wrong_rows(text, SOURCE) == []


def test_a_wrong_file_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x._used", encoding="utf-8")
    row = "| `torch._C._used`, `_gone` | `a.py` | why |"
    assert wrong_rows(row, tmp_path) == ["_gone in `a.py`"]
