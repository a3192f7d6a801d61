"""Resolves ``SCRIPT:NAME`` on the command line. The script is parsed but not run."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from penstock.errors import BadTarget

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_USAGES = {
    "doctor": "penstock doctor train.py:dataset",
    "verify": "penstock verify train.py:make_loader",
    "pack": "penstock pack train.py:dataset packed/",
    "bench": "penstock bench train.py:dataset   or   penstock bench photos/",
}
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class ScriptObject:
    """A name in a script, the parsed script, and the command that uses it."""

    script: Path
    name: str
    tree: ast.Module
    command: str = "doctor"

    def __str__(self) -> str:
        return f"{self.script}:{self.name}"


def find_script_object(text: str, command: str = "doctor") -> ScriptObject:
    """Resolve ``text`` to a name in a script without running the script.

    Raises:
        BadTarget: The script does not exist, is not valid Python, or never defines the name.

    Example:
        >>> find_script_object("train.py")
        Traceback (most recent call last):
        penstock.errors.BadTarget: [D01] train.py cannot be read: No such file or directory
          Try: penstock doctor train.py:dataset
    """
    script_text, colon, name = text.rpartition(":")
    if not colon or (len(script_text) == 1 and name[:1] in ("\\", "/")):  # C:\train.py
        script_text, name = text, ""
    script = Path(script_text)
    if not script_text or not (name or script.exists() or script.suffix == ".py"):
        raise BadTarget(
            f"{text!r} is neither a script nor a script and a name in it",
            remedy=_USAGES[command],
        )
    tree = _parse(script, command)
    target = ScriptObject(script=script, name=name, tree=tree, command=command)
    if not name.isidentifier():
        wanted = "loader" if command == "verify" else "dataset or loader"
        what = f"{script} is a script. Add a colon and the name of the {wanted} in it"
        if name:
            what = f"{name!r} is not a valid name"
        raise BadTarget(what, remedy=_suggest(target))
    if name not in bound_names(tree) and not _binds_unseen_names(tree):
        raise BadTarget(
            f"{script} does not define {name!r} at the top level",
            where=_local_place(target),
            remedy=_suggest(target),
        )
    return target


def _parse(script: Path, command: str) -> ast.Module:
    if script.is_dir():
        raise BadTarget(f"{script} is a folder, not a script", remedy=_USAGES[command])
    if script.suffix == ".ipynb":
        raise BadTarget(
            f"{script} is a notebook",
            remedy=f"jupyter nbconvert --to script {script}",
        )
    try:
        source = script.read_bytes()
    except OSError as error:
        near = difflib.get_close_matches(script.name, _scripts_beside(script), n=1, cutoff=0.75)
        meant = f"penstock {command} {script.with_name(near[0])}:..." if near else None
        raise BadTarget(
            f"{script} cannot be read: {error.strerror or error}", remedy=meant or _USAGES[command]
        ) from None
    try:
        return ast.parse(source, filename=str(script))
    except SyntaxError as error:
        line = f"{script}:{error.lineno}" if error.lineno else str(script)
        raise BadTarget(f"{script} is not valid Python: {error.msg}", where=line) from None
    except ValueError as error:  # null bytes, on Python before 3.12
        raise BadTarget(f"{script} is not valid Python: {error}") from None


def _scripts_beside(script: Path) -> list[str]:
    try:
        return [name for name in os.listdir(script.parent) if name.endswith(".py")]
    except OSError:
        return []


def bound_names(tree: ast.Module) -> dict[str, int]:
    """Return the names that a script binds outside functions and classes, with their lines.

    Example:
        >>> bound_names(ast.parse("import a.b\\nfor i in x:\\n  y = z = 1\\ndef f():\\n  w = 2"))
        {'a': 1, 'i': 2, 'y': 3, 'z': 3, 'f': 4}
    """
    names: dict[str, int] = {}
    for node in _outside_scopes(tree):
        found: list[str] = []
        if isinstance(node, _SCOPES) and not isinstance(node, ast.Lambda):
            found = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found = [node.id]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        for name in found:
            names.setdefault(name, getattr(node, "lineno", 0))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):  # a function may bind the name when it is called
            names.update({name: node.lineno for name in node.names if name not in names})
    return names


def _outside_scopes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _outside_scopes(child)


def _binds_unseen_names(tree: ast.Module) -> bool:
    """Return True if the script may define names that parsing cannot find."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.Name) and node.id in ("globals", "exec"):
            return True
    return False


def _local_place(target: ScriptObject) -> str | None:
    """Return a hint if a function has a local variable of this name."""
    for node in ast.walk(target.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for inner in ast.walk(node):
            is_bound = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            if is_bound and getattr(inner, "id", None) == target.name:
                line = getattr(inner, "lineno", node.lineno)
                wanted = "loader" if target.command == "verify" else "dataset"
                return (
                    f"{target.script}:{line}: it is local to {node.name}(). Define a function "
                    f"without arguments that returns the {wanted}, and pass its name"
                )
    return None


def _suggest(target: ScriptObject) -> str:
    """Return a command line with the most likely names."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(target.tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    kinds = {getattr(node, "name", ""): type(node) for node in target.tree.body}
    useless = {node.name for node in target.tree.body if _only_acts(node)}
    loops = [node.target for node in ast.walk(target.tree) if isinstance(node, ast.For)]
    useless |= {n.id for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Name)}
    names = [n for n in bound_names(target.tree) if not n.startswith("_") and n not in useless]
    if target.command == "verify":  # needs a loader, or a function that creates one
        names = [name for name in names if kinds.get(name) is not ast.ClassDef]
    own = [name for name in names if name not in imported]
    own.sort(key=lambda name: _unlikeliness(name, target.command, kinds.get(name)))
    own = [name for name in own if name in kinds or any(_sounds_like(name))] or own
    near = difflib.get_close_matches(target.name, own, n=1, cutoff=0.5) if target.name else []
    own = near or own[:_SHOWN]
    if not own:
        return _USAGES[target.command]
    rest = " packed/" if target.command == "pack" else ""
    others = f"  (or {', '.join(own[1:])})" if own[1:] else ""
    return f"penstock {target.command} {target.script}:{own[0]}{rest}{others}"


def _only_acts(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return True for a function that cannot create a dataset or loader, such as ``main``."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    inner = _outside_scopes(node)
    has_value = any(isinstance(part, ast.Return) and part.value is not None for part in inner)
    return not has_value or node.name == "main"


def _unlikeliness(name: str, command: str, kind: type | None) -> tuple[bool, bool]:
    """Return a sort key that puts names likely to suit the command first."""
    is_data, is_loader = _sounds_like(name)
    if command == "verify":
        return is_data and not is_loader, not is_loader and kind is not ast.FunctionDef
    if command == "pack":
        return not is_data or is_loader, kind is ast.ClassDef
    return not (is_data or is_loader), kind is ast.ClassDef


def _sounds_like(name: str) -> tuple[bool, bool]:
    """Return whether a name sounds like that of a dataset, and of a loader."""
    is_data = any(part in name.lower() for part in ("data", "ds", "set", "train"))
    return is_data, "loader" in name.lower()
