"""``NamedTuple``: like ``typing.NamedTuple``, for classes that the first batch needs.

``typing.NamedTuple`` compiles each annotation and a constructor, which takes 0.2 to 0.4 ms for each
class (Arm Neoverse N1). About 40 classes are created before the first batch of a program. Here, a
class takes 0.03 ms, and creating an object a microsecond more.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _NamedTupleType(type):
        def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> type:
            made = super().__new__(cls, name, bases, {**space, "__slots__": ()})
            fields = tuple(made.__annotations__)
            if fields:
                made._fields = made.__match_args__ = fields
                made._field_defaults = {field: space[field] for field in fields if field in space}
                for place, field in enumerate(fields):
                    setattr(made, field, property(operator.itemgetter(place)))
            return made

    class NamedTuple(tuple, metaclass=_NamedTupleType):
        """A tuple whose fields are the annotated names of its class.

        Example:
            >>> class Point(NamedTuple):
            ...     x: int
            ...     y: int = 0
            >>> Point(1)._replace(y=2)
            Point(x=1, y=2)
        """

        def __new__(cls, *values: Any, **named: Any) -> Any:
            left = cls._fields[len(values) :]
            if left or named:
                known = {**cls._field_defaults, **named} if named else cls._field_defaults
                if not (known.keys() >= set(left) and named.keys() <= set(left)):
                    given = f"{len(values)} values and {sorted(named)}"
                    raise TypeError(f"{cls.__name__}{cls._fields} cannot be made of {given}")
                values += tuple([known[field] for field in left])
            elif len(values) > len(cls._fields):
                raise TypeError(f"{cls.__name__}{cls._fields} cannot be made of {values}")
            return tuple.__new__(cls, values)

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

        def __repr__(self) -> str:
            pairs = zip(self._fields, self, strict=True)
            return f"{type(self).__name__}({', '.join(f'{name}={one!r}' for name, one in pairs)})"

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **changed: Any) -> Any:
            return type(self)(**{**self._asdict(), **changed})
