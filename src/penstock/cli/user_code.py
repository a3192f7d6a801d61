"""Finds the line of user code behind an error, skipping frames of libraries and Penstock.

Tested by ``tests/integration/cli/doctor/test_command.py``.
"""

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
    """Return True if the file is user code, not part of a library, Python or Penstock.

    Example:
        >>> is_users(os.__file__), is_users(__file__), is_users("train.py")
        (False, False, True)
    """
    if filename.startswith("<") or _INSTALLED.search(filename):
        return False
    return not filename.startswith((_OURS + os.sep, _STANDARD + os.sep))


def shown(filename: str) -> str:
    """Return the path relative to the working directory if it is inside, otherwise unchanged."""
    try:
        relative = os.path.relpath(filename)
    except ValueError:  # a different drive
        return filename
    return filename if relative.startswith("..") else relative


def place_of(error: BaseException) -> str | None:
    """Return the innermost user line of ``error``, such as ``data.py:57, in __getitem__``."""
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
    """Return the type and text of an exception in one line, even if its ``__str__`` fails.

    Example:
        >>> describe_error(KeyError("no label"))
        "KeyError: 'no label'"
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(str() of the exception failed)"
    kind = type(error).__name__
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    return f"{kind}: {text}" if text else kind


def last_line(error: BaseException) -> str:
    """Return the class and the last line of an error. Errors of workers end with the original one.

    Example:
        >>> last_line(ValueError("Caught ValueError in worker 0.\\nValueError: truncated"))
        'ValueError: truncated'
        >>> last_line(OSError("no such disk"))
        'OSError: no such disk'
    """
    line = (str(error).strip().splitlines() or [""])[-1]
    kind = type(error).__name__
    return line if kind in line.partition(":")[0] else f"{kind}: {line}"


def place_in_stack(dump: str) -> str | None:
    """Return the innermost user line in a dump written by ``faulthandler``.

    After a crash, it searches the thread that crashed. At a time limit, it searches the main
    thread, which comes last.

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
