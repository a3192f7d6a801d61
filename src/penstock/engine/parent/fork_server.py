"""The parent's side of the fork server, a clean process that forks workers in milliseconds.

Each process has one fork server. It is started with the first loader that has workers and stays
warm from then on. It has imported torch, has one thread and has never used a GPU. So forking it is
safe even if the parent has threads or a GPU context, or runs in a notebook.

The fork server is a fork of this process if that is safe at the time. Otherwise it is a fresh
Python, which imports torch first. See :mod:`penstock.engine.parent.clean_process`.
"""

from __future__ import annotations

import atexit
import errno
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from penstock.engine.memory.control_socket import ControlSocket
from penstock.engine.parent.clean_process import MAX_DATA_BYTES, count_data_bytes, why_unclean
from penstock.engine.parent.ctrl_c import deferred_ctrl_c
from penstock.engine.parent.forked_child import ForkedChild, fork_child
from penstock.engine.pickling.environment import THREAD_LIMITS, import_path
from penstock.engine.pickling.inherited_arrays import ServerMemory, find_arrays
from penstock.engine.pickling.reloads import count_all_reloads
from penstock.errors import StartFailed
from penstock.importing import importing
from penstock.machine.host import can_start_python, has_proc, is_gil_enabled

if TYPE_CHECKING:
    from penstock.engine.memory.messages import WorkerAssignment
if sys.platform == "win32":  # pragma: no cover
    from penstock.engine.memory import windows_handles as windows

START_LIMIT_S = 120.0
"""Time limit for a fork server to import torch. Usually 2 s; a minute on a cold network disk."""
ANSWER_LIMIT_S = 120.0
"""Time limit for an answer. The fork server may import the user's modules first."""
STOPPED_LIMIT_S = 10.0
"""A debugger or ``kill -STOP`` may stop the fork server for a moment."""
_log = logging.getLogger("penstock")


