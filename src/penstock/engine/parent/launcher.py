"""Starts worker processes: forked by the fork server, spawned, or forked from this process.

    Launcher.start(number) -> (process, pipe, greeting)

The fork server is used on Linux. macOS and Windows use spawn. ``fork`` copies the parent in its
current state and is used only if the user requests it explicitly.

Tested by ``tests/faults/engine/parent/test_fork_server.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any, ClassVar, Protocol

from penstock.engine.memory.messages import WorkerAssignment, WorkerTask
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent import fork_server as fork_servers
from penstock.engine.parent.ctrl_c import deferred_ctrl_c
from penstock.engine.parent.restart_decision import RestartDecision, RestartPolicy
from penstock.engine.pickling.environment import describe_environment
from penstock.engine.pickling.inherited_arrays import ServerMemory
from penstock.engine.pickling.libraries import has_threads
from penstock.engine.pickling.pickler import PickledBuffers, PickledObjects, PickleFile
from penstock.engine.pickling.process_bound import find_inherited
from penstock.errors import StartFailed, warn_user
from penstock.machine.host import usable_cores

MAX_FORK_SERVERS = 3
"""Number of fork servers that may be unfit to fork, or exit, before one starts a worker."""
KILL_LIMIT_S = 5.0


class Process(Protocol):
    """The part of multiprocessing's Process that users of ``iterator._workers`` rely on."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class SpawnedWorker:
    """A worker in a new interpreter, started by :meth:`begin`.

    Args:
        start: Starts the process.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]], name: str) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self.name = name
        self.daemon = True

    def begin(self) -> None:
        self._process = self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exitcode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def is_alive(self) -> bool:
        return self._process is not None and self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class Launcher:
    """Starts the workers of one loader.

    Each spawned worker imports torch, which keeps a core busy for a second or more. At most as many
    as there are cores start at the same time, so that the first is ready early. Each worker that
    reports triggers the start of the next (:meth:`start_next`).

    Args:
        method: "forkserver", "spawn" or "fork".
        worker_entry: See :class:`penstock.engine.parent.context.LoaderParts`.
        objects: dataset, collate_fn, worker_init_fn by name. Pickled once, except with fork.
        policy: Limits how many fork servers may be lost.
        pickled: ``objects``, if they are already pickled.
        environment: The environment of the workers. None: that of this process.
    """

    num_forks: ClassVar[int] = 0
    """Number of times that any launcher forked this process."""

    def __init__(
        self,
        *,
        method: str,
        worker_entry: Callable[[str], Callable[..., Any]],
        task: WorkerTask,
        num_workers: int,
        objects: dict[str, Any],
        memory: SharedFile,
        policy: RestartPolicy,
        pickled: PickledObjects | PickledBuffers | None = None,
        environment: dict[str, Any] | None = None,
    ) -> None:
        self._method = method
        self._worker_entry = worker_entry
        self._task = task
        self._num_workers = num_workers
        self._objects = objects
        self._memory = memory
        self._policy = policy
        self._pickle_file: PickleFile | None = None
        self._pickled: PickledObjects | PickledBuffers | None = None
        """Set if a part of it is not in the file, but in ``_server_memory``."""
        self._server_memory: ServerMemory | None = None
        self._inherited: tuple[str, ...] = ()
        if method == "forkserver":
            fork_servers.warm_up()  # before a worker's pipe exists: see clean_process
        if method == "fork":
            self._inherited = _warn_of_inherited(objects)
        else:
            pickled = pickled or PickledObjects(objects)
            fork_server = fork_servers.existing_fork_server() if method == "forkserver" else None
            if fork_server is not None:
                self._server_memory = fork_server.memory
            self._pickle_file = pickled.to_shared_file(self._server_memory)
            if self._pickle_file.location.inherited:
                self._pickled = pickled
            if fork_server is not None and fork_server.memory.is_outdated:
                fork_servers.replace_fork_server(fork_server, ())
        self._environment = environment or describe_environment()
        self.waiting: deque[tuple[SpawnedWorker, Any]] = deque()
        self._num_at_once = usable_cores()

    def start(self, number: int, *, at_once: bool = False) -> tuple[Process, Any, bytes]:
        """Start one worker process.

        Returns it with the parent's end of its pipe, and the message to send first, if any.

        Args:
            at_once: Start immediately, without waiting until other workers have started.
        """
        ours, theirs = connection.Pipe(duplex=True)
        name = f"penstock-worker-{number}"
        starters: dict[str, Callable[[int, Any, str], Process]] = {
            "forkserver": self._from_fork_server,
            "spawn": self._spawned,
            "fork": self._forked,
        }
        try:
            process = starters[self._method](number, theirs, name)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        if not isinstance(process, SpawnedWorker):
            theirs.close()
            return process, ours, b""
        if at_once or number < self._num_at_once:
            self._begin(process, theirs)
        else:
            self.waiting.append((process, theirs))
        return process, ours, self._greeting(number)

    def start_next(self) -> None:
        """Start the next waiting spawned worker. Called when a worker has reported."""
        if self.waiting:
            self._begin(*self.waiting.popleft())

    def _begin(self, process: SpawnedWorker, theirs: Any) -> None:
        try:
            process.begin()
        finally:
            theirs.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """How open handles and large arrays were sent to the workers."""
        return self._inherited if self._pickle_file is None else self._pickle_file.notes

    def close(self) -> None:
        """Close the pickle file. Running workers have already mapped it."""
        while self.waiting:
            self.waiting.popleft()[-1].close()
        if self._pickle_file is not None:
            self._pickle_file.close()
        self._pickled = None

    def _assignment(self, number: int) -> WorkerAssignment:
        assert self._pickle_file is not None
        return WorkerAssignment(
            worker=number,
            num_workers=self._num_workers,
            task=self._task,
            objects=self._pickle_file.location,
            memory=self._memory.handle(),
            environment=self._environment,
        )

    def _from_fork_server(self, number: int, channel: Any, name: str) -> Process:
        num_left, may_be_stale = MAX_FORK_SERVERS, True
        while True:
            fork_server = fork_servers.current_fork_server()
            pickle_file = self._pickle_file_for(fork_server)
            fds = [channel.fileno(), self._memory.fd, pickle_file.file.fd, *pickle_file.fds]
            try:
                process = fork_server.fork(self._assignment(number), fds, name)
            except StartFailed as error:
                unfit = error.facts.get("unfit")
                if unfit is not None:
                    fork_servers.replace_fork_server(fork_server, unfit)  # type: ignore[arg-type]
                elif fork_server.has_failed_as_fork:
                    pass  # the next one is a fresh Python
                elif may_be_stale and fork_server.was_ready:
                    may_be_stale = False  # it was lost after it started the previous worker
                    continue
                elif fork_server.was_killed_from_outside:
                    decision = self._policy.judge_fork_server()
                    if decision is not RestartDecision.RETRY:
                        from penstock.engine.parent.crash_report import describe_server_losses

                        raise describe_server_losses(error, decision, self._policy) from error
                    continue
                elif not fork_server.was_ready and not fork_server.was_killed:
                    raise  # it never came up
                num_left -= 1
                if not num_left:
                    raise
            else:
                self._policy.note_start()
                return process

    def _pickle_file_for(self, fork_server: fork_servers.ForkServer) -> PickleFile:
        """Return the pickle file, with all buffers if this fork server does not hold them."""
        assert self._pickle_file is not None
        if self._pickled is not None and fork_server.memory is not self._server_memory:
            self._pickle_file.close()
            self._pickle_file, self._pickled = self._pickled.to_shared_file(), None
        return self._pickle_file

    def _spawned(self, number: int, channel: Any, name: str) -> Process:
        assert self._pickle_file is not None
        fds = [channel.fileno(), *self._pickle_file.fds]
        # The worker opens files that have a path. It inherits the others.
        fds += [file.fd for file in (self._memory, self._pickle_file.file) if not file.path]
        call = f"main.spawned_main({channel.fileno()})"
        return SpawnedWorker(lambda: fork_servers.start_child(call, tuple(fds)), name)

    def _greeting(self, number: int) -> bytes:
        """Return the first message of a spawned worker, which is its assignment."""
        assert self._pickle_file is not None
        greeting = (os.getpid(), self._assignment(number), self._pickle_file.fds)
        return pickle.dumps(greeting, protocol=5)

    def _forked(self, number: int, channel: Any, name: str) -> Process:
        context = multiprocessing.get_context("fork")
        assignment = (self._task, number, self._num_workers, os.getpid())
        process = context.Process(
            target=self._worker_entry("fork"),
            args=(channel, self._memory, self._objects, assignment),
            name=name,
            daemon=True,
        )
        Launcher.num_forks += 1
        try:
            with deferred_ctrl_c():
                process.start()
        except BaseException:  # for example Ctrl-C: no reference to the process would be left
            if process.pid is not None:
                process.kill()
                process.join(KILL_LIMIT_S)
            raise
        return process


def _why_unsafe(part: Any) -> str:
    if has_threads(type(part)):
        return "reads with threads that forked workers do not have, so they can hang"
    return "is shared by this process and all forked workers, so they read each other's data"


def _warn_of_inherited(objects: dict[str, Any]) -> tuple[str, ...]:
    """Warn about sockets, pipes and files that forked workers share. Does not change them."""
    notes = tuple(
        f"{path} ({type(part).__module__}.{type(part).__qualname__}) {_why_unsafe(part)}. Open it "
        "on first use in the worker, or remove multiprocessing_context='fork'"
        for path, part in find_inherited(objects)
    )
    for note in notes:
        warn_user(note)
    return notes
