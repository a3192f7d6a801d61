"""Which blocks were checked already? Remembered for all workers and epochs, not for each anew.

    parent: a memfd with a byte per block  <-- /proc/PID/fd/N --  workers write the same bytes

On Linux workers reach the parent's memory by that name; it is gone with the parent, and nothing is
left behind. Elsewhere each process remembers for itself what it has checked.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import Any

import numpy as np

_TOKEN_BYTES = 16


class Seen:
    """A byte for each block of a set: 1 when its bytes were found right."""

    def __init__(self, num_blocks: int, place: tuple[str, bytes] | None = None) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor: int | None = None
        self._mapping: Any = None
        self.blocks = np.zeros(num_blocks, np.uint8)
        if place is not None and self._join(*place):
            return
        if hasattr(os, "memfd_create"):
            self._share()

    def _share(self) -> None:
        try:
            descriptor = os.memfd_create("penstock-seen")
        except OSError:  # forbidden here: for ourselves, then
            return
        os.write(descriptor, self.token + bytes(len(self.blocks)))
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._open(descriptor)

    def _join(self, path: str, token: bytes) -> bool:
        """Use the memory that another process made; False: it is gone, or not the one meant."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            is_meant = os.fstat(descriptor).st_size == _TOKEN_BYTES + len(self.blocks)
            if not is_meant or os.pread(descriptor, _TOKEN_BYTES, 0) != token:
                return False
            self.token = token
            self._path = path
            self._open(descriptor)
        finally:
            os.close(descriptor)
        return True

    def _open(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, _TOKEN_BYTES + len(self.blocks))
        self.blocks = np.frombuffer(self._mapping, np.uint8, offset=_TOKEN_BYTES)

    @property
    def place(self) -> tuple[str, bytes] | None:
        """Where another process finds it."""
        if self._descriptor is not None:
            return f"/proc/{os.getpid()}/fd/{self._descriptor}", self.token
        path = getattr(self, "_path", None)
        return None if path is None else (path, self.token)
