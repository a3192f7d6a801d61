"""Inspects the objects inside a dataset: large containers, GPU tensors, generators, paths.

Nothing is called, loaded or changed. Of a long list, only the first few elements are inspected.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

MANY_ITEMS = 100_000
"""A container with more small objects costs tens of megabytes per worker and seconds to send."""
_MAX_OBJECTS = 20_000
_MAX_DEPTH = 8
_LOOK_AT = 32
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type, types.ModuleType, PurePath)


def walk_contents(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield all objects inside a dataset with their paths, breadth first.

    Example:
        >>> class Data:
        ...     def __init__(self):
        ...         self.table = {"names": ["a", "b"]}
        >>> [path for path, _ in walk_contents(Data())][:3]
        ['dataset', 'dataset.table', "dataset.table['names']"]
    """
    queue = deque([("dataset", dataset, 0)])
    seen: set[int] = set()
    keep: list[Any] = []  # an id is valid only while its object is alive
    for _ in range(_MAX_OBJECTS):
        if not queue:
            return
        path, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        yield path, value
        if depth < _MAX_DEPTH:
            try:
                queue.extend((path + name, child, depth + 1) for name, child in _children(value))
            except Exception:  # an object whose attributes raise when accessed
                continue


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _LEAVES) or is_array(value):
        return
    if isinstance(value, _CONTAINERS):
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in itertools.islice(items, _LOOK_AT):
            yield f"[{key!r:.40}]", child
    else:
        for name, child in _attributes(value):
            yield f".{name}", child


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        return
    if isinstance(value, types.FunctionType):
        yield from _closure(value)
    if isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    try:
        own = vars(value)
    except Exception:  # no __dict__, or a __getattribute__ that raises
        own = {}
    if isinstance(own, dict):
        yield from list(own.items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:
                    continue  # a slot without a value


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"<closure {name}>", cell.cell_contents
        except ValueError:
            continue  # an empty cell


# -- properties of an object -----------------------------------------------------------------------


def is_large(value: Any) -> bool:
    """Return True for a container of more than ``MANY_ITEMS`` small Python objects.

    Example:
        >>> is_large(["x"] * 200_000), is_large(["x"] * 10)
        (True, False)
    """
    if not isinstance(value, _CONTAINERS) or len(value) <= MANY_ITEMS:
        return False
    items = itertools.islice(value.values() if isinstance(value, dict) else iter(value), _LOOK_AT)
    return not any(is_array(item) for item in items)


def is_array(value: Any) -> bool:
    """Return True for a tensor or an array of any library."""
    # Looks at the type, because the object's __getattr__ may have side effects or raise.
    return hasattr(type(value), "shape") and hasattr(type(value), "dtype")


def estimate_bytes(container: Any) -> int:
    """Estimate the memory of a container's Python objects from its first elements."""
    items: Any = container.items() if isinstance(container, dict) else container
    few = [_own_bytes(item) for item in itertools.islice(iter(items), _LOOK_AT)]
    return sys.getsizeof(container) + len(container) * sum(few) // max(1, len(few))


def _own_bytes(item: Any, depth: int = 3) -> int:
    total = sys.getsizeof(item)
    if depth and isinstance(item, _CONTAINERS):
        inner: Any = (
            itertools.chain(*item.items()) if isinstance(item, dict) else itertools.islice(item, 64)
        )
        total += sum(_own_bytes(child, depth - 1) for child in inner)
    return total


def device_of(value: Any) -> str | None:
    """Return the device of a GPU tensor, or None for any other object."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    return None if value.device.type in ("cpu", "meta") else str(value.device)


def generator_state(value: Any) -> Any:
    """Return the state of a random generator object, or None for any other object.

    Global generators return None, because each worker has its own.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if isinstance(value, random.Random):
        is_global = value is random._inst or isinstance(value, random.SystemRandom)
        return None if is_global else value.getstate()
    if numpy is not None:
        if isinstance(value, numpy.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, numpy.random.RandomState) and value is not numpy.random.mtrand._rand:
            return repr(value.get_state(legacy=False))
    if torch is not None and isinstance(value, torch.Generator):
        return None if value is torch.default_generator else bytes(value.get_state().tolist())
    return None


def folder_of(value: Any) -> str | None:
    """Return the folder of an existing file, or the folder itself, if ``value`` is its path."""
    if not isinstance(value, (str, PurePath)):
        return None
    text = str(value)
    if not 1 < len(text) < 1024 or "\n" in text or "\0" in text:
        return None
    if os.path.isdir(text):
        return text
    return os.path.dirname(os.path.abspath(text)) if os.path.isfile(text) else None
