"""Runs child processes that may hang, crash or print arbitrary output.

::

    this process                                 the child, in its own session
    ChildProcess(command, send=b"...")  -- stdin -->    reads until end of file
    read(limit_s), read_line(limit_s)   <-- stdout --   prints, or hangs
    wait(limit_s)                       <-- exit code   or a signal: ``signal_name``
    end of the ``with`` block           -- SIGKILL -->  the child and all its descendants

Used by :mod:`penstock.machine.vendor_tools`, the doctor's trial runs of user code, the probes of a
convolution library, and the ``verify`` run in a new interpreter.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import IO, Any, Literal

_PIECE_BYTES = 1 << 16
_POLL_S = 0.05
"""How often a reader checks whether a silent child has exited."""
_KILLED_S = 1.0
"""How long a killed process can take to exit. A process stuck inside a driver never exits."""
_unreaped: list[subprocess.Popen[bytes]] = []
"""Killed processes that had not exited in time. Without a reference, Python warns about them."""
_PARENT_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1  # Linux: the signal that the kernel sends when the parent exits

# Run by a Python child. The arguments are the parent's sys.path, so that both find the same
# packages, then "module:function" and the function's arguments.
_BOOT = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module, _, function = sys.argv[2].partition(":")
getattr(importlib.import_module(module), function)(*sys.argv[3:])
"""


def python_command(function: str, *arguments: str) -> list[str]:
    """Return the command that calls a function in a new interpreter with the same ``sys.path``.

    Args:
        function: The function, as ``"package.module:function"``.
        arguments: The arguments of the function.

    Example:
        >>> with ChildProcess(python_command("builtins:print", "hello")) as child:
        ...     child.read_line(limit_s=60.0)
        'hello'
    """
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    return [sys.executable, "-c", _BOOT, paths, function, *arguments]


