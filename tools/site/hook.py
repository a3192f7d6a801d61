"""MkDocs hook: adds generated pages, and adapts links that leave docs/.

    docs/*.md                      unchanged
    files in the root, examples/   added as pages (BROUGHT)
    reference.py                   reference/api.md and reference/cli.md, generated from the code

On GitHub, `../benchmarks/README.md` is a file. In the site it is a different page. Links that leave
docs/ point to the page of that file, or become plain text if there is none.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools" / "site"))
sys.path.insert(0, str(REPO / "src"))

import reference  # noqa: E402

BROUGHT = {
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files outside docs/ that become pages of the site."""
MADE = ("reference/api.md", "reference/cli.md", "examples.md")
"""Generated pages without a source file."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)


def site_page_of(path: str) -> str | None:
    """Return the page of the site for a file of the repository, or None."""
    if path in ("README.md", "docs"):
        return "index.md"
    if path.startswith("examples"):
        return "examples.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return BROUGHT.get(path)


def turn_links(text: str, origin: str, page: str) -> str:
    """Adapt the links of a page, whose source is the file ``origin``, to the site."""

    def turned(match: re.Match[str]) -> str:
        words, target = match.group(1), match.group(2)
        if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
            return match.group(0)
        path, mark, part = target.partition("#")
        led = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        to = site_page_of(led)
        if to is None:
            return words
        back = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"[{words}]({back}{mark}{part})"

    pieces = _FENCED.split(text)  # every second part is code
    return "".join(
        piece if number % 2 else _LINK.sub(turned, piece) for number, piece in enumerate(pieces)
    )


def examples_page() -> str:
    out = ["# Examples\n", "Complete scripts to start from. The tests run all of them.\n"]
    for path in sorted((REPO / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        told = ast.get_docstring(ast.parse(source)) or path.stem
        out.append(
            f"## {path.stem}\n\n{told.splitlines()[0]}\n\n```python\n{source.strip()}\n```\n"
        )
    for path in sorted((REPO / "examples").glob("*.ipynb")):
        out.append(f"## {path.stem}, a notebook\n")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            is_code = cell["cell_type"] == "code"
            text = f"```python\n{source}\n```" if is_code else re.sub(r"^#", "##", source)
            out.append(text + "\n")
    return "\n".join(out)


def made_pages() -> dict[str, str]:
    pages = {
        "reference/api.md": reference.api_page(),
        "reference/cli.md": reference.command_page(),
        "examples.md": examples_page(),
    }
    assert set(pages) == set(MADE)
    for origin, page in BROUGHT.items():
        path = REPO / origin
        if path.exists():
            pages[page] = turn_links(path.read_text(encoding="utf-8"), origin, page)
    return pages


def spread(entry: Any) -> list[Any]:
    """Expand an entry of the navigation. A pattern with a star becomes the matching pages."""
    if isinstance(entry, dict):
        return [{title: spread_all(inside) for title, inside in entry.items()}]
    if "*" in entry:
        pages = sorted(path.relative_to(REPO / "docs") for path in (REPO / "docs").glob(entry))
        return [page.as_posix() for page in pages if page.name != "README.md"]
    return [entry]


def spread_all(entries: Any) -> Any:
    if isinstance(entries, str):
        return entries
    return [page for entry in entries for page in spread(entry)]


# Called by MkDocs


def on_config(config: Any) -> Any:
    config["nav"] = spread_all(config["nav"])
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, content in made_pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    if page.file.generated_by is not None or not os.path.exists(REPO / "docs" / uri):
        return markdown
    return turn_links(markdown, f"docs/{uri}", uri)
