"""Forks this process and runs a function of :mod:`penstock.engine.worker` in the child.

    parent: fork_child("fork_server_main.forked_main", fd) -> ForkedChild
    child:  penstock.engine.worker.fork_server_main.forked_main(fd, parent's pid) -> os._exit

Call only if :func:`penstock.engine.parent.clean_process.why_unclean` returns None. No exception in
the child reaches the user's frames, which lie below it on the stack.

Tested by ``tests/faults/engine/worker/test_detach.py``.
"""

from __future__ import annotations

import contextvars
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, ClassVar

from penstock.engine.parent import clean_process
from penstock.engine.parent.ctrl_c import deferred_ctrl_c
from penstock.errors import StartFailed
from penstock.machine.native_threads import single_threaded_openblas, wait_for_threads


class ForkedChild:
    """A child process, with the part of ``subprocess.Popen`` that the fork server needs."""

    num_forks: ClassVar[int] = 0
    """Number of times that :func:`fork_child` forked this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped by other code; subprocess reports 0 as well
                self.returncode = 0
            else:
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        limit = time.monotonic() + timeout
        while True:
            code = self.poll()
            if code is not None:
                return code
            left = limit - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._sleep(left)

    def _sleep(self, limit_s: float) -> None:
        """Wait for the end of the process, or for a moment on kernels without pidfd."""
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            time.sleep(min(limit_s, 0.005))
            return
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(limit_s * 1000)
        finally:
            os.close(fd)

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_child(call: str, fd: int) -> ForkedChild:
    """Fork this process. The child runs ``call`` from ``engine.worker`` and exits.

    Raises:
        StartFailed: The fork failed, or the process has a thread that does not survive a fork.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, full, or not a stream
            stream.flush()
    try:
        with deferred_ctrl_c(), single_threaded_openblas():
            return ForkedChild(_fork(call, fd))
    except OSError as error:
        raise StartFailed(f"a fork failed ({error})") from error


def _fork(call: str, fd: int) -> int:
    parent, is_collecting = os.getpid(), gc.isenabled()
    gc.disable()  # no finalizer of an object of the user's may run in the child
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    ForkedChild.num_forks += 1
    try:
        pid = os.fork()
        if pid == 0:
            gc.freeze()
            contextvars.Context().run(_live, call, fd, parent, mask, is_collecting)
        num_threads = wait_for_threads(1)  # OpenBLAS has stopped its own
        if num_threads != 1:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise StartFailed(clean_process.describe_threads(num_threads - 1))
    finally:
        if pid == 0:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_collecting:
            gc.enable()
    return pid


def _live(call: str, fd: int, parent: int, mask: Any, is_collecting: bool) -> None:
    module, _, name = call.partition(".")
    try:
        if is_collecting:
            gc.enable()
        run = getattr(importlib.import_module(f"penstock.engine.worker.{module}"), name)
        run(fd, parent, mask)
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())  # sys.stderr may be the user's object
    finally:
        os._exit(1)
