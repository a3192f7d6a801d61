"""Runs a script up to the name that is wanted, and no further.

    statement, statement, ... the one that binds the name | a training loop: never run
                                                          | def, class, import: still run

The body of ``if __name__ == "__main__":`` counts as top level. Definitions further down are run
too, because methods of the dataset may call them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from penstock.cli.script_object import ScriptObject, bound_names
from penstock.cli.user_code import describe_error, place_of

_PLAIN = (str, bytes, int, float, complex, types.ModuleType)


class ScriptFailed(Exception):
    """The object in the script cannot be had; the text says why.

    Args:
        kind: ``"script"``, ``"name"`` or ``"making"``.
    """

    def __init__(self, kind: str, what: str, where: str | None = None, cure: str = "") -> None:
        super().__init__(what)
        self.kind, self.what, self.where, self.cure = kind, what, where, cure


def load_object(
    target: ScriptObject,
    arguments: Sequence[str] = (),
    doing: Callable[[str], None] = lambda activity: None,
) -> Any:
    """The value of the target's name; this process's ``__main__`` is the script from then on.

    Args:
        arguments: The script's own, as it sees them in ``sys.argv``.
        doing: Told which line is about to be run.

    Raises:
        ScriptFailed: The script raised before that, or ended, or bound nothing usable.
    """
    main = types.ModuleType("__main__")
    path = target.script.absolute()
    vars(main).update(__file__=str(path), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.path.insert(0, str(path.parent))
    sys.argv[:] = [str(target.script), *arguments]
    namespace = vars(main)
    statements = _flattened(target.tree.body)
    for statement in statements:
        doing(f"running {target.script}:{statement.lineno}")
        _execute(statement, namespace, target)
        if _is_usable(namespace.get(target.name)):
            break
    else:
        raise _unusable(target, namespace)
    for statement in statements:  # goes on where the loop above stopped
        if _only_defines(statement) and not _binds(statement, target.name):
            with suppress(Exception):  # it may need what was left out
                exec(_compile(statement, target), namespace)
    return namespace[target.name]


def _flattened(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If) and _is_main_guard(statement.test):
            yield from _flattened(statement.body)
        else:
            yield statement


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and ast.unparse(test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _compile(statement: ast.stmt, target: ScriptObject) -> types.CodeType:
    """One statement, under the script's ``from __future__`` imports."""
    body = target.tree.body
    futures = [s for s in body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    module = ast.Module(body=[*futures, statement], type_ignores=[])
    return compile(module, str(target.script.absolute()), "exec", dont_inherit=True)


def _execute(statement: ast.stmt, namespace: dict[str, Any], target: ScriptObject) -> None:
    line = f"{target.script}:{statement.lineno}"
    try:
        exec(_compile(statement, target), namespace)
    except SystemExit as ended:
        raise ScriptFailed(
            "script",
            f"the script ended with exit code {ended.code} before {target.name!r} was there",
            where=line,
            cure=f"penstock {target.command} {target} -- ARGUMENTS OF THE SCRIPT",
        ) from ended
    except Exception as error:
        place = place_of(error)
        inside = f" in {place}" if place and not place.startswith(str(target.script)) else ""
        raise ScriptFailed(
            "script",
            f"the script raised {describe_error(error)}{inside}",
            where=place if place and not inside else line,
            cure=f"python {target.script}",
        ) from error


def _is_usable(value: Any) -> bool:
    """Is this what was meant, and not a first, empty or textual value of that name?"""
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, (list, tuple, dict, set)):
        return len(value) > 0
    return callable(value) or _has_samples(value)


def _has_samples(value: Any) -> bool:
    return any(hasattr(type(value), name) for name in ("__getitem__", "__iter__"))


def _unusable(target: ScriptObject, namespace: dict[str, Any]) -> ScriptFailed:
    if target.name not in namespace:
        return ScriptFailed("name", f"{target.script} ran to its end without a {target.name!r}")
    kind = type(namespace[target.name]).__name__
    return ScriptFailed(
        "name",
        f"{target.name} is {'None' if kind == 'NoneType' else f'of type {kind}'}: no dataset, no "
        "loader, and nothing that makes one",
    )


def _only_defines(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return True
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        try:
            ast.literal_eval(statement.value)
        except ValueError:
            return False
        return True
    return False


def _binds(statement: ast.stmt, name: str) -> bool:
    return name in bound_names(ast.Module(body=[statement], type_ignores=[]))


def make_dataset(value: Any, target: ScriptObject) -> Any:
    """The dataset or loader itself: a class or function is called.

    Raises:
        ScriptFailed: It needs arguments, raises, or makes something else.
    """
    is_maker = isinstance(value, type) or not _has_samples(value)
    if not is_maker:
        return value
    missing = _required(value)
    if missing:
        raise ScriptFailed(
            "making",
            f"{target.name}() needs arguments: {', '.join(missing)}",
            cure=f"dataset = {target.name}(...)  # in the script, then: "
            f"penstock {target.command} {target.script}:dataset",
        )
    try:
        made = value()
    except Exception as error:
        what = f"{target.name}() raised {describe_error(error)}"
        raise ScriptFailed("making", what, where=place_of(error)) from error
    if isinstance(made, (tuple, types.GeneratorType)) or not _is_usable(made) or callable(made):
        raise ScriptFailed("making", f"{target.name}() gave a {type(made).__name__}, not a dataset")
    return made


def _required(maker: Any) -> list[str]:
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # written in C: calling it will tell
        return []
    return [
        item.name
        for item in parameters
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
