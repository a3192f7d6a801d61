"""The fork server: a clean, single-threaded process that forks workers on request.

    parent ==control socket==> fork_server_main: import torch; wait
        "import" modules       ->  import them before the first fork
        "fork" + descriptors   ->  fork -> worker_main(channel, assignment)
        child exit             ->  ("exit", pid, status) to the parent

The parent's side is :mod:`penstock.engine.parent.fork_server`. The user's main module is never run.
The fork server and its workers exit when the parent does.

Tested by ``tests/faults/engine/parent/test_fork_server.py``.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.engine.memory import control_socket
from penstock.engine.memory.messages import WorkerAssignment
from penstock.engine.memory.shared_file import FileHandle
from penstock.engine.pickling.reloads import num_reloads
from penstock.engine.worker.detach import detach
from penstock.engine.worker.main import (
    end_process,
    exit_code_of,
    leave_ctrl_c_to_parent,
    shield_exit_handlers,
    worker_main,
)
from penstock.engine.worker.torch_templates import keep_generated_modules_in_memory

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.25


def forked_main(control_fd: int, parent: int, mask: set[int]) -> None:
    """Entry point of a fork server that was forked from the user's process.

    Args:
        mask: The signals that were blocked before the fork. All are blocked now.
    """
    detach(control_fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _num_reloads.update(num_reloads)  # as the parent counted them before the fork
    fork_server_main(control_fd, parent)


def fork_server_main(control_fd: int, parent_pid: int | None = None) -> None:
    """Run the fork server: import what workers need, then fork on request until disconnected."""
    control = control_socket.ControlSocket.from_fd(control_fd)
    leave_ctrl_c_to_parent()
    keep_generated_modules_in_memory()
    with _ending_with_parent(control):
        _prepare()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # pages of everything loaded so far stay shared with every worker
    parent_pid = parent_pid or os.getppid()
    parent = control_socket.watch_process(parent_pid)
    children: set[int] = set()
    try:
        control.send(("ready", os.getpid()))
        while True:
            is_request = control_socket.wait_readable(control.fileno(), wake_read, parent)
            if os.getppid() != parent_pid:
                break  # a forked child of the parent can keep the control socket open
            _reap(children, control)
            if is_request and not _serve_request(control, children, (wake_read, wake_write)):
                break
    except (OSError, EOFError, SystemExit):
        pass  # the parent is gone
    finally:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os._exit(0)


def _prepare() -> None:
    """Do once what every worker would do: import its modules, and find its generators."""
    import torch  # noqa: F401

    import penstock.engine.pickling.unpickling
    import penstock.engine.worker.loop
    import penstock.engine.worker.loop_choice  # noqa: F401
    from penstock.order.global_generators import numpy_generator_if_imported, python_generator
    from penstock.order.sample_randomness import seed_worker

    # torch keeps the stack of the call, and reads the sources of its frames.
    seed_worker(0, 0, waits_for_numpy=True)
    python_generator()
    numpy_generator_if_imported()


@contextmanager
def _ending_with_parent(control: Any) -> Iterator[None]:
    """Exit if the parent does while modules are imported, which takes seconds.

    Uses a timer. A thread would have to end before the first fork. The kernel's PR_SET_PDEATHSIG
    fires when the thread that started this process ends, even if the parent lives on.
    """
    parent = os.getppid()

    def look(*_: Any) -> None:
        if os.getppid() != parent or control.has_hung_up():
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _reap(children: set[int], control: Any) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in children:
            children.discard(pid)
            control.send(("exit", pid, os.waitstatus_to_exitcode(status)))


def _serve_request(control: Any, children: set[int], wake: tuple[int, int]) -> bool:
    received = control.receive()
    if received is None:
        return False
    (kind, body), fds = received
    if kind == "import":
        with _ending_with_parent(control):
            _import_all(*body)
        control.send(("imported", os.getpid()))
        return True
    has_moved, modules, path, payload = body
    if has_moved:  # the user has redirected stdout or stderr since
        for stream in (2, 1):
            fd = fds.pop()
            os.dup2(fd, stream)
            os.close(fd)
    with _ending_with_parent(control):
        answer, pid = _import_all(modules, path), 0
    fork_server = os.getpid()
    if answer is None:
        try:
            pid = os.fork()
        except OSError as error:
            answer = ("refused", f"fork failed: {error}")
    if answer is not None:
        control.send(answer)
        for fd in fds:
            os.close(fd)
        return True
    if pid == 0:
        for fd in wake:
            os.close(fd)
        signal.set_wakeup_fd(-1)
        control.close()
        _become_worker(payload, fds, fork_server)
    for fd in fds:
        os.close(fd)
    children.add(pid)
    control.send(("forked", pid))
    return True


def _import_all(modules: Any, path: list[str]) -> tuple[str, str] | None:
    """Import the user's modules once for all workers. Returns why this process must not fork."""
    for name, count in modules:
        if _num_reloads.setdefault(name, count) != count:
            return "stale", f"{name} was reloaded after the fork server imported it"
    new = [name for name, _ in modules if name not in sys.modules]
    if new:
        sys.path[:] = path
    import importlib

    for name in new:
        try:
            importlib.import_module(name)
        except BaseException:
            continue  # the worker raises the same error, and reports where
    try:
        num_threads = len(os.listdir("/proc/self/task"))
    except OSError as error:
        return "tainted", f"counting its threads failed ({error})"
    if num_threads != 1:
        reason = f"importing {', '.join(new) or 'torch'} started {num_threads - 1} thread(s)"
        return "tainted", reason
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "tainted", f"importing {', '.join(new)} initialized the GPU"
    return None


_num_reloads: dict[str, int] = {}
"""How often the parent had reloaded each module when it was imported here."""


def _become_worker(body: bytes, fds: list[int], fork_server: int) -> None:
    """Turn a forked child into a worker, and exit when it is done."""

    def become() -> None:
        import ctypes
        from multiprocessing import connection, util

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != fork_server:  # it exited before PDEATHSIG was set
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        shield_exit_handlers()
        util._finalizer_registry.clear()  # type: ignore[attr-defined]
        util._run_after_forkers()  # type: ignore[attr-defined]
        channel = connection.Connection(fds[0])
        assignment = _place_fds(pickle.loads(body), fds)
        worker_main(channel, assignment, fds[3:])

    end_process(exit_code_of(become))


def _place_fds(assignment: WorkerAssignment, fds: list[int]) -> WorkerAssignment:
    """Return the assignment with the received descriptor numbers filled in."""
    return assignment._replace(
        memory=FileHandle(fd=fds[1]),
        objects=assignment.objects._replace(handle=FileHandle(fd=fds[2])),
    )