class ChildProcess:
    """A child process. The end of the ``with`` block kills it and all its descendants.

    Args:
        command: The program and its arguments.
        reads: The outputs to read. Other outputs are discarded.
        send: The content of its standard input. None for a pipe that :meth:`write` writes to.
        environ: Variables added to this process's environment.

    Raises:
        OSError: The program could not be started.

    Example:
        >>> with ChildProcess([sys.executable, "-c", "print(input() * 2)"], send=b"ab") as child:
        ...     child.read_line(limit_s=60.0), child.wait(limit_s=60.0)
        ('abab', 0)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        reads: Literal["stdout", "stderr", "both"] = "stdout",
        send: bytes | None = b"",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        _unreaped[:] = [one for one in _unreaped if one.poll() is None]
        options: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
            options = {"creationflags": flags}
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        source = pipe if send is None else nothing
        with _file_of(send) if send else nullcontext(source) as given:
            self._process = subprocess.Popen(
                command,
                stdin=given,
                stdout=nothing if reads == "stderr" else pipe,
                stderr={"stdout": nothing, "stderr": pipe, "both": subprocess.STDOUT}[reads],
                env={**os.environ, **(environ or {})},
                **options,
            )
        self._pipe: Any = self._process.stdout or self._process.stderr
        self._pieces: queue.Queue[bytes] = queue.Queue()
        self._unread, self._is_over, self._is_released = b"", False, False
        # A thread reads, because Windows cannot read a pipe with a timeout.
        self._reader = threading.Thread(
            target=self._read_pipe, name="penstock-child-reader", daemon=True
        )
        self._reader.start()

    def write(self, text: bytes) -> None:
        """Write to the standard input of a child that reads it. This waits if the pipe is full."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def read(self, limit_s: float) -> bytes:
        """Return the next piece of output as soon as it arrives, or ``b""`` at the end.

        Raises:
            TimeoutError: No output arrived within ``limit_s``.
        """
        deadline_s = time.monotonic() + limit_s
        while not self._is_over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the process printed nothing for {limit_s:g} s")
            try:
                piece = self._pieces.get(timeout=min(left_s, _POLL_S))
            except queue.Empty:
                if self._process.poll() is not None:
                    self._end_output()
            else:
                self._is_over = not piece
                return piece
        return b""

    def read_line(self, limit_s: float) -> str | None:
        """Return the next line of output without its line ending, or None at the end.

        Raises:
            TimeoutError: No complete line arrived within ``limit_s``.
        """
        deadline_s = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            piece = self.read(deadline_s - time.monotonic())
            self._unread += piece
            if not piece:
                break
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("utf-8", errors="replace").rstrip("\r")

    def wait(self, limit_s: float) -> int:
        """Wait for the child and return its exit code, which is negative if a signal killed it.

        Raises:
            TimeoutError: The child did not exit within ``limit_s``.
        """
        try:
            return self._process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the process did not exit within {limit_s:g} s") from error

    def finish(self, limit_s: float, keep_bytes: int) -> tuple[int | None, str]:
        """Return the exit code (None at the time limit) and the last ``keep_bytes`` of output."""
        deadline_s = time.monotonic() + limit_s
        printed = b""
        exit_code = None
        with suppress(TimeoutError):
            while piece := self.read(deadline_s - time.monotonic()):
                printed = (printed + piece)[-keep_bytes:]
            exit_code = self.wait(deadline_s - time.monotonic())
        return exit_code, printed.decode("utf-8", errors="replace")

    def kill(self) -> None:
        """Kill the child and its descendants."""
        if sys.platform == "win32":
            _kill_children(self._process.pid)
        else:
            with suppress(ProcessLookupError, PermissionError):  # all of them have exited
                os.killpg(self._process.pid, signal.SIGKILL)  # the group ID is the child's PID
        self._process.kill()

    def release(self) -> subprocess.Popen[bytes]:
        """Let a child that has closed its output run on after the ``with`` block."""
        self._is_released = True
        return self._process

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_released:
            self.kill()
            try:
                self._process.wait(_KILLED_S)
            except subprocess.TimeoutExpired:
                _unreaped.append(self._process)
        if self._process.stdin is not None:
            with suppress(OSError):  # what the child did not read
                self._process.stdin.close()
        self._reader.join(_KILLED_S)
        if not self._reader.is_alive():  # otherwise a grandchild in its own session holds the pipe
            self._pipe.close()

    def _read_pipe(self) -> None:
        while piece := self._pipe.read1(_PIECE_BYTES):
            self._pieces.put(piece)
        self._pieces.put(b"")

    def _end_output(self) -> None:
        """End the output of a child that has exited. Its descendants may hold the pipe open."""
        self.kill()
        self._reader.join(_KILLED_S)
        if self._reader.is_alive():
            self._pieces.put(b"")


def _file_of(text: bytes) -> IO[bytes]:
    """Return a file with this content. Unlike a pipe, it cannot block if the child never reads."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text)
    file.seek(0)
    return file


def _kill_children(pid: int) -> None:
    """Kill the children of a process on systems without process groups."""
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):  # it exited first
                child.kill()


def signal_name(exit_code: int) -> str:
    """Return the name of the signal in an exit code, or ``""`` if no signal ended the process.

    Example:
        >>> signal_name(-15), signal_name(-99), signal_name(1)
        ('SIGTERM', 'signal 99', '')
    """
    if exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


# In the child


def watched_parent(parent: int) -> Callable[[], bool]:
    """Return a function that checks whether the parent process is still running."""
    import psutil

    try:
        return psutil.Process(parent).is_running
    except psutil.Error:  # it has exited, or there is no /proc
        if sys.platform == "win32":
            return lambda: False
    return lambda: os.getppid() == parent


def end_with_parent(parent: int, clean_up: Callable[[], None] | None = None) -> None:
    """Exit this process when its parent exits. A killed parent cannot stop its children.

    Args:
        parent: Process ID of the parent.
        clean_up: Called before this process exits. The descendants of this process are then
            killed too.
    """
    if sys.platform == "linux" and clean_up is None:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no thread: we may fork
        if os.getppid() != parent:
            os._exit(1)  # the parent was killed during our start
        return
    is_running = watched_parent(parent)

    def watch() -> None:
        while is_running():
            time.sleep(_PARENT_POLL_S)
        if clean_up is not None:
            clean_up()
        if sys.platform != "win32" and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-watch-parent", daemon=True).start()
