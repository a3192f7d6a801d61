"""Messages between the parent and the fork server, over a socket that also passes descriptors.

parent -> fork server   ("fork", (modules, path, assignment)) + [channel, memory, objects, extra...]
parent -> fork server   ("import", (modules, path))
fork server -> parent   ("ready", pid) ("imported", pid) ("exit", pid, status)
fork server -> parent   ("forked", pid), or ("tainted" | "stale" | "refused", why)

Tested by ``tests/faults/engine/parent/test_fork_server.py``.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_BODY_BYTES = struct.Struct("!I")
_MAX_FDS = 250
_MAX_WAIT_MS = 60_000
_LOOK_MS = 1_000
"""Polling interval for the parent's exit on kernels without pidfd."""


class ControlSocket:
    """One end of the control socket. Not thread-safe: the owner must lock."""

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
            raise OSError(f"cannot send {len(fds)} descriptors in one message (maximum {_MAX_FDS})")
        header = _BODY_BYTES.pack(len(body))
        if fds:
            # Descriptors are sent with the header, so that one recvmsg returns both.
            socket.send_fds(self._socket, [header], list(fds))
        else:
            self._socket.sendall(header)
        self._socket.sendall(body)

    def receive(self, *, waits: bool = True) -> tuple[Any, list[int]] | None:
        """Return the next message and its descriptors, or None if the peer has closed.

        Raises:
            BlockingIOError: No message has arrived. Only with ``waits=False``.
        """
        flags = 0 if waits else socket.MSG_DONTWAIT
        try:
            header, fds, _, _ = socket.recv_fds(self._socket, _BODY_BYTES.size, _MAX_FDS, flags)
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
                raise EOFError("the peer closed the connection in the middle of a message")
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def is_readable(self, timeout_s: float) -> bool:
        return self._poll(select.POLLIN, timeout_s)

    def has_hung_up(self) -> bool:
        """Return True if the peer has closed its end. Earlier messages may still be readable."""
        return self._poll(0, 0.0)

    def _poll(self, events: int, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, events)
        return bool(poller.poll(max(0.0, timeout_s) * 1000))

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Close the connection, even if a forked child holds a copy of this end."""
        with suppress(OSError):  # already closed by the peer
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def watch_process(pid: int) -> int:
    """Return a descriptor that becomes readable when ``pid`` exits, or -1 without pidfd support."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def wait_readable(control: int, wake: int, parent: int) -> bool:
    """Wait for a request, a child's exit or a timeout. Return True only for a request.

    Raises:
        SystemExit: The parent has exited.
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
