"""Finds the attribute that cannot be pickled and creates the error that names it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, GeneratorType
from typing import Any

from penstock.engine.pickling.handles import is_handle, remedy_for
from penstock.engine.pickling.process_bound import is_suspect, why_bound
from penstock.errors import CannotTravel
from penstock.user_objects import own_attributes

_MAX_DEPTH = 12
_LIKELY_FORK_CONTEXT = (
    "semaphores of the fork context have no name that another process can open, "
    "and workers are not forked from your process"
)


def explain(
    objects: dict[str, Any], error: BaseException, dump: Callable[[Any], None]
) -> BaseException:
    """Return the error to raise for ``objects``, which failed to pickle with ``error``.

    That is ``error`` itself if all of them can be pickled now: a signal handler has raised it.

    Args:
        dump: Pickles one object. Raises on failure.
    """
    for name, value in objects.items():
        reason = _failure(value, dump)
        if reason is None:
            continue
        path, part, reason, own_path = _descend(name, value, reason, dump)
        is_own = own_path == path
        return CannotTravel(
            f"{path} ({_kind(part)}) cannot be sent to a worker process: {reason}",
            likely=_LIKELY_FORK_CONTEXT if "fork context" in str(reason) else None,
            remedy=_remedy(own_path, part if is_own else None, str(reason)),
            path=path,
        )
    reason = _failure(objects, dump)
    if reason is None:
        return error
    return CannotTravel(f"the dataset could not be pickled: {reason}", path="dataset")


def _failure(value: Any, dump: Callable[[Any], None]) -> BaseException | None:
    try:
        dump(value)
    except Exception as error:
        return error
    return None


def _descend(
    path: str, value: Any, reason: BaseException, dump: Callable[[Any], None]
) -> tuple[str, Any, BaseException, str]:
    """Return the path, value and error of the failing part, and the path of the user's object.

    The user's path stops at the first library object. It names a session, not the socket inside it.
    """
    seen = {id(value)}
    own_path, is_own = path, True
    for _ in range(_MAX_DEPTH):
        for step, child in _children(value):
            if id(child) in seen:
                continue
            seen.add(id(child))
            deeper = _failure(child, dump)
            if deeper is not None:
                is_own = is_own and not _is_of_library(type(value))
                path, value, reason = path + step, child, deeper
                own_path = path if is_own else own_path
                break
        else:
            break
    return path, value, reason, own_path


def _is_of_library(kind: type) -> bool:
    """Return True for classes of libraries, but not for built-in containers and functions."""
    name = kind.__module__
    if name in ("builtins", "functools", "collections", "types"):
        return False
    if name.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind.__module__.startswith("multiprocessing") or is_handle(value):
        return  # report the lock, queue or open file itself, not a part of it
    if is_suspect(kind) and why_bound(value):
        return
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]", item) for key, item in dict.items(value))
    elif issubclass(kind, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
    if hasattr(kind, "__code__") and isinstance(value.__code__, CodeType):
        yield from _captured(value)
    if hasattr(kind, "__self__") and callable(value):
        yield ".__self__", value.__self__
    for name in ("func", "args", "keywords") if kind is functools.partial else ():
        yield f".{name}", getattr(value, name)
    if issubclass(kind, type):
        return
    yield from ((f".{name}", item) for name, item in own_attributes(value).items())
    if kind.__module__ == "__main__":  # its class is pickled too, with its methods
        methods = vars(kind).items()
        yield from ((f".{name}", one) for name, one in methods if type(one) is FunctionType)


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a function: closure, defaults, and globals if by value."""
    code = function.__code__
    closure = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, closure, strict=False):
        with suppress(ValueError):  # an empty cell
            yield f".<closure {name}>", cell.cell_contents
    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            yield f".<default {parameter.name}>", parameter.default
    if function.__module__ == "__main__":
        used = getattr(function, "__globals__", {})
        yield from ((f".<global {name}>", used[name]) for name in code.co_names if name in used)


def _kind(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _remedy(path: str, part: Any, reason: str) -> str:
    if "fork context" in reason:
        name = type(part).__name__
        return (
            f"multiprocessing.get_context('spawn').{name}(...) for {path}, "
            "or DataLoader(..., multiprocessing_context='fork')"
        )
    if "tensor on" in reason:
        return f"{path}.cpu() before you create the loader; move batches to the device in the loop"
    if "end of a pipe" in reason:
        return f"a queue of multiprocessing.get_context('spawn') instead of {path}"
    if isinstance(part, GeneratorType):
        return (
            f"a class whose __iter__ creates the generator, instead of {path}, so that each worker "
            "and epoch starts a new one. DataLoader(..., pool='thread') needs no pickling."
        )
    line = None if part is None else remedy_for(part, path)
    if line is not None:
        return line
    if path.endswith(">"):  # <global name>, <closure name> or <default name>
        function = path.rpartition(".<")[0]
        return f"create it inside {function}. DataLoader(..., pool='thread') needs no pickling."
    return (
        f"create it on first use in the worker: keep {path} = None in __init__ and set it in "
        "__getitem__, or exclude it in __getstate__. DataLoader(..., pool='thread') needs no "
        "pickling."
    )
