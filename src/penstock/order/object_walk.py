"""A bounded walk over what a dataset holds: attributes, containers, closures, module globals.

Bounded, because a dataset may hold a million paths or half a library: so many objects, so deep, so
many items of each container. Nothing is called and nothing is copied.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

MAX_OBJECTS = 5000
MAX_DEPTH = 8
MAX_ITEMS = 64
"""Of a list or dictionary: transforms come in short ones, samples in long ones."""

_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray, np.generic)
_OPAQUE = (types.ModuleType, type, range, memoryview)
_FOREIGN_ROOTS = {
    *("builtins", "torch", "torchvision", "numpy", "collections", "functools", "penstock"),
}
"""Classes of these hold no generators in their modules that a sample would draw from."""
_GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    random.Random,
)

Visit = Callable[[str, Any], bool]


def walk(root: Any, visit: Visit, modules: set[str]) -> None:
    """Call ``visit(path, value)`` for each object; where it returns True, go on inside.

    Args:
        root: Where to begin; its path is ``dataset``.
        visit: Told each object once.
        modules: Filled with the names of modules that the code of the visited objects imports.
    """
    queue: deque[tuple[str, Any, int]] = deque([("dataset", root, 0)])
    seen: set[int] = set()
    kept: list[Any] = []  # an id is only unique while its object lives
    while queue and len(seen) < MAX_OBJECTS:
        path, value, depth = queue.popleft()
        if isinstance(value, (_PLAIN, _OPAQUE)) or id(value) in seen or _is_tensor(value):
            continue
        if getattr(type(value), "draws_nothing", False) is True:  # mapped files of a packed set
            continue
        seen.add(id(value))
        kept.append(value)
        if visit(path, value) and depth < MAX_DEPTH:
            queue.extend((*item, depth + 1) for item in _inside(path, value, modules, seen))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _inside(path: str, value: Any, modules: set[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in islice(value.items(), MAX_ITEMS):
            yield f"{path}[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for place, item in enumerate(islice(value, MAX_ITEMS)):
            yield f"{path}[{place}]", item
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield f"{path}.args", value.args
        yield f"{path}.keywords", value.keywords
    elif hasattr(value, "__self__"):  # a bound method, of Python's or of a compiled class
        yield f"{path}.__self__", value.__self__
        yield f"{path}.__func__", getattr(value, "__func__", None)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value, modules)
    else:
        for name, item in islice(_attributes(value), MAX_ITEMS):
            yield f"{path}.{name}", item
        yield from _of_classes(type(value), modules, seen)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from held.items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(cls.__dict__.get(name), types.MemberDescriptorType):
                try:
                    yield name, getattr(value, name)
                except AttributeError:
                    pass  # a slot without a value


def _of_classes(cls: type, modules: set[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Generators in the class body, and in the globals that its methods name."""
    for base in cls.__mro__:
        if id(base) in seen or base.__module__.partition(".")[0] in _FOREIGN_ROOTS:
            continue
        seen.add(id(base))  # classes live on
        modules.add(base.__module__)
        for name, item in base.__dict__.items():
            function = getattr(item, "__func__", item)  # of a class method or a static one
            if isinstance(item, _GENERATORS):
                yield f"{base.__qualname__}.{name}", item
            elif isinstance(function, types.FunctionType):
                yield from _of_function(f"{base.__qualname__}.{name}", function, modules)


def _of_function(
    path: str, function: types.FunctionType, modules: set[str]
) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield f"{path}.{name}", cell.cell_contents
        except ValueError:
            pass  # not filled yet
    for item in (function.__defaults__, function.__kwdefaults__):
        if item is not None:
            yield f"{path}.<defaults>", item
    for name in _global_names(function.__code__):
        item = function.__globals__.get(name)
        if isinstance(item, types.ModuleType):
            modules.add(item.__name__)
        elif isinstance(item, _GENERATORS) or type(item).__module__ == "torch._C":
            yield f"{function.__module__}.{name}", item


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
