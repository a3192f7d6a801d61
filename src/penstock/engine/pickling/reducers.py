"""Reducers for objects that pickle rejects. The worker creates an equivalent new object.

a lock, a threading.local       a new one, because it belongs to the threads of one process
a ContextVar                    a new one with the same name and default
weak dictionaries and sets      a new one with the live entries
a read-only view of a dict      a view of a copy
functools.lru_cache(function)   the function with an empty cache
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle

Cached: type = type(functools.lru_cache(lambda: None))


def reduce(obj: Any) -> Any:
    """Return a reduce value, or None for all other objects."""
    make = _REDUCERS.get(type(obj))
    return None if make is None else make(obj)


def _reduce_variable(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        default = contextvars.Context().run(variable.get)
    except LookupError:
        return contextvars.ContextVar, (variable.name,)
    return _make_variable, (variable.name, default)


def _make_variable(name: str, default: Any) -> contextvars.ContextVar[Any]:
    return contextvars.ContextVar(name, default=default)


def _reduce_cached(cached: Any) -> Any:
    """Pickle by name if a worker can import it. Otherwise in two steps, to allow recursion."""
    if _is_named(cached):
        return None
    return _make_cached, (cached.cache_parameters(),), cached.__wrapped__, None, None, _fill_cached


def _is_named(cached: Any) -> bool:
    name = getattr(cached, "__module__", None)
    if name in ("__main__", "__mp_main__") or name in cloudpickle.list_registry_pickle_by_value():
        return False
    found: Any = sys.modules.get(str(name))
    for part in getattr(cached, "__qualname__", "<unnamed>").split("."):
        found = getattr(found, part, None)
    return found is cached


class _LateBound:
    """Calls a function that is set later, because it may refer to its own cached version."""

    function: Callable[..., Any]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def _make_cached(parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(_LateBound())


def _fill_cached(cached: Any, function: Callable[..., Any]) -> None:
    cached.__wrapped__.function = function
    functools.update_wrapper(cached, function)


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    threading.local: lambda local: (threading.local, ()),
    contextvars.ContextVar: _reduce_variable,
    weakref.WeakKeyDictionary: lambda weak: (weakref.WeakKeyDictionary, (dict(weak),)),
    weakref.WeakValueDictionary: lambda weak: (weakref.WeakValueDictionary, (dict(weak),)),
    weakref.WeakSet: lambda weak: (weakref.WeakSet, (list(weak),)),
    types.MappingProxyType: lambda view: (types.MappingProxyType, (dict(view),)),
    Cached: _reduce_cached,
}
