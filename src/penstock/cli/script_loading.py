"""Runs a script up to the statement that defines the dataset or loader to use.

    statement, ..., the statement that binds the name | a training loop: not run
                                                      | def, class, import: still run

The body of ``if __name__ == "__main__":`` counts as top level. Later definitions are run as well,
because methods of the dataset may use them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from penstock.cli.script_object import ScriptObject, bound_names, find_script_object
from penstock.cli.user_code import describe_error, place_of
from penstock.errors import BadTarget

_PLAIN = (str, bytes, int, float, complex, types.ModuleType)


class ScriptFailed(Exception):
    """The object in the script cannot be loaded. The text gives the reason.

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
    """Run the script and return the value of the target's name.

    The script replaces ``__main__`` in this process.

    Args:
        arguments: Arguments of the script for ``sys.argv``.
        doing: Called with a description of each line before it runs.

    Raises:
        ScriptFailed: The script raised, exited, or did not define a usable value.
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
    for statement in statements:  # continues after the statement where the loop above stopped
        if _only_defines(statement) and not _binds(statement, target.name):
            with suppress(Exception):  # it may depend on a skipped statement
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
    """Compile one statement with the script's ``from __future__`` imports."""
    body = target.tree.body
    futures = [s for s in body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
    module = ast.Module(body=[*futures, statement], type_ignores=[])
    return compile(module, str(target.script.absolute()), "exec", dont_inherit=True)


def _execute(statement: ast.stmt, namespace: dict[str, Any], target: ScriptObject) -> None:
    line = f"{target.script}:{statement.lineno}"
    output = " packed/" if target.command == "pack" else ""
    try:
        exec(_compile(statement, target), namespace)
    except SystemExit as ended:
        raise ScriptFailed(
            "script",
            f"the script ended with exit code {ended.code} before it defined {target.name!r}",
            where=line,
            cure=f"penstock {target.command} {target}{output} -- ARGUMENTS OF THE SCRIPT",
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
    """Return True if the value can be the target, not a placeholder such as None, "" or []."""
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, (list, tuple, dict, set)):
        return len(value) > 0
    return callable(value) or _has_samples(value)


def _has_samples(value: Any) -> bool:
    return any(hasattr(type(value), name) for name in ("__getitem__", "__iter__"))


def _unusable(target: ScriptObject, namespace: dict[str, Any]) -> ScriptFailed:
    if target.name not in namespace:
        return ScriptFailed("name", f"{target.script} finished without defining {target.name!r}")
    kind = type(namespace[target.name]).__name__
    return ScriptFailed(
        "name",
        f"{target.name} is {'None' if kind == 'NoneType' else f'of type {kind}'}, not a dataset, a "
        "loader, or a function or class that creates one",
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
    """Return the dataset or loader. A class or function is called to create it.

    Raises:
        ScriptFailed: The class or function needs arguments, raises, or returns something else.
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
        kind = "None" if made is None else f"an object of type {type(made).__name__}"
        raise ScriptFailed("making", f"{target.name}() returned {kind}, not a dataset")
    return made


def load_dataset(text: str, command: str, arguments: Sequence[str] = ()) -> Any:
    """Return the dataset or loader that ``SCRIPT:NAME`` names, in this process.

    Raises:
        BadTarget: The script or the name does not exist, or the script failed.
    """
    target = find_script_object(text, command)
    try:
        return make_dataset(load_object(target, arguments), target)
    except ScriptFailed as error:
        raise BadTarget(error.what, where=error.where, remedy=error.cure or None) from None


def _required(maker: Any) -> list[str]:
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # implemented in C: only a call can show it
        return []
    return [
        item.name
        for item in parameters
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