class ForkedWorker:
    """A worker forked by the fork server, with the interface of multiprocessing's Process."""

    def __init__(self, fork_server: ForkServer, pid: int, name: str) -> None:
        self._fork_server = fork_server
        self._code: int | None = None
        self.pid = pid
        self.name = name
        self.daemon = True

    @property
    def exitcode(self) -> int | None:
        return self._wait(0.0)

    def _wait(self, wait_s: float) -> int | None:
        if self._code is None:
            code = self._fork_server.exit_code(self.pid, wait_s)
            if code is not None:  # None is not kept: another thread may just have read the code
                self._code = code
                self._fork_server.forget(self.pid)
        return self._code

    @property
    def is_orphaned(self) -> bool:
        """True if the fork server is gone and this worker died with it."""
        return self._fork_server.is_lost

    def is_alive(self) -> bool:
        return self.exitcode is None and not self._is_zombie()

    def _is_zombie(self) -> bool:
        """Return True if it has exited, but a stopped or busy fork server has not reported it."""
        import psutil  # on first use, because the import takes 10 ms

        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False  # already reaped, and the report is on its way

    def join(self, timeout: float | None = None) -> None:
        """Wait for the worker to exit. Without a timeout, also return if the fork server dies."""
        limit = time.monotonic() + timeout if timeout is not None else None
        while self._wait(0.2 if limit is None else limit - time.monotonic()) is None:
            if limit is not None and time.monotonic() >= limit:
                return

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.exitcode is None:  # not reaped yet, so the pid has not been reused
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The parent's end of one fork server process. All methods are thread-safe."""

    def __init__(self, without: frozenset[str] = frozenset(), dataset: Any = None) -> None:
        inherited = find_arrays(dataset)
        self.why_fresh: str | None = _why_never_fork or why_unclean(inherited.own_bytes)
        """Why the fork server is a fresh Python. None for a fork of this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control = ControlSocket(ours)
        self._without = without
        self._streams = _identify_streams()
        self._lock = threading.RLock()
        self._exit_codes: dict[int, int] = {}
        self.is_lost = self.was_killed = self.was_killed_from_outside = False
        self._owner = os.getpid()
        self._is_ready = False
        self._num_preparing = 0
        self._is_receiving = False
        self._answers: list[tuple[str, Any]] = []
        """Messages that are neither reports nor taken by :meth:`_answer` yet."""
        try:
            # The forked process never leaves this frame, which keeps the arrays alive there.
            self._process = self._start(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ranges = inherited.ranges if self.why_fresh is None else ()
        self.memory = ServerMemory(self.pid, ranges)
        num_bytes = sum(size for _, size in ranges)
        is_much = max(num_bytes, count_data_bytes() or 0) > MAX_DATA_BYTES
        self.num_kept_bytes = num_bytes if is_much else 0
        """Memory of the dataset that the fork server keeps until the dataset is freed."""
        if self.num_kept_bytes:
            weakref.finalize(inherited.owner, _retire, weakref.ref(self)).atexit = False

    def _start(self, fd: int) -> ForkedChild | subprocess.Popen[bytes]:
        if self.why_fresh is None:
            _import_common_modules()
            count_all_reloads()  # a later reload makes the fork server stale
            try:
                return fork_child("fork_server_main.forked_main", fd)
            except StartFailed as error:
                self.why_fresh = error.what
        return start_child(f"fork_server_main.fork_server_main({fd})", (fd,))

    @property
    def has_failed_as_fork(self) -> bool:
        """True if it is a fork of this process and failed, or was stopped, before it was ready."""
        has_failed = self.is_lost and not self._is_ready and not self.was_killed_from_outside
        return self.why_fresh is None and has_failed

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def was_ready(self) -> bool:
        """True if it started successfully and was lost later."""
        return self._is_ready and self.is_lost

    def fork(self, assignment: WorkerAssignment, fds: list[int], name: str) -> ForkedWorker:
        """Fork one new worker.

        Args:
            fds: The channel, the shared memory, the pickle file, then the file descriptors that
                the pickle refers to.

        Raises:
            StartFailed: The fork server is gone or must be replaced. ``.unfit`` lists the modules
                that its successor must not import.
        """
        modules = tuple(
            module for module in assignment.objects.modules if module[0] not in self._without
        )
        environment = assignment.environment
        body = (modules, environment["path"], pickle.dumps(assignment, protocol=5))
        with self._lock, self._ending_if_cut():
            self._await_ready()
            streams = _identify_streams()
            has_moved = None not in streams and streams != self._streams
            try:
                self._control.send(
                    ("fork", (has_moved, *body)), [*fds, *((1, 2) if has_moved else ())]
                )
            except OSError as error:
                if error.errno in (None, errno.EMFILE, errno.ETOOMANYREFS):
                    raise  # None: a signal handler raised it
                self._lose(str(error))
            self._streams = streams if has_moved else self._streams
            kind, value = self._answer({"forked", "tainted", "stale", "refused"}, ANSWER_LIMIT_S)
            if kind == "refused":
                raise StartFailed(
                    f"the fork server could not start a worker: {value}",
                    likely="the limit on processes (ulimit -u, a cgroup's pids.max) or on memory.",
                    remedy="DataLoader(..., num_workers=1)",
                )
            if kind in ("tainted", "stale"):
                unfit = tuple(name for name, _ in modules) if kind == "tainted" else ()
                raise StartFailed(f"the fork server cannot fork: {value}", unfit=unfit)
            return ForkedWorker(self, value, name)

    def prepare(self, modules: tuple[tuple[str, int], ...], path: list[str]) -> None:
        """Request the import of the user's modules before the first fork. Does not wait.

        See :meth:`is_warm`.
        """
        modules = tuple(module for module in modules if module[0] not in self._without)
        with self._lock, self._ending_if_cut():
            self._num_preparing += 1
            try:
                self._control.send(("import", (modules, path)))
            except OSError as error:
                if error.errno is None:  # raised by a signal handler
                    raise
                # It is gone. The first fork raises the error.

    def is_warm(self) -> bool:
        """Return True if a fork would be answered immediately. Also true for a lost fork server."""
        with self._lock:
            with suppress(StartFailed):
                while self._can_read() and self._control.is_readable(0.0):
                    self._receive()
                self._is_ready = self._is_ready or any(one[0] == "ready" for one in self._answers)
            return self.is_lost or (self._is_ready and self._num_preparing == 0)

    def exit_code(self, pid: int, wait_s: float) -> int | None:
        """Return a worker's exit code, or None if it is alive. Waits up to ``wait_s``."""
        limit = time.monotonic() + wait_s
        while True:
            with self._lock:
                self._read_reports()
                if pid in self._exit_codes:
                    return self._exit_codes[pid]
                if self.is_lost:
                    return -int(signal.SIGKILL)  # it dies with its fork server (PDEATHSIG)
            left = limit - time.monotonic()
            if left <= 0:
                return None
            self._control.is_readable(min(left, 0.05))

    def forget(self, pid: int) -> None:
        """Drop the exit code of a worker."""
        with self._lock:
            self._exit_codes.pop(pid, None)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A fork server that was replaced ends with the last worker that it forked.
        if not is_ending() and getattr(self, "_process", None) is not None:
            self.close()

    def close(self) -> None:
        """End the fork server and all its workers."""
        if self._owner != os.getpid():
            self._control.close()  # in a child forked by the user, which does not own it
            return
        with self._lock:
            self.is_lost = True
            self._control.hang_up()
            if not self._is_ready:  # it has no workers, and may be importing torch for seconds
                self._process.kill()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5.0)

    def _await_ready(self) -> None:
        if not self._is_ready:
            self._answer({"ready"}, START_LIMIT_S)
            self._is_ready = True

    def _answer(self, kinds: set[str], limit_s: float) -> tuple[str, Any]:
        limit = time.monotonic() + limit_s
        moved_s = time.monotonic()
        while time.monotonic() < limit:
            found = next((one for one in self._answers if one[0] in kinds), None)
            if found is not None:
                self._answers.remove(found)
                return found
            if self._control.is_readable(max(0.0, min(1.0, limit - time.monotonic()))):
                self._receive()
            elif not self._is_stopped():
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > STOPPED_LIMIT_S:
                self._lose(f"it was stopped for {STOPPED_LIMIT_S:.0f} s")
        self._lose(f"no answer within {limit_s:.0f} s")
        raise AssertionError("unreachable")

    def _is_stopped(self) -> bool:
        import psutil

        with suppress(psutil.Error):
            return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        return False

    def _can_read(self) -> bool:
        """Return False for a finalizer that runs in the middle of a message."""
        return not (self.is_lost or self._is_receiving)

    def _read_reports(self) -> None:
        while self._can_read() and self._is_ready and self._control.is_readable(0.0):
            try:
                self._receive()
            except StartFailed:
                return

    @contextmanager
    def _ending_if_cut(self) -> Iterator[None]:
        """End the fork server if a signal handler raises, for example in the middle of a message.

        Its next answer would belong to the request that was cut off.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, StartFailed) and getattr(error, "errno", None) is None:
                self.is_lost = True
                self._control.hang_up()
            raise

    def _receive(self) -> None:
        """Read a message. A finalizer of another loader, which can run here, may have read it."""
        self._is_receiving = True
        try:
            with self._ending_if_cut():
                received = self._control.receive(waits=False)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise
            received = None
        finally:
            self._is_receiving = False
        if received is None:
            self._lose("the connection was closed")
        assert received is not None
        kind, value, *code = received[0]
        if kind == "exit":
            self._exit_codes[value] = code[0]
        elif kind == "imported":
            self._num_preparing -= 1
        else:
            self._answers.append((kind, value))

    def _lose(self, why: str) -> None:
        global _why_never_fork
        self.is_lost = True
        self._control.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        code = self._process.poll()
        self.was_killed = code is not None and code < 0
        self.was_killed_from_outside = code in (-signal.SIGKILL, -signal.SIGTERM)
        if code is not None and self.has_failed_as_fork:
            _why_never_fork = f"a copy of this process did not become a fork server: {why}"
        if code is None:  # a stopped process would not notice the end of its parent
            self._process.kill()
            state, likely = "does not answer", "it was stopped (SIGSTOP, a debugger, a frozen "
            likely += "container), or importing torch takes longer than that on this machine."
            _log.warning("the fork server process (pid %d) %s: %s", self._process.pid, state, why)
        elif code < 0:
            state = f"was killed by signal {-code}"
            likely = "another process killed it, or native code crashed."
        else:
            state, likely = f"exited with code {code}", "importing torch in a fresh Python fails. "
            likely += "The error is printed above."
        raise StartFailed(
            f"the fork server process (pid {self._process.pid}) {state}: {why}",
            likely=likely,
            remedy=f'{sys.executable} -c "import torch", or DataLoader(..., pool="thread")',
        )


def _identify_streams() -> list[tuple[int, int] | None]:
    """Return what tells the files behind stdout and stderr from others. None: it is closed."""
    found: list[tuple[int, int] | None] = []
    for fd in (1, 2):
        try:
            status = os.fstat(fd)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino))
    return found


def _import_common_modules() -> None:
    """Import what this process and its workers need, so that the fork server has it, too."""
    with importing():
        import penstock.engine.memory.batch_layout
        import penstock.engine.pickling.exceptions
        import penstock.engine.pickling.unpickling  # noqa: F401


def start_child(call: str, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start a Python process that runs ``call`` from a module in ``engine.worker``.

    The user's main module is not run.
    """
    module = call.partition(".")[0]
    code = (
        f"import sys; sys.path[:] = {import_path()!r}; "
        f"from penstock.engine.worker import {module}; {call}"
    )
    environ = dict(os.environ, PYTHONHASHSEED=os.environ.get("PYTHONHASHSEED", "0"))
    environ.update(dict.fromkeys(THREAD_LIMITS, "1"))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", code]
    if sys.platform == "win32":  # pragma: no cover
        options = windows.inheriting(fds)
    else:
        options: dict[str, Any] = {"pass_fds": fds}
    try:
        with deferred_ctrl_c():
            return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, **options)
    except OSError as error:
        raise StartFailed(
            f"could not start {sys.executable!r}: {error}",
            likely="the program does not exist, or too many files, processes or pages are in use.",
            remedy='DataLoader(..., pool="thread")',
        ) from error


