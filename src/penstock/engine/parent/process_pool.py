"""A pool of worker processes, with the parent's ends of their pipes.

A worker's end is a plain multiprocessing Connection, and both ends use its framing. The parent must
not block on a write. If the worker were blocked on a reply at that moment, both would wait forever.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import cloudpickle

from penstock.engine.memory.messages import (
    CELLS_PER_WORKER,
    NOTHING,
    PASS_CELL,
    STACK_FD,
    STOP,
    Lease,
    ParentMessage,
    ResumeStream,
    position_cell,
)
from penstock.engine.parent.launcher import Launcher, Process
from penstock.engine.parent.pools import (
    EXIT_CODE_WAIT_S,
    GRACE_S,
    WorkerExit,
    living_pools,
)
from penstock.engine.parent.stacks import take_stack
from penstock.errors import StartFailed


class ProcessPool:
    """Worker processes. Call :meth:`stop` to end them all."""

    can_replace = True
    host = "fork server"
    ready = None

    def __init__(self, launcher: Launcher, num_workers: int, cells: memoryview) -> None:
        self.processes: list[Process] = []
        self._channels: list[Any] = []
        self._cells = cells
        self._launcher = launcher
        self._num_workers = num_workers
        self._lock = threading.Lock()
        self._is_stopped = False
        self._owner = os.getpid()
        living_pools.add(self)

    def start(self) -> None:
        """Start all workers. May run in a thread of its own. Ends early if the pool is stopped.

        Raises:
            StartFailed, OSError: A worker does not start.
        """
        try:
            for number in range(self._num_workers):
                process, channel = self._start(number)
                with self._lock:
                    self.processes.append(process)
                    self._channels.append(channel)
                    is_stopped = self._is_stopped
                if is_stopped:
                    process.kill()
                    channel.close()
                    return
        except BaseException:
            self.stop()
            raise
        self._poller = ChannelPoller(self._channels)

    def _start(self, number: int, *, at_once: bool = False) -> tuple[Process, Any]:
        process, pipe, greeting = self._launcher.start(number, at_once=at_once)
        channel = make_channel(pipe)
        if greeting:
            channel.send(greeting)
        return process, channel

    def send(self, worker: int, leases: list[Any]) -> None:
        self._channels[worker].send(dump_leases(leases))

    def receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Return the replies that have arrived. Waits up to ``timeout_s`` for the first."""
        try:
            events = self._receive(timeout_s)
        except (OSError, ValueError):
            if not self._has_stopped():
                raise
            events = []
        if self._has_stopped():  # for example at interpreter exit while a thread is loading
            time.sleep(min(timeout_s, 0.05))
            return []
        return events

    def _has_stopped(self) -> bool:
        return self._is_stopped

    def _receive(self, timeout_s: float) -> list[tuple[int, Any]]:
        events: list[tuple[int, Any]] = []
        for worker in self._poller.wait(timeout_s):
            channel = self._channels[worker]
            if self._launcher.waiting:
                self._launcher.start_next()
            events += [(worker, pickle.loads(frame)) for frame in channel.read()]
            if not channel.is_open and not self._is_stopped:
                self._poller.forget(worker)
                events.append((worker, self._exit_of(worker)))
        return events or self._find_deaths()

    def _find_deaths(self) -> list[tuple[int, Any]]:
        """Return the exits of workers whose pipe is open because their child process holds it."""
        return [
            (worker, self._exit_of(worker))
            for worker, process in enumerate(self.processes)
            if process.exitcode is not None and self._channels[worker].is_open
        ]

    def _exit_of(self, worker: int) -> WorkerExit:
        process = self.processes[worker]
        process.join(EXIT_CODE_WAIT_S)
        is_orphaned = getattr(process, "is_orphaned", False)
        return WorkerExit(pid=process.pid, exit_code=process.exitcode, is_orphaned=is_orphaned)

    def replace(self, worker: int) -> None:
        """End a worker if it is alive, and start a new one with the same number.

        Raises:
            StartFailed, OSError: The new worker does not start.
        """
        process = self.processes[worker]
        if process.is_alive():
            process.kill()
        process.join(GRACE_S)
        if process.is_alive():  # blocked in the kernel: it could still write into a slot
            raise StartFailed(
                f"worker {worker} (pid {process.pid}) cannot be killed: it ignores SIGKILL",
                likely="it waits in the kernel for a disk or network share that does not respond.",
                remedy="check the storage; `cat /proc/PID/stack` as root shows where it waits",
            )
        self._poller.forget(worker)
        self._channels[worker].close()
        first = position_cell(worker)
        for cell in range(first, first + CELLS_PER_WORKER):
            self._cells[cell] = NOTHING
        self.processes[worker], self._channels[worker] = self._start(worker, at_once=True)
        self._poller.watch(worker)

    def stack_of(self, worker: int) -> str:
        """Return the stack of a worker as text."""
        process = self.processes[worker]
        fd = self._cells[position_cell(worker) + STACK_FD]
        return take_stack(process.pid if process.is_alive() else None, fd)

    def stop(self) -> None:
        """End all workers. Lets them finish a sample, then terminates, then kills them.

        The time is bounded.
        """
        if self._is_stopped or self._owner != os.getpid():
            return
        with self._lock:
            self._is_stopped = True
        self._cells[PASS_CELL] = STOP
        for channel in self._channels:
            # Send a stop message too, because a forked sibling may hold our end open.
            channel.send(dump_leases(None))
            channel.close()
        for end in (None, "terminate", "kill"):
            if end is not None:
                for process in self.processes:
                    if process.is_alive():
                        getattr(process, end)()
            limit = time.monotonic() + GRACE_S
            for process in self.processes:
                process.join(max(0.0, limit - time.monotonic()))
            if not any(process.is_alive() for process in self.processes):
                break
        self._launcher.close()
        living_pools.discard(self)


