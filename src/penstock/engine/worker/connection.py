"""Where a worker gets its leases and puts its replies: a pipe (processes) or queues (threads)."""

from __future__ import annotations

import mmap
import pickle
import queue
from typing import Any, Protocol

from penstock.engine.memory import payload
from penstock.engine.memory.messages import ParentMessage, Reply
from penstock.engine.memory.shared_file import SharedFile


def dump_reply(reply: Any) -> bytes:
    """A reply as bytes; a layout of classes from ``__main__`` needs the slower way."""
    try:
        return pickle.dumps(reply, protocol=5)
    except Exception:
        return bytes(payload.dump(reply))


class Connection(Protocol):
    """Where a worker gets leases and puts replies."""

    def get(self) -> list[ParentMessage] | None:
        """The next leases; waits. None: the parent is gone or says stop."""

    def put(self, reply: Reply | tuple[str, str]) -> None:
        """Send a reply at once: the parent may be waiting for just this one."""

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        """A segment of the shared file, mapped here."""


class _MappedSlots:
    """Segments of the shared file, mapped on first use."""

    def __init__(self, memory: SharedFile) -> None:
        self._memory = memory
        self._segments: dict[tuple[int, int], mmap.mmap] = {}

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        mapping = self._segments.get(place)
        if mapping is None:
            mapping = self._segments[place] = self._memory.map(*place)
        return mapping


class PipeConnection(_MappedSlots):
    """The worker's end of a pipe to the parent."""

    def __init__(self, channel: Any, memory: SharedFile) -> None:
        super().__init__(memory)
        self._channel = channel

    def get(self) -> list[ParentMessage] | None:
        try:
            message = pickle.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            return None
        return message  # type: ignore[no-any-return]

    def put(self, reply: Reply | tuple[str, str]) -> None:
        self._channel.send_bytes(dump_reply(reply))


class QueueConnection(_MappedSlots):
    """A worker thread's desk."""

    def __init__(
        self,
        number: int,
        memory: SharedFile,
        leases: queue.SimpleQueue[list[ParentMessage] | None],
        replies: queue.SimpleQueue[tuple[int, Any]],
    ) -> None:
        super().__init__(memory)
        self._number = number
        self._leases = leases
        self._replies = replies

    def get(self) -> list[ParentMessage] | None:
        return self._leases.get()

    def put(self, reply: Reply | tuple[str, str]) -> None:
        self._replies.put((self._number, reply))
