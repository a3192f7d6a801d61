"""Safe access to attributes of the user's objects.

A class may define a ``__getattr__`` or ``__getattribute__`` that forwards every name to another
object, returns a value for every name, or raises any exception. The functions here never fail
because of this, and they do not return an attribute of the wrong object.
"""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in ``__dict__`` and in slots without calling any code of the class.

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
        if "__slots__" not in vars(cls):  # skips members of C classes, which users do not set
            continue
        for name, member in list(vars(cls).items()):
            if isinstance(member, MemberDescriptorType):
                try:
                    found[name] = member.__get__(value, cls)
                except (AttributeError, TypeError):
                    pass  # a slot without a value
    return found


def instance_dict(value: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, or an empty dict if it has none.

    Example:
        >>> from types import SimpleNamespace
        >>> instance_dict(SimpleNamespace(a=1)), instance_dict(7)
        ({'a': 1}, {})
    """
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # no __dict__, or a user-defined property that raises
        return {}
    return found if isinstance(found, dict) else {}


def own_slots(value: Any) -> dict[str, Any]:
    """Return the slots of an object that have a value, by name.

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
            if name.startswith("__") and not name.endswith("__"):  # private names are mangled
                name = f"_{cls.__name__.lstrip('_')}{name}"
            member = vars(cls).get(name)
            if isinstance(member, MemberDescriptorType):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:
                    continue  # a slot without a value
    return found


def probe(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or ``default`` if access raises any exception.

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
    """Return True if the dataset's class defines this method and it matches ``__getitem__``.

    If a subclass inherits the method but overrides ``__getitem__``, the method is ignored, because
    it would return different samples. A method found only through ``__getattr__`` (a wrapper that
    forwards to an inner dataset) is ignored for the same reason.

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
    """Return the attribute that a class or its bases define, ignoring ``object``, or None.

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
