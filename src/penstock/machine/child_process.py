"""How do we ask something that may never answer? A vendor's tool or library, within a limit.

A driver in a bad state makes its tool hang, and the tool's children with it. Whoever asks here
gets an answer or a :class:`NoAnswer` with the reason, no later than the limit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")

MAX_ANSWER_BYTES = 1 << 20
"""No description of a computer is longer; a tool that prints without end is stopped here."""


class NoAnswer(Exception):
    """Asked, and got nothing that can be used; the text says why."""


class NotHere(NoAnswer):
    """There is nobody to ask: the tool or the library is not on this machine."""


class TookTooLong(NoAnswer):
    """It is here, and did not answer within the limit."""


def ask_tool(command: Sequence[str], limit_s: float) -> str:
    """What does a tool print? It and its children are dead after ``limit_s``.

    Raises:
        NotHere: There is no such program.
        TookTooLong: It had not finished by then.
        NoAnswer: It failed, or printed more than a description.

    Example:
        >>> import sys
        >>> ask_tool([sys.executable, "-c", "print('hello')"], 30.0).strip()
        'hello'
    """
    name = os.path.basename(command[0])
    program = shutil.which(command[0])
    if program is None:
        raise NotHere(f"{name} is not installed")
    process = _start([program, *command[1:]], name)
    printed, exit_code = _listen(process, name, limit_s)
    if exit_code is None and len(printed) <= MAX_ANSWER_BYTES:
        raise TookTooLong(f"{name} did not answer in {limit_s:g} s")
    if len(printed) > MAX_ANSWER_BYTES:
        raise NoAnswer(f"{name} printed more than {MAX_ANSWER_BYTES} bytes")
    if exit_code != 0:
        raise NoAnswer(f"{name} failed with exit code {exit_code}")
    return printed.decode("utf-8", errors="replace")


def _listen(
    process: subprocess.Popen[bytes], name: str, limit_s: float
) -> tuple[bytes, int | None]:
    """What a tool printed, and how it ended; None if it had to be killed."""
    deadline_s = time.monotonic() + limit_s
    printed: list[bytes] = []
    pipe = process.stdout
    assert pipe is not None
    # A thread reads, because a pipe cannot be read with a limit on Windows.
    reader = threading.Thread(
        target=lambda: printed.append(pipe.read(MAX_ANSWER_BYTES + 1)),
        name=f"penstock-asks-{name}",
        daemon=True,
    )
    reader.start()
    reader.join(limit_s)
    exit_code = None
    if printed and len(printed[0]) <= MAX_ANSWER_BYTES:
        try:
            exit_code = process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # it closed its output and goes on
    if exit_code is None:
        _end(process)
    reader.join(1.0)
    if not reader.is_alive():  # else: a grandchild in a session of its own holds the pipe
        pipe.close()
    return b"".join(printed), exit_code


def _start(command: list[str], name: str) -> subprocess.Popen[bytes]:
    """Start a tool where it can be ended with all its children, and shows no window."""
    options: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        options = {"creationflags": subprocess.CREATE_NO_WINDOW}
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **options,
        )
    except OSError as error:
        raise NoAnswer(f"{name} could not be started: {error}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a tool and what it started, and collect it."""
    if sys.platform == "win32":
        _end_tree(process.pid)
    else:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its session has its pid for a name
        except (ProcessLookupError, PermissionError):
            pass  # it ended by itself, and left nobody
    process.kill()
    process.wait()


def _end_tree(pid: int) -> None:
    """Kill the children of a process where there are no process groups."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return
    for child in children:
        try:
            child.kill()
        except psutil.Error:
            pass  # it was faster


def ask_library(question: Callable[[], Answer], limit_s: float, name: str) -> Answer:
    """What does a function of a foreign library answer? Raise ``TookTooLong`` after ``limit_s``.

    A call into a driver cannot be interrupted; one that hangs is left behind in a daemon thread.

    Example:
        >>> ask_library(lambda: 6 * 7, 30.0, "arithmetic")
        42
    """
    outcome: list[tuple[Answer | None, BaseException | None]] = []

    def ask() -> None:
        try:
            outcome.append((question(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=ask, name=f"penstock-asks-{name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise TookTooLong(f"{name} did not answer in {limit_s:g} s")
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
