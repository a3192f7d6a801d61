"""Reads the user's objects without trusting their code: own attributes, and guarded probes.

A class may define ``__getattr__`` or ``__getattribute__`` that hands every name on to another
object, answers every name, or raises anything. A question of ours must neither end the program nor
be answered by somebody else.
"""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any


def own_attributes(value: Any) -> dict[str, Any]:
    """The attributes in ``__dict__`` and in slots, without calling any code of the class.

    Example:
        >>> class Wrapper:
        ...     def __init__(self):
        ...         self.dataset = [1]
        ...     def __getattr__(self, name):
        ...         raise RuntimeError("called")
        >>> own_attributes(Wrapper())
        {'dataset': [1]}
    """
    found = {str(name): item for name, item in list(instance_dict(value).items())}
    for cls in type(value).__mro__:
        if "__slots__" not in vars(cls):  # members of classes written in C are not the user's
            continue
        for name, member in list(vars(cls).items()):
            if isinstance(member, MemberDescriptorType):
                try:
                    found[name] = member.__get__(value, cls)
                except (AttributeError, TypeError):
                    pass  # a slot without a value
    return found


def instance_dict(value: Any) -> dict[str, Any]:
    """The ``__dict__`` of an object; an empty one where it has none.

    Example:
        >>> from types import SimpleNamespace
        >>> instance_dict(SimpleNamespace(a=1)), instance_dict(7)
        ({'a': 1}, {})
    """
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # none, or a property of the user's that fails
        return {}
    return found if isinstance(found, dict) else {}


def own_slots(value: Any) -> dict[str, Any]:
    """The slots of an object that have a value, by name.

    Example:
        >>> class Point:
        ...     __slots__ = ("x", "y")
        >>> point = Point()
        >>> point.x = 1
        >>> own_slots(point)
        {'x': 1}
    """
    found: dict[str, Any] = {}
    for cls in reversed(type(value).__mro__):
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):  # a private one has its own name
                name = f"_{cls.__name__.lstrip('_')}{name}"
            member = vars(cls).get(name)
            if isinstance(member, MemberDescriptorType):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:
                    continue  # a slot without a value
    return found


def probe(value: Any, name: str, default: Any = None) -> Any:
    """``getattr`` with a default for every exception, not for AttributeError alone.

    Example:
        >>> class Strict:
        ...     def __getattr__(self, name):
        ...         raise KeyError(name)
        >>> probe(Strict(), "plan_notes", ())
        ()
    """
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def offers(dataset: Any, name: str) -> bool:
    """Has its class this method, and no ``__getitem__`` that is newer than it?

    A class that inherits the method and overrides ``__getitem__`` means the latter. So does one
    that hands unknown names on to a dataset inside of it.

    Example:
        >>> class Reader:
        ...     def __getitem__(self, index): return index
        ...     def read_rows(self): return []
        >>> class Doubled(Reader):
        ...     def __getitem__(self, index): return 2 * index
        >>> offers(Reader(), "read_rows"), offers(Doubled(), "read_rows")
        (True, False)
    """
    for kind in type(dataset).__mro__:
        if name in vars(kind):
            return callable(probe(dataset, name))
        if "__getitem__" in vars(kind):
            return False
    return False


def class_attribute(cls: type, name: str) -> Any:
    """What a class defines under a name, ``object`` left out; None: nothing.

    Example:
        >>> class_attribute(dict, "__len__") is dict.__len__
        True
        >>> class_attribute(dict, "__reduce_ex__") is None
        True
    """
    for base in cls.__mro__[:-1]:
        if name in vars(base):
            return vars(base)[name]
    return None
