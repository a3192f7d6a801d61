"""Lists the modules of the package with the first line of their docstrings.

python tools/list_modules.py            print the listing
python tools/list_modules.py --write    write it to docs/architecture.md
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SOURCE = REPO / "src" / "penstock"
PAGE = REPO / "docs" / "architecture.md"
BEGIN, END = "<!-- modules -->\n", "<!-- end of modules -->"


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def listing(folder: Path, depth: int = 0) -> Iterator[str]:
    """Return one line for each module of a package, followed by its subpackages."""
    indent = "  " * depth
    for path in sorted(folder.glob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            yield f"{indent}{path.name:<{26 - 2 * depth}} {first_line(path)}"
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        name = f"{inner.name}/"
        yield f"{indent}{name:<{26 - 2 * depth}} {first_line(inner / '__init__.py')}"
        yield from listing(inner, depth + 1)


def main() -> None:
    text = "```text\nsrc/penstock/\n" + "\n".join(listing(SOURCE, 1)) + "\n```\n"
    if "--write" not in sys.argv:
        print(text, end="")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
