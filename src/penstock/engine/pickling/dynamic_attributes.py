"""Pickles objects whose class defines ``__getattr__``, without calling it.

    class Wrapper:
        def __getattr__(self, name):
            return getattr(self.dataset, name)

pickle looks up ``instance.__setstate__`` to restore the state of an object. At that point the
instance is empty, so this ``__getattr__`` reads ``self.dataset``, which calls ``__getattr__`` again
without end. A ``__getattr__`` that returns a value for every name loses the state. Here, the hooks
of pickle are looked up only on the class, as the interpreter does for other special methods.
"""

from __future__ import annotations

import copyreg
import struct
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from penstock.user_objects import class_attribute, instance_dict, own_slots

_POINTER_BYTES = struct.calcsize("P")


def computes_attributes(cls: type) -> bool:
    """Return True if the class defines ``__getattr__`` or ``__getattribute__`` in Python."""
    if issubclass(cls, type):
        return False
    own = class_attribute(cls, "__getattribute__")
    return class_attribute(cls, "__getattr__") is not None or isinstance(own, FunctionType)


def reduce_by_class(obj: Any) -> Any:
    """Return a reduce value for the object, or None if pickle's default must reject it.

    Raises:
        Exception: Any exception of the class's own pickling methods.
    """
    cls = type(obj)
    own_method = _reduce_method(obj)
    if own_method is not None:
        return _with_setter(own_method())
    arguments = _new_arguments(obj)
    is_container = issubclass(cls, (dict, list))
    if arguments is None and not is_container and _has_hidden_state(cls):
        return None
    get_state = _bound(obj, "__getstate__")
    state = _default_state(obj) if get_state is None else get_state()
    list_items = list.__iter__(obj) if issubclass(cls, list) else None
    dict_items = iter(dict.items(obj)) if issubclass(cls, dict) else None
    made_by = (cls, *(arguments or ((), {})))
    return _new_instance, made_by, state, list_items, dict_items, _set_state


def _bound(obj: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of the object's class, bound to the object, or None."""
    found = class_attribute(type(obj), name)
    if found is None:
        return None
    bound: Callable[..., Any] = (
        found.__get__(obj, type(obj)) if hasattr(type(found), "__get__") else found
    )
    return bound


def _reduce_method(obj: Any) -> Callable[[], Any] | None:
    """Return the class's own ``__reduce_ex__`` or ``__reduce__`` as a callable, or None."""
    reduce_ex = _bound(obj, "__reduce_ex__")
    return _bound(obj, "__reduce__") if reduce_ex is None else lambda: reduce_ex(5)


def _with_setter(reduced: Any) -> Any:
    """Add :func:`_set_state` to the reduce value of a class's own method."""
    if not isinstance(reduced, tuple):
        return reduced
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle compares cls with obj.__class__, which a wrapper may forward too.
        cls, *arguments = reduced[1]
        reduced = (_new_instance, (cls, tuple(arguments), {}), *reduced[2:])
    padded = (*reduced, *(None,) * (6 - len(reduced)))
    if padded[2] is None or padded[5] is not None:
        return reduced
    return (*padded[:5], _set_state)


def _new_arguments(obj: Any) -> tuple[Any, Any] | None:
    with_keywords, plain = _bound(obj, "__getnewargs_ex__"), _bound(obj, "__getnewargs__")
    if with_keywords is not None:
        arguments, keywords = with_keywords()
        return arguments, keywords
    return None if plain is None else (plain(), {})


def _has_hidden_state(cls: type) -> bool:
    """Return True if a compiled base class has state outside attributes. pickle's own test."""
    num_bytes = object.__basicsize__
    num_bytes += _POINTER_BYTES * ((cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0))
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        num_bytes += _POINTER_BYTES * len([n for n in names if n not in _NOT_SLOTS])
    return cls.__basicsize__ > num_bytes or cls.__itemsize__ != 0


_NOT_SLOTS = ("__dict__", "__weakref__")


def _default_state(obj: Any) -> Any:
    attributes = instance_dict(obj) if type(obj).__dictoffset__ else None
    slots = own_slots(obj)
    return (attributes, slots) if slots else attributes


# -- in the worker ---------------------------------------------------------------------------------


def _new_instance(cls: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return cls.__new__(cls, *arguments, **keywords)


def _set_state(obj: Any, state: Any) -> None:
    """Restore the state like pickle, but look up ``__setstate__`` on the class."""
    set_state = _bound(obj, "__setstate__")
    if set_state is not None:
        set_state(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        target = object.__getattribute__(obj, "__dict__")
        for name, value in state.items():
            target[sys.intern(name) if type(name) is str else name] = value
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)
