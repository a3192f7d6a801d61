"""Runs vendors' tools and library calls with a time limit.

A driver in a bad state makes its tool and the tool's children hang. The caller gets a result, or
:class:`ToolFailed` with the reason, within the limit.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.machine.child_process import ChildProcess

Answer = TypeVar("Answer")

MAX_OUTPUT_BYTES = 1 << 20
"""Maximum size of a tool's output. A tool that prints more is killed."""


class ToolFailed(Exception):
    """A tool or a library gave no usable answer. The message says why."""


class ToolMissing(ToolFailed):
    """The tool or the library is not installed."""


class ToolTimedOut(ToolFailed):
    """The tool or the library did not answer within the limit."""


def run_tool(command: Sequence[str], limit_s: float) -> str:
    """Run a tool and return its output. It and its children are killed after ``limit_s``.

    Raises:
        ToolMissing: The program is not installed.
        ToolTimedOut: It did not finish in time.
        ToolFailed: It failed, or printed too much.

    Example:
        >>> import sys
        >>> run_tool([sys.executable, "-c", "print('hello')"], 30.0).strip()
        'hello'
    """
    name = os.path.basename(command[0])
    program = shutil.which(command[0])
    if program is None:
        raise ToolMissing(f"{name} is not installed")
    try:
        child = ChildProcess([program, *command[1:]])
    except OSError as error:
        raise ToolFailed(f"{name} could not be started: {error}") from error
    deadline_s = time.monotonic() + limit_s
    printed = b""
    try:
        with child:
            while piece := child.read(deadline_s - time.monotonic()):
                printed += piece
                if len(printed) > MAX_OUTPUT_BYTES:
                    raise ToolFailed(f"{name} printed more than {MAX_OUTPUT_BYTES} bytes")
            exit_code = child.wait(deadline_s - time.monotonic())
    except TimeoutError:
        raise ToolTimedOut(f"{name} did not answer in {limit_s:g} s") from None
    if exit_code != 0:
        raise ToolFailed(f"{name} failed with exit code {exit_code}")
    return printed.decode("utf-8", errors="replace")


def call_library(question: Callable[[], Answer], limit_s: float, name: str) -> Answer:
    """Return the result of a call into a vendor's library, or raise ``ToolTimedOut``.

    A call into a driver cannot be interrupted. A call that hangs is left in a daemon thread.

    Example:
        >>> call_library(lambda: 6 * 7, 30.0, "arithmetic")
        42
    """
    outcome: list[tuple[Answer | None, BaseException | None]] = []

    def ask() -> None:
        try:
            outcome.append((question(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=ask, name=f"penstock-library-{name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise ToolTimedOut(f"{name} did not answer in {limit_s:g} s")
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
