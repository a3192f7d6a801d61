"""``penstock.reopenable``: opens a handle and records the call, so that each worker repeats it.

Some libraries do not expose how a handle was opened. A video decoder, for example, has neither its
path nor its options. The recorded call is kept as long as the handle exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from penstock.errors import BadArgument
from penstock.named_tuple import NamedTuple

P = ParamSpec("P")
T = TypeVar("T")


class OpeningCall(NamedTuple):
    """The call that opened a handle."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


_calls: dict[int, tuple[weakref.ref[Any], OpeningCall]] = {}
"""Calls by the id of the handle. The weak reference removes the entry with the handle."""


def reopenable(open_handle: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``open_handle(*args, **kwargs)``. Workers call it again instead of sending the handle.

    Use it for handles in a dataset that workers cannot open by themselves, such as
    ``penstock.reopenable(VideoDecoder, "clip.mp4", seek_mode="approximate")`` and
    ``penstock.reopenable(pq.ParquetFile, "part.parquet")``. The handle is an ordinary object of its
    library. Its position and other changes made after opening are not sent.

    Raises:
        BadArgument: The handle cannot be referenced weakly, so the call cannot be recorded.

    Example:
        >>> import penstock
        >>> class Codes:
        ...     def __init__(self, codes):
        ...         self.codes = codes
        >>> handle = penstock.reopenable(Codes, [3, 1, 2])
        >>> handle.codes
        [3, 1, 2]
    """
    handle = open_handle(*args, **kwargs)
    key = id(handle)
    try:
        reference = weakref.ref(handle, lambda _: _calls.pop(key, None))
    except TypeError:
        kind = type(handle)
        raise BadArgument(
            f"penstock.reopenable() cannot record how a {kind.__module__}.{kind.__qualname__} is "
            "opened, because objects of this class cannot be referenced weakly",
            remedy="open it on first use in __getitem__, and keep None in __init__",
        ) from None
    _calls[key] = (reference, OpeningCall(open_handle, args, dict(kwargs)))
    return handle


def opening_call(obj: Any) -> OpeningCall | None:
    """Return the call that opened a handle, if it was recorded."""
    found = _calls.get(id(obj))
    return None if found is None or found[0]() is not obj else found[1]


def reopen(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Any) -> Any:
    """Repeat a recorded call in a worker."""
    return reopenable(function, *arguments, **keywords)
