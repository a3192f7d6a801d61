"""Rebuilds the pickled dataset and functions in a worker.

:mod:`penstock.engine.pickling.pickler` pickles them. This module imports little, because every
start of a worker waits for it.

Tested by ``tests/unit/engine/pickling/test_pickler.py``.
"""

from __future__ import annotations

import pickle
from typing import Any

from penstock.engine.memory.messages import PickleLocation
from penstock.engine.memory.shared_file import FileHandle, SharedFile

_inherited_fds: list[int] = []


class InheritedFd:
    """A descriptor that is sent along with the pickle. ``detach`` returns it in the worker."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        return _inherited_fds[self.place]


def unpickle_objects(location: PickleLocation, fds: list[int]) -> dict[str, Any]:
    """Rebuild the objects in a worker. Arrays are private views of the shared file."""
    _inherited_fds[:] = fds
    whole = _map_private(location.handle, location.num_bytes)
    buffers = [whole[start : start + length] for start, length in location.spans]
    for place, fd in location.separate:
        start, length = location.spans[place]
        buffers[place] = _map_private(FileHandle(fd=fds[fd]), start + length)[start:]
    for place, address in location.inherited:
        buffers[place] = _own_memory(address, location.spans[place][1])
    objects: dict[str, Any] = pickle.loads(whole[: location.stream_bytes], buffers=buffers)
    return objects


def _own_memory(address: int, num_bytes: int) -> memoryview:
    """Return memory that the fork server inherited. Its frames keep the owner of it alive."""
    import ctypes

    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _map_private(handle: FileHandle, num_bytes: int) -> memoryview:
    """Map a file copy-on-write and close its descriptor."""
    file = SharedFile.attach(handle)
    mapping = file.map(0, num_bytes, private=True)
    file.close()
    return memoryview(mapping)[:num_bytes]
