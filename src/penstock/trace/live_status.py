"""The status of a running loader, in memory that ``penstock top`` reads from outside.

    training process: LiveStatus.write(), at most once a second
        a memfd: header (JSON) | copy of the training process's trace buffer
    penstock top:     /proc/PID/fd --> the memfd, and the trace buffers of the workers
                      (:mod:`penstock.cli.live_loaders`)

The memfd has no name in any folder. Only its owner can open it through ``/proc``, and it is gone
with the program, however that ends. The metrics are computed by the reader, so the training process
only copies what is new: some microseconds each second. Linux only.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Mapping
from typing import Any

from penstock.trace.record import TraceBuffer

NAME = "penstock-status"
"""Name of the memfd. The fork server keeps descriptors whose name starts with ``penstock``."""
HEAD = struct.Struct("<qq")
"""Number of writes so far (odd during a write), and the length of the JSON text."""
BUFFER_AT = 1 << 18
"""Offset of the trace buffer. The header must be shorter."""


class LiveStatus:
    """Writes the status of one loader. Called in the process that iterates.

    Raises:
        OSError: The system has no memfd.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd")
        self.pid = os.getpid()
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._num_writes = self._num_copied = 0

    def write(self, header: Mapping[str, Any], buffer: TraceBuffer) -> None:
        """Replace the header and copy the records that are new since the last call."""
        text = json.dumps(header, default=repr).encode()
        if len(text) > BUFFER_AT - HEAD.size:
            return
        self._num_writes += 1
        os.pwrite(self._fd, HEAD.pack(2 * self._num_writes - 1, len(text)), 0)
        os.pwrite(self._fd, text, HEAD.size)
        self._num_copied = buffer.copy_to(self._fd, BUFFER_AT, self._num_copied)
        os.pwrite(self._fd, HEAD.pack(2 * self._num_writes, len(text)), 0)


def read_status(fd: int) -> tuple[dict[str, Any], bytes] | None:
    """Return the header and the trace buffer, or None if a write is in progress or none was made.

    Example:
        >>> import os, tempfile
        >>> from penstock.trace.record import TRACE_BYTES, Kind, TraceBuffer, read_records
        >>> buffer = TraceBuffer(bytearray(TRACE_BYTES))
        >>> number = buffer.add(Kind.BATCH, 100, 250, batch=3)
        >>> if hasattr(os, "memfd_create"):
        ...     status = LiveStatus()
        ...     status.write({"pid": 7}, buffer)
        ...     header, copied = read_status(status._fd)
        ...     assert (header["pid"], read_records(copied, 0)[0][0].batch) == (7, 3)
    """
    size = os.fstat(fd).st_size
    before = os.pread(fd, HEAD.size, 0)
    if len(before) < HEAD.size or size <= BUFFER_AT:
        return None
    number, length = HEAD.unpack(before)
    text, content = os.pread(fd, length, HEAD.size), os.pread(fd, size - BUFFER_AT, BUFFER_AT)
    if number % 2 or os.pread(fd, HEAD.size, 0) != before:
        return None
    try:
        header = json.loads(text)
    except ValueError:
        return None
    return (header, content) if isinstance(header, dict) else None
