"""Which line filled a large container, and what should it say instead?"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.doctor.parts import Part
from penstock.cli.doctor.user_code import is_users, shown

_MAX_VALUE = 60
_GROWS = ("append", "extend", "add", "update", "insert", "setdefault")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the user's, and the one to put in its place (or after it)."""

    where: str
    now: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class _Assignment:
    node: ast.Assign | ast.AnnAssign
    file: str
    source: str

    @property
    def target(self) -> str:
        node = self.node
        return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def find_line(part: Part, script: Path, name: str) -> Line:
    """Where the container in ``part`` comes from, and the line to change.

    Args:
        script, name: The script that was tried, and the name of the dataset in it: what a library's
            class holds is changed from there.
    """
    owners = {} if part.owner is None else _sources(type(part.owner))
    for file, names in owners.items():
        if not is_users(file):
            continue
        source = _read(file)
        classes = [node for node in _classes(source) if node.name in names]
        line = _line_in(classes, part, file, source)
        if line is not None:
            return line
    line = _line_in([ast.parse(_read(str(script)))], part, str(script), _read(str(script)))
    return line or _from_outside(part, script, name)


def _sources(kind: type) -> dict[str, set[str]]:
    """The files of a class and its bases, with the names of the classes in each."""
    found: dict[str, set[str]] = {}
    for base in kind.__mro__:
        try:
            file = inspect.getsourcefile(base)
        except (TypeError, OSError):  # built in
            continue
        if file is not None:
            found.setdefault(file, set()).add(base.__name__)
    return found


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _classes(source: str) -> Iterator[ast.ClassDef]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _line_in(scopes: list[Any], part: Part, file: str, source: str) -> Line | None:
    """The assignment in these scopes that fills the attribute."""
    attribute = part.attribute
    assignments = [
        _Assignment(node=node, file=file, source=source)
        for scope in scopes
        for node in ast.walk(scope)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _assigns(node, attribute)
    ]
    if not assignments:
        return None
    filling = [item for item in assignments if not _is_empty(item.node.value)]
    if filling:
        return _wrap(filling[-1], part)
    grown = [
        getattr(node, "end_lineno", 0)
        for scope in scopes
        for node in ast.walk(scope)
        if _grows(node, attribute)
    ]
    return _after(assignments[-1], max(grown, default=assignments[-1].node.lineno), part)


def _assigns(node: ast.Assign | ast.AnnAssign, attribute: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(item, ast.Attribute) and item.attr == attribute for item in targets)


def _is_empty(value: ast.expr | None) -> bool:
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return True
    return ast.unparse(value) in ("[]", "{}", "()", "list()", "dict()", "set()", "tuple()")


def _grows(node: ast.AST, attribute: str) -> bool:
    """``self.samples.append(x)``, ``self.samples[key] = x``, ``self.samples += x``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        held = node.func.value
        return node.func.attr in _GROWS and getattr(held, "attr", None) == attribute
    if isinstance(node, ast.AugAssign):
        return getattr(node.target, "attr", None) == attribute
    is_entry = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    return is_entry and getattr(getattr(node, "value", None), "attr", None) == attribute


def _wrapper(value: Any) -> str:
    return "penstock.SharedDict" if isinstance(value, dict) else "penstock.SharedList"


def _wrap(item: _Assignment, part: Part) -> Line:
    value = item.node.value
    assert value is not None
    text = ast.get_source_segment(item.source, value) or ast.unparse(value)
    if "\n" in text or len(text) > _MAX_VALUE:
        brackets = {"[": "[...]", "{": "{...}", "(": "(...)"}
        text = brackets.get(text[:1], "...")
    if isinstance(value, ast.Tuple) and not text.startswith("("):
        text = f"({text})"
    return Line(
        where=f"{shown(item.file)}:{item.node.lineno}",
        now=f"{item.target} = {text}",
        instead=f"{item.target} = {_wrapper(part.value)}({text})",
    )


def _after(item: _Assignment, line: int, part: Part) -> Line:
    """It is filled bit by bit: the last line that does so is followed by one more."""
    lines = item.source.splitlines()
    now = lines[line - 1].strip() if line <= len(lines) else item.target
    instead = f"{item.target} = {_wrapper(part.value)}({item.target})"
    return Line(where=f"{shown(item.file)}:{line}", now=now, instead=f"{instead}  # after the loop")


def _from_outside(part: Part, script: Path, name: str) -> Line:
    """The class is a library's, or its source is gone: the script changes the attribute."""
    path = part.path.replace("dataset", name, 1)
    return Line(
        where=f"{script}, after {name} is made",
        now=path,
        instead=f"{path} = {_wrapper(part.value)}({path})",
    )