# -- pipes -----------------------------------------------------------------------------------------

_SHORT = struct.Struct("!i")
_LONG = struct.Struct("!Q")
_READ_BYTES = 1 << 18


def dump_leases(leases: list[Any] | None) -> bytes:
    """Serialize leases (None: stop). Sampler items of the user's own classes are sent by value."""
    if leases is None or all(_is_plain(lease) for lease in leases):
        return pickle.dumps(leases, protocol=5)
    return cloudpickle.dumps(leases, protocol=5)  # type: ignore[no-any-return]


def _is_plain(lease: ParentMessage) -> bool:
    if isinstance(lease, ResumeStream):
        return lease.state is None
    index = lease.index if isinstance(lease, Lease) else None
    first = index[0] if type(index) is list and index else index
    return first is None or type(first) in (int, str)


class Channel:
    """A non-blocking, buffered end of a pipe (POSIX)."""

    fd = -1  # until there is one: Ctrl-C can interrupt __init__

    def __init__(self, pipe: Any) -> None:
        # Use a duplicate, because the Connection closes its descriptor when it is collected.
        self.fd = os.dup(pipe.fileno())
        pipe.close()
        os.set_blocking(self.fd, False)
        self._outbox: deque[memoryview] = deque()
        self._inbox = bytearray()
        self.is_open = True

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def send(self, body: bytes) -> None:
        """Queue one frame and write as much as the pipe accepts now."""
        size = len(body)
        head = _SHORT.pack(size) if size <= 0x7FFFFFFF else _SHORT.pack(-1) + _LONG.pack(size)
        self._outbox.append(memoryview(head + body))
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts now. :meth:`read` detects a worker that is gone."""
        while self._outbox:
            try:
                written = os.write(self.fd, self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                self._outbox.clear()
                return
            if written < len(self._outbox[0]):
                self._outbox[0] = self._outbox[0][written:]
                return
            self._outbox.popleft()

    def read(self) -> list[bytes]:
        """Return all complete frames. Sets ``is_open`` to False at the end of the stream."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        self._inbox += data
        return self._frames()

    def _frames(self) -> list[bytes]:
        frames, start, inbox = [], 0, self._inbox
        while len(inbox) - start >= _SHORT.size:
            (size,) = _SHORT.unpack_from(inbox, start)
            body = start + _SHORT.size
            if size == -1:
                if len(inbox) - body < _LONG.size:
                    break
                (size,) = _LONG.unpack_from(inbox, body)
                body += _LONG.size
            if len(inbox) - body < size:
                break
            frames.append(bytes(inbox[body : body + size]))
            start = body + size
        del inbox[:start]
        return frames

    def close(self) -> None:
        self.is_open = False
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending():
            self.close()


class PlainChannel:
    """The same interface over multiprocessing's connection, for systems without ``poll``.

    Args:
        writer: Writes to the pipe without waiting for its reader.
    """

    has_unsent = False
    fd = -1

    def __init__(self, pipe: Any, writer: Any = None) -> None:
        self.pipe = pipe
        self._writer = pipe if writer is None else writer
        self.is_open = True

    def send(self, body: bytes) -> None:
        try:
            self._writer.send_bytes(body)
        except OSError:
            self.is_open = False

    def flush(self) -> None:
        return

    def read(self) -> list[bytes]:
        frames = []
        try:
            while self.pipe.poll(0):
                frames.append(self.pipe.recv_bytes())
        except (OSError, EOFError):
            self.is_open = False
        return frames

    def close(self) -> None:
        self.is_open = False
        self._writer.close()
        self.pipe.close()


def make_channel(pipe: Any) -> Any:
    """Create the parent's end for this system."""
    if sys.platform == "win32":  # pragma: no cover
        from penstock.engine.memory import windows_handles as windows

        return PlainChannel(pipe, windows.Writer(pipe))
    return Channel(pipe) if HAS_POLL else PlainChannel(pipe)


HAS_POLL = hasattr(select, "poll")
"""False on Windows, where a pipe is not a file descriptor."""


class ChannelPoller:
    """Waits on all channels together, without building a new selector each time."""

    def __init__(self, channels: list[Any]) -> None:
        self._channels = channels
        self._by_fd: dict[int, int] = {}
        self._poller = select.poll() if HAS_POLL else None
        for number in range(len(channels)):
            self.watch(number)

    def watch(self, number: int) -> None:
        """Start watching a new channel."""
        if self._poller is not None:
            fd = self._channels[number].fd
            self._by_fd[fd] = number
            self._poller.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> list[int]:
        """Return the numbers of the channels that have data or have been closed."""
        if self._poller is None:
            open_channels = {c.pipe: n for n, c in enumerate(self._channels) if c.is_open}
            return [open_channels[pipe] for pipe in connection.wait(open_channels, timeout_s)]
        unsent = [channel for channel in self._channels if channel.has_unsent]
        for channel in unsent:
            self._poller.modify(channel.fd, select.POLLIN | select.POLLOUT)
        ready = []
        for fd, event in self._poller.poll(timeout_s * 1000):
            number = self._by_fd[fd]
            if event & select.POLLOUT:
                self._channels[number].flush()
            if event & ~select.POLLOUT:
                ready.append(number)
        for channel in unsent:
            if channel.is_open:
                self._poller.modify(channel.fd, select.POLLIN)
        return ready

    def forget(self, number: int) -> None:
        """Stop watching a channel, if it is watched."""
        fd = self._channels[number].fd
        if self._poller is not None and self._by_fd.pop(fd, None) is not None:
            self._poller.unregister(fd)
