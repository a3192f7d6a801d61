"""Generates the reference pages from the signatures and docstrings in the sources.

src/penstock/__init__.py  the public names, and the modules that define them
those modules             signatures and docstrings, converted to Markdown
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock.options

REPO = Path(__file__).resolve().parents[2]
SOURCE = REPO / "src"

Node = ast.FunctionDef | ast.ClassDef

GROUPS = {
    "Loading": ("loader", "integrations.patch", "engine.loading.bad_sample_file"),
    "Order and randomness": ("order", "engine.parent.replay"),
    "The same bits": ("verify",),
    "Sharing": ("engine.memory", "engine.pickling.reopenable"),
    "Packed sets and images": ("packing", "sources", "images"),
    "To the GPU": ("device",),
    "Time": ("trace", "options"),
    "Machine and plan": ("machine", "planning"),
}
"""The packages under each heading."""
TOPICS = {
    "Order, randomness and ranks": ("seed", "randomness", "shard", "rank", "world_size", "padding"),
    "Workers": (
        *("num_workers", "pool", "in_flight", "multiprocessing_context", "persistent_workers"),
    ),
    "Faults": ("on_error", "max_bad", "bad_samples_file", "max_restarts", "sample_timeout_s"),
    "To the GPU": ("device", "device_prefetch", "finish"),
    "Tracing": ("trace",),
}
"""The options of a loader under each topic."""
MODULES = ("conv", "errors", "legacy")
"""Public modules, each with its own section."""
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields|Examples?|Called from|Pairs with):")


@functools.cache
def tree_of(module: str) -> ast.Module:
    path = SOURCE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def homes_of(package: str) -> dict[str, str]:
    """Return each public name of a package, and the module that defines it."""
    tree, found = tree_of(package), {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            found = ast.literal_eval(node.value)
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_HOMES":
            found = ast.literal_eval(node.value) if node.value else found
    if package != "penstock":
        found = {name: f"{package}.{home}" for name, home in found.items()}
    for node in ast.walk(tree):  # imports for type checkers name the defining module
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith(f"{package}.")
        ):
            for alias in node.names:
                if alias.name in found:
                    found[alias.name] = node.module
    return found


def definition_of(name: str, module: str) -> Node | None:
    """Return the definition of a name, following one `from x import name`."""
    for node in tree_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith("penstock"):
                    return definition_of(alias.name, node.module)
    return None


def _options_of(node: Node) -> Any:
    """Return the options class of a function or of a class's `__init__`, if it takes one."""
    if isinstance(node, ast.ClassDef):
        inits = [method for method in methods_of(node, private=True) if method.name == "__init__"]
        return _options_of(inits[0]) if inits else None
    annotation = node.args.kwarg and node.args.kwarg.annotation
    found = re.fullmatch(r"Unpack\[(\w+)\]", ast.unparse(annotation)) if annotation else None
    return None if found is None else getattr(penstock.options, found[1], None)


