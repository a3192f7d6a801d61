"""Finds the file of a bad sample for the report, without loading anything.

The error often contains the file name. Otherwise, the dataset is searched for a list of files with
the same length as the dataset. A list of any other length holds shards or folders and does not
identify one sample. Only plain attributes are read, because a property would run user code.
"""

from __future__ import annotations

import bisect
import dis
import inspect
import operator
import os
import re
import sys
import traceback
import types
from contextlib import suppress
from typing import Any

from penstock.engine.memory.shared_list import SharedList

_NAMES = (
    *("samples", "imgs"),  # torchvision folders: pairs of path and class
    *("im_files", "img_files", "image_files", "image_paths", "img_paths"),  # Ultralytics
    *("paths", "files", "filenames", "file_paths", "items", "images"),
)
_MAX_DEPTH = 16
_MAX_LENGTH = 4096
_LOOKS_LIKE_ONE = re.compile(r"[/\\]|\.\w{1,8}$")
"""A separator or an extension. ``samples`` may also hold sentences or class names."""
_FILE_NAME = re.compile(r"[\w.-]*\w\.[A-Za-z]\w{1,4}\b")
_MISSING = object()


def find_path(dataset: Any, index: Any, error: BaseException | None = None) -> str | None:
    """Return the file of sample ``index``, or None if it is unknown. Never raises.

    Args:
        error: The exception raised when the sample was loaded, if any.

    Example:
        >>> class Folder:
        ...     samples = [("cat/1.jpg", 0), ("dog/2.jpg", 1)]
        ...     def __len__(self):
        ...         return len(self.samples)
        >>> find_path(Folder(), 1)
        'dog/2.jpg'
        >>> find_path(Folder(), 1, FileNotFoundError(2, "No such file", "dog/2.png"))
        'dog/2.png'
    """
    try:
        path = _in_error(error)
        if path is not None:
            return path
        path = _in_dataset(dataset, index)
        return None if path is None or _names_another_file(error, path) else path
    except Exception:  # user classes for lengths, indices and paths can raise anything
        return None


def note_sample(error: Exception, dataset: Any) -> None:
    """Add the index and the file of the sample to an error that ``dataset[i]`` raised.

    Called where samples are loaded in the training process. The index is read from the traceback,
    so that samples that load cost nothing.
    """
    index = _index_in(error, dataset)
    if index is None or hasattr(error, "sample_index"):  # set by what loads many samples in one
        return
    path = find_path(dataset, index, error)
    with suppress(Exception):  # a class of the user may forbid it
        error.sample_index = index  # type: ignore[attr-defined]
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"while loading sample {index}{f' ({path})' if path else ''}")


def _index_in(error: Exception, dataset: Any) -> int | None:
    """Return the argument of the call of ``dataset[i]`` in the traceback, or None if unknown."""
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if code is None or code.co_argcount < 2:
        return None
    name = code.co_varnames[1]
    for step in dis.get_instructions(code):
        changed = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith(("STORE_", "DELETE_")) and name in changed:
            return None  # the value may be that of another sample
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is code and frame.f_locals.get(code.co_varnames[0]) is dataset:
            index = frame.f_locals.get(name)
            return index if type(index) is int else None
    return None


def _names_another_file(error: BaseException | None, path: str) -> bool:
    """Return True if the error's text names files, but not this one.

    The dataset's list then has a different order than its samples, and a good file would be
    reported.
    """
    named = _FILE_NAME.findall("" if error is None else str(error)[:_MAX_LENGTH])
    named = [name for name in named if not name.endswith((".py", ".pyx", ".c", ".cpp"))]  # code
    return bool(named) and os.path.basename(path) not in named


def _in_error(error: BaseException | None) -> str | None:
    for _ in range(_MAX_DEPTH):
        if error is None:
            return None
        if isinstance(error, OSError):
            path = _plain_path(error.filename)
            if path is not None:
                return path
        error = error.__cause__ or error.__context__
    return None


def _in_dataset(dataset: Any, index: Any) -> str | None:
    place = operator.index(index)
    for _ in range(_MAX_DEPTH):
        inner = _one_in(dataset, place)
        if inner is None:
            return _in_lists(dataset, place)
        dataset, place = inner
    return None


def _one_in(dataset: Any, place: int) -> tuple[Any, int] | None:
    """Return the dataset inside a subset or concatenation, and the index in it, or None."""
    inside, indices = _own(dataset, "dataset"), _own(dataset, "indices")
    if inside is not _MISSING and indices is not _MISSING:
        return inside, operator.index(indices[place])
    members, ends = _own(dataset, "datasets"), _own(dataset, "cumulative_sizes")
    if members is _MISSING or ends is _MISSING:
        return None
    place = range(ends[-1])[place]  # a negative index counts from the end
    number = bisect.bisect_right(ends, place)
    return members[number], place - (ends[number - 1] if number else 0)


def _in_lists(dataset: Any, place: int) -> str | None:
    length: int | None = None
    for name in _NAMES:
        files = _own(dataset, name)
        if not _is_list(files):
            continue
        if length is None:
            length = len(dataset)
        if len(files) == length and -length <= place < length:
            path = _path_in(files[place])
            if path is not None:
                return path
    return None


def _own(value: Any, name: str) -> Any:
    """Return a plain attribute, not one computed by a property or ``__getattr__``."""
    found = inspect.getattr_static(value, name, _MISSING)
    if isinstance(found, types.MemberDescriptorType):  # a slot
        return found.__get__(value)
    return _MISSING if hasattr(type(found), "__get__") else found


def _is_list(value: Any) -> bool:
    """Return True for lists with fast access. A user's own class may load data on access."""
    if type(value) in (list, tuple, SharedList):
        return True
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and type(value) is numpy.ndarray
    return is_array and value.ndim == 1 and value.dtype.kind in "UO"


def _path_in(entry: Any) -> str | None:
    """Return the path in a list element: the element itself, or the first item of a pair."""
    if isinstance(entry, (tuple, list)) and entry:
        entry = entry[0]
    path = _plain_path(entry)
    return path if path is not None and _LOOKS_LIKE_ONE.search(path) else None


def _plain_path(value: Any) -> str | None:
    if not isinstance(value, (str, bytes, os.PathLike)):
        return None
    path = str(os.fsdecode(value))
    return path if 0 < len(path) <= _MAX_LENGTH else None
