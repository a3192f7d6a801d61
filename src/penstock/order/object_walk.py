"""Walks over all objects that ``dataset[i]`` (or a collate_fn) can reach.

The walk follows attributes, slots, containers, closures, defaults, bound methods and partials. In
the user's own modules it also follows the globals that functions and methods reference: other
functions, classes, objects and modules. In installed libraries it follows objects but not code.
It calls, copies and changes nothing.

Containers with many items are searched in bulk, at the speed of the garbage collector. A list of a
million (path, label) tuples takes about 50 ms.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np

from penstock.user_objects import own_attributes

MAX_OBJECTS = 1_000_000
MAX_DEPTH = 32
MANY_ITEMS = 64
"""Containers with more items are searched in bulk, and their items have no path."""

CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_BUILTIN_CONTAINERS = frozenset((list, tuple, dict, set, frozenset))
_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), range, memoryview, slice)
_OPAQUE = (
    *(*_PLAIN, PurePath, np.generic, np.dtype, types.ModuleType, types.CodeType),
    *(types.FrameType, types.TracebackType),
)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_FOLLOWED_ALONE = (type, types.FunctionType, functools.partial, *_METHODS)
LIBRARIES = frozenset(("torch", "torchvision", "numpy", "penstock")) | sys.stdlib_module_names
"""The code of these modules draws only from the global generators."""

_CACHE_ENTRY = "_lru_list_elem"
"""Class of the entries of a bounded ``functools.lru_cache``."""

Placed = tuple[str, Any]
"""A path, such as ``dataset.transform.rng``, and the object there."""


class ObjectWalk:
    """One walk. Each object is visited once.

    Args:
        is_sought: Returns True for the objects to find. These are not followed.
        barren: Large containers that held only plain values in an earlier walk, with their lengths.
            They are skipped. The walk adds the ones it finds.

    Attributes:
        modules: The names of modules that the code imports or is defined in.
        names: The names that code in the user's own modules references.
        holders: The objects and containers visited, with their paths.
        is_complete: True if no limit was reached.

    Example:
        >>> import random
        >>> class Data:
        ...     def __init__(self):
        ...         self.transforms = [{"rng": random.Random(0)}]
        >>> walk = ObjectWalk(lambda value: isinstance(value, random.Random))
        >>> [path for path, _ in walk.find("dataset", Data())]
        ["dataset.transforms[0]['rng']"]
    """

    def __init__(
        self, is_sought: Callable[[Any], bool], barren: dict[int, int] | None = None
    ) -> None:
        self._is_sought = is_sought
        self._barren = {} if barren is None else barren
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is unique only while its object is alive
        self._classes: set[type] = set()
        self._followed: dict[type, bool] = {}
        self._held_modules: list[types.ModuleType] = []
        self.modules: set[str] = set()
        self.names: set[str] = set()
        self.holders: list[Placed] = []
        self.is_complete = True

    def find(self, path: str, root: Any, max_holders: int = MAX_OBJECTS) -> Iterator[Placed]:
        """Yield the objects to find, nearest first, each with its path.

        Args:
            max_holders: Stop after visiting this number of objects and containers.
        """
        queue: deque[tuple[str, Any, int]] = deque([(path, root, 0)])
        while queue and len(self.holders) < max_holders:
            path, value, depth = queue.popleft()
            if not self._enter(value):
                pass
            elif self._is_sought(value):
                yield path, value
            elif depth < MAX_DEPTH:
                queue.extend((*item, depth + 1) for item in self._inside(path, value))
            else:
                self.is_complete = False
            if not queue:
                queue.extend((*item, 0) for item in self._of_held_modules())
        for name in sorted(self.modules):
            if is_library(name) and name.partition(".")[0] not in LIBRARIES:
                for attribute, value in list(vars(sys.modules.get(name, object)).items()):
                    if self._is_sought(value) and self._enter(value):
                        yield f"{name}.{attribute}", value

    def _enter(self, value: Any) -> bool:
        """Return True if this object can hold others and is visited for the first time."""
        if id(value) in self._seen:
            return False
        if not (self._is_followed(type(value)) or _holds_objects(value)):
            return False
        if len(self._seen) >= MAX_OBJECTS:
            self.is_complete = False
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _is_followed(self, kind: type) -> bool:
        is_followed = self._followed.get(kind)
        if is_followed is None:
            is_followed = self._followed[kind] = _may_hold_objects(kind)
        return is_followed

    # -- contents of objects ---------------------------------------------------------------------

    def _inside(self, path: str, value: Any) -> Iterator[Placed]:
        kind = type(value)
        if issubclass(kind, np.ndarray):
            yield path, np.ndarray.ravel(value).tolist()
        elif issubclass(kind, functools.partial):
            yield f"{path}.func", value.func
            yield f"{path}.args", value.args
            yield f"{path}.keywords", value.keywords
        elif issubclass(kind, types.FunctionType):
            yield from self._of_function(path, value)
        elif issubclass(kind, type):
            yield from self._of_class(value)
        elif issubclass(kind, types.GeneratorType):
            held = value.gi_frame.f_locals if value.gi_frame is not None else {}
            yield from ((f"{path}.{name}", item) for name, item in held.items())
        elif issubclass(kind, _METHODS) or kind.__name__ == "cython_function_or_method":
            yield f"{path}.__self__", getattr(value, "__self__", None)
            yield f"{path}.__func__", getattr(value, "__func__", None)
        else:
            yield from self._of_instance(path, value)

    def _of_instance(self, path: str, value: Any) -> Iterator[Placed]:
        kind = type(value)
        self.holders.append((path, value))
        if issubclass(kind, CONTAINERS):
            length = plain_length(value)
            if length > MANY_ITEMS:
                yield from self._in_bulk(path, value, length)
            else:
                yield from ((f"{path}[{key}]", item) for key, item in plain_items(value))
        is_local = issubclass(kind, threading.local)
        # Its referents include the values of other threads.
        attributes = dict(vars(value)) if is_local else own_attributes(value)
        for name, item in attributes.items():
            if issubclass(type(item), types.ModuleType):
                self._held_modules.append(item)
            yield f"{path}.{name}", item
        is_opaque = not attributes or _top_of(kind) in sys.stdlib_module_names
        if is_opaque and not (is_local or issubclass(kind, CONTAINERS)):
            # Written in C: an iterator, a cache, the frame of a generator.
            for name, item in _referents_of(value):
                if not (issubclass(type(item), type) or _is_globals(item)):
                    yield f"{path}{name}", item
        yield from self._of_class(kind)

    def _in_bulk(self, path: str, container: Any, length: int) -> Iterator[Placed]:
        """Yield the contents of a large container, level by level."""
        if self._barren.get(id(container)) == length:
            return
        number, level, seen, is_plain = 0, [container], {id(container)}, True
        for _ in range(MAX_DEPTH):
            items = gc.get_referents(*level)
            kinds = {kind for kind in set(map(type, items)) if self._is_followed(kind)}
            kinds = {kind for kind in kinds if not issubclass(kind, type)}
            if not kinds:
                break
            if kinds <= _BUILTIN_CONTAINERS:  # these rarely hold the same container twice
                level = [item for item in items if type(item) in kinds]
                continue
            is_plain = False
            for kind in sorted(kinds, key=lambda kind: (module_of(kind), kind.__qualname__)):
                yield from self._of_class(kind)
            new = {id(item): item for item in items if type(item) in kinds}
            level = [item for key, item in new.items() if key not in seen]
            seen.update(new)
            examples = {type(item): item for item in level}
            alone = {kind for kind, item in examples.items() if self._is_met_alone(kind, item)}
            keys = {id(item): key for key, item in plain_items(container)} if alone else {}
            for item in [item for item in level if type(item) in alone] if alone else ():
                yield f"{path}[{keys.get(id(item), f'*{number}')}]", item
                number += 1
            level = [item for item in level if type(item) not in alone] if alone else level
            if len(seen) > MAX_OBJECTS:
                self.is_complete = False
                return
        else:
            self.is_complete = False
        if is_plain:
            self._barren[id(container)] = length

    def _is_met_alone(self, kind: type, example: Any) -> bool:
        return issubclass(kind, _FOLLOWED_ALONE) or self._is_sought(example)

    # -- names that code references --------------------------------------------------------------

    def _of_class(self, cls: type) -> Iterator[Placed]:
        """Yield the contents of a class and its bases, and what their methods reference."""
        if type(cls) is not type and type(cls) not in self._classes:
            yield from self._of_class(type(cls))
        for base in cls.__mro__:
            if base in self._classes or _top_of(base) in LIBRARIES:
                continue
            self._classes.add(base)
            self.modules.add(module_of(base))
            for name, item in list(vars(base).items()):
                path = f"{base.__name__}.{name}"
                for part in (item, *_parts_of_descriptor(item)):
                    if issubclass(type(part), types.FunctionType):
                        yield from self._of_function(path, part)
                    elif not is_library(module_of(base)) or self._is_sought(part):
                        yield path, part

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[Placed]:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=False):
            try:
                yield f"{path}.{name}", cell.cell_contents
            except ValueError:
                pass  # the cell is still empty
        for item in (function.__defaults__, function.__kwdefaults__):
            if item is not None:
                yield f"{path}.<defaults>", item
        for name, item in list(vars(function).items()):
            yield f"{path}.{name}", item
        module = function.__module__ or ""
        self.modules.add(module)
        is_own = not is_library(module)
        used = dict.fromkeys(_names(function.__code__))
        if is_own:
            self.names.update(used)
        for name in used:
            named: Any = function.__globals__.get(name, sys.modules.get(name))
            if issubclass(type(named), types.ModuleType):
                yield from self._of_module(named, used, is_own=is_own)
            elif is_own or self._is_sought(named):
                yield f"{module}.{name}", named

    def _of_held_modules(self) -> Iterator[Placed]:
        """Yield objects reached through a module in an attribute: ``self.ops.augment(x)``."""
        held, self._held_modules = self._held_modules, []
        for module in held:
            yield from self._of_module(module, dict.fromkeys(sorted(self.names)), is_own=True)

    def _of_module(
        self, module: types.ModuleType, used: dict[str, None], *, is_own: bool
    ) -> Iterator[Placed]:
        """Yield objects that code reaches through ``module`` with the attribute names ``used``."""
        self.modules.add(module.__name__)
        if not is_own or is_library(module.__name__):
            return
        for name in used:
            item: Any = vars(module).get(name)
            if not issubclass(type(item), types.ModuleType):
                yield f"{module.__name__}.{name}", item
            elif item.__name__.startswith(f"{module.__name__}."):
                yield from self._of_module(item, used, is_own=True)


@functools.cache
def is_library(module_name: str) -> bool:
    """Return True for modules of Python, torch, NumPy and installed packages."""
    if module_name.partition(".")[0] in LIBRARIES:
        return True
    file = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _may_hold_objects(kind: type) -> bool:
    if issubclass(kind, (*_OPAQUE, np.ndarray)):
        return False
    if getattr(kind, "draws_nothing", False) is True:  # mapped files of a packed set
        return False
    torch = sys.modules.get("torch")
    return torch is None or not issubclass(kind, (torch.Tensor, torch.dtype, torch.Size))


def _holds_objects(value: Any) -> bool:
    return issubclass(type(value), np.ndarray) and bool(value.dtype.hasobject)


def _referents_of(value: Any) -> Iterator[Placed]:
    """Yield the objects that an object written in C refers to.

    The entries of a bounded ``functools.lru_cache`` (key, value, class of the entry) come in order
    of use, which differs between processes. They are named by their keys.
    """
    referents, at, number = gc.get_referents(value), 0, 0
    while at < len(referents):
        entry = referents[at : at + 3]
        if (
            len(entry) == 3
            and issubclass(type(entry[2]), type)
            and entry[2].__name__ == _CACHE_ENTRY
        ):
            yield f"[{_key_text(entry[0])}]", entry[1]
            at += 3
        else:
            yield f".<{number}>", entry[0]
            at, number = at + 1, number + 1


def _is_globals(value: Any) -> bool:
    return type(value) is dict and "__builtins__" in value


def module_of(cls: type) -> str:
    """Return the module name of a class. ``__module__`` can be any object."""
    return str(cls.__module__)


def _top_of(cls: type) -> str:
    return module_of(cls).partition(".")[0]


def plain_length(container: Any) -> int:
    """``len`` of a container, without calling a subclass's method."""
    return int(_base_of(container).__len__(container))


def plain_items(container: Any) -> list[tuple[str, Any]]:
    """Return (key as path text, item) pairs, without calling a subclass's methods.

    Example:
        >>> class Lazy(dict):
        ...     def items(self):
        ...         raise RuntimeError("called")
        >>> plain_items(Lazy(a=1)), plain_items([2])
        ([("'a'", 1)], [('0', 2)])
    """
    base = _base_of(container)
    if base is dict:
        pairs = list(dict.items(container))
        return [(_key_text(key), item) for key, item in pairs]
    return [(str(number), item) for number, item in enumerate(list(base.__iter__(container)))]


def _key_text(key: Any) -> str:
    """Return a key as text that is the same in every process, without calling user code."""
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    return f"{key!r:.60}" if type(key) in _PLAIN else f"<{type(key).__name__}>"


def _base_of(container: Any) -> Any:
    return next(base for base in CONTAINERS if issubclass(type(container), base))


def _parts_of_descriptor(item: Any) -> list[Any]:
    """Return the functions in a property, class method, static method or cached property."""
    if isinstance(item, (staticmethod, classmethod)):
        return [item.__func__]
    if isinstance(item, property):
        return [item.fget]
    if isinstance(item, functools.cached_property):
        return [item.func]
    return []


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