def signature_of(node: Node, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        init = next((m for m in methods_of(node, private=True) if m.name == "__init__"), None)
        if init is None:
            fields = [
                ast.unparse(item).replace(" = ", "=")
                for item in node.body
                if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_")
            ]
            return _wrapped(name, fields)
        node = init
    arguments = ast.unparse(node.args)
    parts = [part for part in _split(arguments) if part not in ("self", "cls")]
    options = _options_of(node)
    if options is not None:
        parts = [*parts[:-1], "**options"]  # in tables below the signature
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return _wrapped(name, parts) + returns


def _split(arguments: str) -> list[str]:
    """Split arguments at commas outside of brackets and quotes."""
    parts, depth, quoted, start = [], 0, "", 0
    for place, sign in enumerate(arguments):
        if quoted:
            quoted = "" if sign == quoted else quoted
        elif sign in "'\"":
            quoted = sign
        else:
            depth += (sign in "([{") - (sign in ")]}")
            if sign == "," and not depth:
                parts.append(arguments[start:place].strip())
                start = place + 1
    return [part for part in [*parts, arguments[start:].strip()] if part]


def _wrapped(name: str, parts: list[str]) -> str:
    line = f"{name}({', '.join(parts)})"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def methods_of(node: ast.ClassDef, private: bool = False) -> Iterator[ast.FunctionDef]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (private or not item.name.startswith("_")):
            yield item


def render_docstring(text: str) -> str:
    """Convert a docstring to Markdown. Sections become paragraphs and lists, examples code."""
    out: list[str] = []
    for block in re.split(r"\n(?=(?:\w[\w ]+):\n\s)", textwrap.dedent(text).strip()):
        head, _, rest = block.partition("\n")
        if not _SECTION.match(head):
            out.append(_render_prose(block))
        elif head.startswith("Example"):
            out.append(f"```pycon\n{textwrap.dedent(rest).strip()}\n```")
        else:
            title, _, same_line = head.partition(":")
            body = "\n".join(filter(None, [same_line.strip(), textwrap.dedent(rest).strip()]))
            out.append(f"**{title}:**\n\n{_render_items(body, title)}")
    return "\n\n".join(out) + "\n"


def _render_prose(text: str) -> str:
    """Keep paragraphs unchanged. Indented text, such as drawings and code, becomes code."""
    out = []
    for paragraph in text.split("\n\n"):
        is_set_in = all(line.startswith("    ") for line in paragraph.splitlines() if line)
        if is_set_in and paragraph.strip():
            out.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            out.append(_plain(paragraph))
    return "\n\n".join(out)


def _render_items(body: str, title: str) -> str:
    items: list[str] = []
    for line in body.splitlines():
        is_item = re.match(r"[\w*`., ]+?:\s", line + " ") and not line.startswith(" ")
        if is_item and title in ("Args", "Attributes", "Raises"):
            name, _, rest = line.partition(":")
            items.append(f"- `{name.strip('`')}`: {rest.strip()}")
        elif items and line.strip():
            items[-1] += " " + line.strip()
        elif line.strip():
            items.append(line.strip())
    return _plain("\n".join(items))


def _plain(text: str) -> str:
    text = _ROLE.sub(r"`\1`", text).replace("``", "`")
    return re.sub(r"\[(?=[^\]]*\]\()", r"\\[", text)


def _all_methods(node: ast.ClassDef, home: str) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class and of its bases in Penstock, each name once."""
    seen = set()
    families = [node]
    for base in node.bases:
        found = definition_of(ast.unparse(base).partition("[")[0], home)
        families += [found] if isinstance(found, ast.ClassDef) else []
    for family in families:
        for method in methods_of(family):
            if method.name not in seen:
                seen.add(method.name)
                yield method


def describe(name: str, node: Node, level: int, shown: str, home: str) -> Iterator[str]:
    yield f"{'#' * level} `{shown}`\n"
    yield f"```python\n{signature_of(node, name)}\n```\n"
    yield render_docstring(ast.get_docstring(node) or "")
    options = _options_of(node)
    if options is not None:
        yield options_table(options)
    if isinstance(node, ast.ClassDef) and not name.endswith("Error"):
        for method in _all_methods(node, home):
            told = ast.get_docstring(method)
            if not told:
                continue
            is_property = any("property" in ast.unparse(d) for d in method.decorator_list)
            line = method.name if is_property else signature_of(method, method.name)
            yield f"```python\n{line}\n```\n"
            yield textwrap.indent(render_docstring(told), "") + "\n"


def options_table(kind: type) -> str:
    """Return the options that a class declares, as a table for each topic."""
    left, out = dict(penstock.options.options_of(kind)), []
    for topic, names in {**TOPICS, "Other": tuple(left)}.items():
        options = [left.pop(name) for name in names if name in left]
        if options:
            out += [f"**{topic}**\n", "| option | default | |", "|---|---|---|"]
            out += [f"| `{one.name}` | `{one.default!r}` | {_plain(one.help)} |" for one in options]
            out.append("")
    return "\n".join(out)


def api_page() -> str:
    """Return the page of the public API."""
    homes = homes_of("penstock")
    out = ["# API\n", "Generated from the sources. Import all names from `penstock`.\n"]
    left = {name: home for name, home in homes.items() if name not in MODULES}
    for title, packages in GROUPS.items():
        out.append(f"## {title}\n")
        for name, home in list(left.items()):
            if any(f"{home}.".startswith(f"penstock.{package}.") for package in packages):
                del left[name]
                node = definition_of(name, CALLABLE_PACKAGES.get(name, home))
                if node is None:
                    raise LookupError(f"penstock.{name} is not defined in {home}")
                out += describe(name, node, 3, f"penstock.{name}", home)
    if left:
        raise LookupError(f"no heading in tools/site/reference.py for {left}")
    out.append("## penstock.conv\n")
    for name, home in homes_of("penstock.conv").items():
        node = definition_of(name, home)
        if node is None:
            raise LookupError(f"penstock.conv.{name} is not defined in {home}")
        out += describe(name, node, 3, f"penstock.conv.{name}", home)
    for module, about in (
        ("errors", "What is raised: [Errors](../errors/README.md)."),
        (
            "legacy",
            "Names that projects gave to functions of their own: [Common advice](../seeds.md).",
        ),
    ):
        out.append(f"## penstock.{module}\n\n{about}\n")
        for node in tree_of(f"penstock.{module}").body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                shown = f"penstock.{module}.{node.name}"
                out += describe(node.name, node, 3, shown, f"penstock.{module}")
    return "\n".join(out)


CALLABLE_PACKAGES = {"machine": "penstock.machine.collect", "verify": "penstock.verify.comparison"}
"""Callable packages, and the modules of the functions that they call."""


def command_page() -> str:
    """Return the page of the command line, generated from the parser."""
    from penstock.cli.parser import make_parser

    out = ["# Command line\n", "Generated from the program, like `penstock COMMAND --help`.\n"]
    for name, parser in make_parser().subcommands():
        told = "\n\n".join(filter(None, (parser.description, parser.epilog)))
        usage = parser.format_usage().removeprefix("Usage: ").strip()
        out.append(f"## {name}\n\n{_plain(told)}\n\n```text\n{usage}\n```\n")
        out.append(f"Example: `{parser.example}`\n")
        out.append("| | | default |\n|---|---|---|")
        for action in parser._actions:
            if "--help" not in action.option_strings:
                cells = (f"`{_written(action)}`", action.help or "", _default(action))
                out.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        out.append("")
    return "\n".join(out)


def _written(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    shown = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return shown
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {shown}"


def _default(action: argparse.Action) -> str:
    is_told = action.option_strings and action.default not in (None, False, [])
    return f"`{action.default}`" if is_told else ""