def describe_start() -> str | None:
    """Say how the fork server of this process was started. None if there is none."""
    fork_server = existing_fork_server()
    if fork_server is None:
        return None
    if fork_server.why_fresh is None:
        size = fork_server.num_kept_bytes
        kept = f", and keeps {size / 1e6:.0f} MB of its dataset" if size else ""
        when = "from when its first loader was created"
        return f"a copy of this process, {when}, forks workers{kept}"
    return f"a fresh Python forks workers, because {fork_server.why_fresh}"


_current: ForkServer | None = None
_why_never_fork: str | None = None
_owner = 0
_guard = threading.Lock()
_tainted: set[str] = set()
_started: weakref.WeakSet[ForkServer] = weakref.WeakSet()


def existing_fork_server() -> ForkServer | None:
    """Return this process's fork server, or None if there is none."""
    return _current if _owner == os.getpid() else None


def current_fork_server(dataset: Any = None) -> ForkServer:
    """Return this process's fork server.

    Starts a new one if there is none, if it was lost, or if this process was forked since.

    Args:
        dataset: A new fork server may keep its arrays. See :mod:`..pickling.inherited_arrays`.
    """
    global _current, _owner
    with _guard:
        fork_server = existing_fork_server()
        if fork_server is None or fork_server.is_lost:
            fork_server = ForkServer(frozenset(_tainted), dataset)
            _started.add(fork_server)
            _current, _owner = fork_server, os.getpid()
        return fork_server


