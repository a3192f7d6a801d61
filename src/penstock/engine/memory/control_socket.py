"""Messages between the parent and the fork server, with descriptors.

parent -> fork server   ("fork", (modules, path, assignment)) + [channel, memory, objects, extra...]
parent -> fork server   ("import", (modules, path))
fork server -> parent   ("ready", pid) ("imported", pid) ("exit", pid, status)
fork server -> parent   ("forked", pid), or ("tainted" | "stale" | "refused", why)
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.engine.memory.messages import WorkerAssignment
from penstock.engine.memory.shared_file import FileHandle

_BODY_BYTES = struct.Struct("!I")
_MAX_FDS = 250
_MAX_WAIT_MS = 60_000
_LOOK_MS = 1_000
"""How often to look for the parent where the kernel does not say that it has ended."""


class ControlSocket:
    """One end of the control socket. Not safe for several threads at once: the holder locks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def from_fd(cls, fd: int) -> ControlSocket:
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        body = pickle.dumps(message, protocol=5)
        if len(fds) > _MAX_FDS:
            raise OSError(f"{len(fds)} descriptors do not fit one message ({_MAX_FDS} do)")
        header = _BODY_BYTES.pack(len(body))
        if fds:
            # Descriptors ride on the header, so that one recvmsg takes both.
            socket.send_fds(self._socket, [header], list(fds))
        else:
            self._socket.sendall(header)
        self._socket.sendall(body)

    def receive(self) -> tuple[Any, list[int]] | None:
        """The next message and its descriptors; None when the other side hung up."""
        try:
            header, fds, _, _ = socket.recv_fds(self._socket, _BODY_BYTES.size, _MAX_FDS)
        except ConnectionResetError:
            return None
        if not header:
            return None
        header += self._read(_BODY_BYTES.size - len(header))
        return pickle.loads(self._read(*_BODY_BYTES.unpack(header))), fds

    def _read(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            part = self._socket.recv(min(num_bytes, 1 << 20))
            if not part:
                raise EOFError("the other side hung up in the middle of a message")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def is_readable(self, timeout_s: float) -> bool:
        return self._poll(select.POLLIN, timeout_s)

    def has_hung_up(self) -> bool:
        """Has the other side closed its end? What it said before may still be read."""
        return self._poll(0, 0.0)

    def _poll(self, events: int, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, events)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Close the connection, also where a forked child holds a copy of this end."""
        with suppress(OSError):  # the other side has done so
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def place_fds(assignment: WorkerAssignment, fds: list[int]) -> WorkerAssignment:
    """Put the received descriptor numbers into an assignment."""
    return replace(
        assignment,
        memory=FileHandle(fd=fds[1]),
        objects=replace(assignment.objects, handle=FileHandle(fd=fds[2])),
    )


def watch_process(pid: int) -> int:
    """A descriptor that becomes readable when ``pid`` ends; -1 where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def wait_readable(control: int, wake: int, parent: int) -> bool:
    """Wait for a request (True), a child's end or nothing for a while (False).

    Raises:
        SystemExit: The parent has ended.
    """
    poller = select.poll()
    for fd in (control, wake, parent):
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll(_MAX_WAIT_MS if parent >= 0 else _LOOK_MS)}
    if wake in ready:
        try:
            while os.read(wake, 512):
                pass
        except BlockingIOError:
            pass
    if parent >= 0 and parent in ready:
        raise SystemExit
    return control in ready
