"""Finds the user's own line behind an error: frames of libraries and of ours are passed over."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_STACK_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_MAX_TEXT = 300


def is_users(filename: str) -> bool:
    """Is this file the user's, and not a library's, Python's or ours?

    Example:
        >>> is_users(os.__file__), is_users(__file__), is_users("train.py")
        (False, False, True)
    """
    if filename.startswith("<") or _INSTALLED.search(filename):
        return False
    return not filename.startswith((_OURS + os.sep, _STANDARD + os.sep))


def shown(filename: str) -> str:
    """A path as short as it can be said from here."""
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # another drive
        return filename
    return filename if relative.startswith("..") else relative


def place_of(error: BaseException) -> str | None:
    """``data.py:57, in __getitem__``: the innermost line of the user's that led to ``error``."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_users(frame.filename) and frame.lineno
    ]
    if not frames:
        return None
    last = frames[-1]
    inside = "" if last.name == "<module>" else f", in {last.name}"
    return f"{shown(last.filename)}:{last.lineno}{inside}"


def describe_error(error: BaseException) -> str:
    """Type and text of an exception in one line, whatever its own ``__str__`` does.

    Example:
        >>> describe_error(KeyError("no label"))
        "KeyError: 'no label'"
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its text cannot be shown)"
    kind = type(error).__name__
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    return f"{kind}: {text}" if text else kind


def place_in_stack(dump: str) -> str | None:
    """The innermost line of the user's in what ``faulthandler`` wrote.

    Of a crash it names the thread that crashed; at a time limit, the main thread comes last.

    Example:
        >>> place_in_stack('Thread 0x1 (most recent call first):\\n'
        ...                '  File "<string>", line 1 in x\\n  File "data.py", line 7 in load\\n')
        'data.py:7, in load'
    """
    crashed = re.split(r"(?m)^Current thread .*$", dump)[1:]
    stacks = re.split(r"(?m)^Thread .*$", crashed[0] if crashed else dump)
    for line in stacks[0 if crashed else -1].splitlines():
        match = _STACK_LINE.match(line)
        if match and is_users(match["file"]):
            return f"{shown(match['file'])}:{match['line']}, in {match['function']}"
    return None