def _retire(reference: weakref.ref[ForkServer]) -> None:
    """Drop a fork server that keeps the memory of a dataset that was freed.

    It ends with the last worker that it forked. Takes no lock, because a garbage collection can
    call this at any time.
    """
    global _current
    if _current is not None and _current is reference():
        _current = None


def is_needed(pool: str, start_method: str | None) -> bool:
    """Return True if the plan of a loader with workers and these options uses the fork server.

    Takes microseconds. Making the plan, which finds the same, imports ten modules. Without the GIL,
    the plan may find more reasons.
    """
    is_default = can_start_python() and (is_gil_enabled() or start_method is not None)
    uses_processes = pool == "process" or (pool == "auto" and is_default)
    can_fork = sys.platform == "linux" and has_proc()
    return uses_processes and can_fork and start_method in (None, "forkserver")


def warm_up(dataset: Any = None) -> None:
    """Start the fork server early for a loader that will need it. See :func:`is_needed`.

    It imports modules while the program continues. Never raises: the first worker reports errors.
    Does nothing in a child process that only imports a module to find a class in it. A loader at
    the top level of that module is never iterated there.
    """
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    is_child = is_importing or "penstock.engine.worker.main" in sys.modules
    if not is_child:
        with suppress(OSError, StartFailed):
            current_fork_server(dataset)


def replace_fork_server(fork_server: ForkServer, without: tuple[str, ...]) -> None:
    """Retire a fork server that is unfit to fork. The next one does not import ``without``."""
    global _current
    with _guard:
        _tainted.update(without)
        if _current is fork_server:
            _current = None


def close_fork_server() -> None:
    """End this process's fork server. A later loader starts a new one."""
    global _current
    with _guard:
        closing = list(_started)
        _current = None
    for fork_server in closing:
        fork_server.close()


atexit.register(close_fork_server)
if hasattr(os, "register_at_fork"):
    # A different thread may hold the lock. No Python code runs here: it would lose a Ctrl-C.
    os.register_at_fork(after_in_child=_guard._at_fork_reinit)  # type: ignore[attr-defined]
