"""Undoes changes that inline loading made to the dataset, usually a handle opened on first use.

A worker's changes to the dataset never reach the user's process. The first batches of
``num_workers="auto"`` are loaded in that process, though, and the attributes they set would be sent
to the workers of the next epoch: a handle that cannot be pickled, or a connection that all workers
would share. So these changes are recorded batch by batch, and undone before the dataset is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

_MAX_PARTS = 1000
"""Maximum number of objects to visit. More than this are data, not nested datasets."""
_ABSENT = object()


class DatasetChanges:
    """Attributes that inline loading set on the dataset and its parts."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._bound: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record attributes that are set inside the block. The user's own changes are kept."""
        before = [(part, dict(vars(part))) for part in _parts_of(self._dataset)]
        try:
            yield
        finally:
            for part, old in before:
                for name, value in vars(part).items():
                    if old.get(name, _ABSENT) is not value:
                        self._note(part, name, old.get(name, _ABSENT), value)

    def _note(self, part: Any, name: str, was: Any, value: Any) -> None:
        _, first, last = self._bound.get((id(part), name), (part, was, was))
        self._bound[id(part), name] = part, first if last is was else was, value

    def undo(self) -> None:
        """Undo the recorded changes, except attributes that the user has set again since."""
        for (_, name), (part, was, value) in self._bound.items():
            if vars(part).get(name, _ABSENT) is not value:
                continue
            if was is _ABSENT:
                del vars(part)[name]
            else:
                vars(part)[name] = was
        self._bound.clear()


def _parts_of(dataset: Any) -> list[Any]:
    """Return the dataset and the objects reachable from it that have attributes.

    Example:
        >>> from types import SimpleNamespace as Thing
        >>> inner = Thing(handle=None)
        >>> _parts_of(Thing(parts=[inner], name="x"))[-1] is inner
        True
    """
    found: dict[int, Any] = {}
    waiting = [dataset]
    while waiting and len(found) < _MAX_PARTS:
        part = waiting.pop()
        if type(part) in (list, tuple):
            waiting.extend(part[:_MAX_PARTS])
            continue
        if id(part) in found or issubclass(type(part), (ModuleType, FunctionType)):
            continue
        try:
            attributes = vars(part)
        except Exception:  # most objects have none, and user code may raise
            continue
        if type(attributes) is dict:
            found[id(part)] = part
            waiting.extend(attributes.values())
    return list(found.values())
