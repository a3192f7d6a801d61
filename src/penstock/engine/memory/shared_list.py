"""SharedList: a read-only list in memory shared by all workers, with any start method."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import context
from typing import Any, TypeVar, overload

from penstock.engine.memory.shared_column import (
    ColumnWriter,
    ReadOnlyCollection,
    SharedColumn,
    abbreviated,
)

T = TypeVar("T")


class SharedList(ReadOnlyCollection, Sequence[T]):
    """An immutable list in flat memory shared by all worker processes.

    With a plain list of five million strings, each worker ends up with its own copy. In a forked
    worker, reading an object writes its reference count and so copies the page. Any other worker
    receives the list pickled. A SharedList is sent as a descriptor. It supports all read operations
    of a list. Slices are views, not copies. Each read returns a new object, so modifying an element
    after reading it does not change the list.

    Args:
        items: Any iterable, such as a generator. The elements are never all held as Python objects
            at the same time. ``str``, ``bytes``, ``int`` and ``float`` are stored directly. Other
            elements must be picklable by pickle or cloudpickle.

    Example:
        >>> from penstock import SharedList
        >>> names = SharedList(f"image-{i}.jpg" for i in range(1000))
        >>> len(names), names[-1], names[1:900:300]
        (1000, 'image-999.jpg', SharedList(['image-1.jpg', 'image-301.jpg', 'image-601.jpg']))
        >>> "image-7.jpg" in names
        True
    """

    __slots__ = ("__weakref__", "_column", "_places", "_read")
    _plain_name = "list"
    _mutators = frozenset(
        ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort")
    )

    def __init__(self, items: Iterable[T] = ()) -> None:
        writer = ColumnWriter()
        writer.extend(items)
        column = writer.finish()
        self._settle(column, range(column.map.count))

    def _settle(self, column: SharedColumn, places: range) -> None:
        self._column = column
        self._places = places
        self._read: Callable[[int], T] = column.read

    @property
    def nbytes(self) -> int:
        """Size of all elements in shared memory, in bytes, including the index."""
        return self._column.map.num_bytes

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T]: ...
    def __getitem__(self, index: Any) -> Any:
        try:
            return self._read(self._places[index])
        except TypeError:
            if isinstance(index, slice):
                return _view(self._column, self._places[index])
            if not hasattr(type(index), "__index__"):
                kind = type(index).__name__
                message = f"list indices must be integers or slices, not {kind}"
                raise TypeError(message) from None
            raise
        except IndexError:
            if -len(self._places) <= operator.index(index) < len(self._places):
                raise  # raised while unpickling the element
            raise IndexError("list index out of range") from None

    def __iter__(self) -> Iterator[T]:
        return map(self._read, self._places)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first position of ``value``, like ``list.index``."""
        for place in range(len(self))[start:stop]:
            item = self[place]
            if item is value or item == value:
                return place
        raise ValueError(f"{value!r} is not in list")

    def copy(self) -> list[T]:
        """Return a plain list with the same elements."""
        return list(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, SharedList)):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(a is b or a == b for a, b in zip(self, other, strict=True))

    def __add__(self, other: Any) -> SharedList[T]:
        if not isinstance(other, (list, SharedList)):
            return NotImplemented
        return SharedList(itertools.chain(self, other))

    def __radd__(self, other: Any) -> SharedList[T]:
        if not isinstance(other, list):
            return NotImplemented
        return SharedList(itertools.chain(other, self))

    def __repr__(self) -> str:
        return f"SharedList([{abbreviated(map(repr, self), len(self))}])"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_part = len(self._places) < self._column.map.count
        if is_part and context.get_spawning_popen() is None:
            whole: SharedList[T] = SharedList(self)  # leaves out elements outside the view
            return _view, (whole._column, whole._places)
        return _view, (self._column, self._places)


def _view(column: SharedColumn, places: range) -> SharedList[Any]:
    view: SharedList[Any] = SharedList.__new__(SharedList)
    view._settle(column, places)
    return view
