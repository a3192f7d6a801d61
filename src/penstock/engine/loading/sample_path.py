"""Finds the file of a sample, for the report on a bad one, without loading anything.

The error often says it itself. If not, datasets keep their files in a list as long as they are
themselves; a list of another length holds shards or folders, and says nothing about one sample.
Only what lies in the dataset is looked at: a property would be the user's code.
"""

from __future__ import annotations

import bisect
import inspect
import operator
import os
import re
import sys
import types
from typing import Any

from penstock.engine.memory.shared_list import SharedList

_NAMES = (
    *("samples", "imgs"),  # torchvision's folders: pairs of path and class
    *("im_files", "img_files", "image_files", "image_paths", "img_paths"),  # Ultralytics and kin
    *("paths", "files", "filenames", "file_paths"),
)
_MAX_DEPTH = 16
_MAX_LENGTH = 4096
_LOOKS_LIKE_ONE = re.compile(r"[/\\]|\.\w{1,8}$")
"""A separator or an ending: ``samples`` may as well be sentences, or names of classes."""
_FILE_NAME = re.compile(r"[\w.-]*\w\.[A-Za-z]\w{1,4}\b")
_MISSING = object()


def find_path(dataset: Any, index: Any, error: BaseException | None = None) -> str | None:
    """The file of sample ``index``, or None where it is not known. Never raises.

    Args:
        error: What loading it raised, if it did.

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
    except Exception:  # lengths, indices and paths of the user's own classes may do anything
        return None


def _names_another_file(error: BaseException | None, path: str) -> bool:
    """Does the error's text name files, and this is none of them? Then the dataset's list has
    another order than its samples, and the guess would accuse a good file."""
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
    """The dataset inside a part or a chain of datasets, and the index there."""
    inside, indices = _own(dataset, "dataset"), _own(dataset, "indices")
    if inside is not _MISSING and indices is not _MISSING:
        return inside, operator.index(indices[place])
    members, ends = _own(dataset, "datasets"), _own(dataset, "cumulative_sizes")
    if members is _MISSING or ends is _MISSING:
        return None
    place = range(ends[-1])[place]  # a negative one counts from the end
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
    """An attribute that is simply there: not computed by a property or a ``__getattr__``."""
    found = inspect.getattr_static(value, name, _MISSING)
    if isinstance(found, types.MemberDescriptorType):  # a slot
        return found.__get__(value)
    return _MISSING if hasattr(type(found), "__get__") else found


def _is_list(value: Any) -> bool:
    """Is it a list that answers at once? A class of the user's own may load what it gives."""
    if type(value) in (list, tuple, SharedList):
        return True
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and type(value) is numpy.ndarray
    return is_array and value.ndim == 1 and value.dtype.kind in "UO"


def _path_in(entry: Any) -> str | None:
    """The path in an element of the list: itself, or the first of a pair."""
    if isinstance(entry, (tuple, list)) and entry:
        entry = entry[0]
    path = _plain_path(entry)
    return path if path is not None and _LOOKS_LIKE_ONE.search(path) else None


def _plain_path(value: Any) -> str | None:
    if not isinstance(value, (str, bytes, os.PathLike)):
        return None
    path = str(os.fsdecode(value))
    return path if 0 < len(path) <= _MAX_LENGTH else None
