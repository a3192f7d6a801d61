"""Detects objects that cannot leave their process: sockets, pipes, child processes, threads.

    pickler: why_bound(obj) -> why it cannot be sent to a worker
    fork:    find_inherited(objects) -> objects that all workers would share with the parent

multiprocessing can send a socket to another process. But workers that use one connection at the
same time read each other's replies, and no lock prevents this.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from penstock.engine.pickling.handles import is_handle, is_shared_by_forks
from penstock.engine.pickling.libraries import has_threads
from penstock.order.object_walk import ObjectWalk
from penstock.user_objects import probe

_MAX_HOLDERS = 10_000


_CLASSES = (
    ("_socket", "socket"),
    ("multiprocessing.connection", "_ConnectionBase"),
    ("subprocess", "Popen"),
    ("multiprocessing.process", "BaseProcess"),
    ("threading", "Thread"),
    ("multiprocessing.queues", "Queue"),
    ("multiprocessing.queues", "SimpleQueue"),
)
"""Classes to check. If a module is not loaded, its classes have no instances."""


def is_suspect(kind: type) -> bool:
    """Return True if instances may be bound to a process or be a queue. A cheap class check."""
    return any(issubclass(kind, _known(module, name)) for module, name in _CLASSES)


def _known(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, ())


def why_bound(obj: Any) -> str:
    """Return why this object cannot be used in another process, or an empty string."""
    kind = type(obj)
    if issubclass(kind, _known("_socket", "socket")):
        return (
            f"a socket{_peer_of(obj)} used by several processes delivers messages to the wrong one"
        )
    if issubclass(kind, _known("multiprocessing.connection", "_ConnectionBase")):
        return "an end of a pipe used by several processes delivers messages to the wrong one"
    if issubclass(kind, _known("subprocess", "Popen")) and obj.returncode is None:
        return f"a child process (pid {obj.pid}) belongs to the process that started it"
    if issubclass(kind, _known("multiprocessing.process", "BaseProcess")):
        return _why_process(obj)
    if issubclass(kind, threading.Thread) and threading.Thread.is_alive(obj):
        return f"a running thread ({obj.name}) exists only in its own process"
    return ""


def _peer_of(obj: Any) -> str:
    try:
        peer = obj.getpeername()
    except Exception:  # not connected, or closed
        return ""
    if isinstance(peer, tuple):
        peer = ":".join(str(part) for part in peer[:2])
    return f" (connected to {peer})" if peer else ""


def _why_process(process: Any) -> str:
    popen = vars(process).get("_popen")
    if popen is None or probe(popen, "returncode") is not None:
        return ""
    return f"a child process (pid {popen.pid}) belongs to the process that started it"


def connections_of_queue(obj: Any) -> list[Any]:
    """Return the pipes inside a multiprocessing queue. The queue's shared locks protect them."""
    queues = tuple(_known("multiprocessing.queues", name) for name in ("Queue", "SimpleQueue"))
    if not issubclass(type(obj), queues):
        return []
    ends = [vars(obj).get("_reader"), vars(obj).get("_writer")]
    # torch's queues wrap each end in their own class.
    return [end for each in ends if each is not None for end in (each, probe(each, "conn"))]


# -- forked workers --------------------------------------------------------------------------------


def find_inherited(objects: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sockets, pipes, databases and files that forked workers would share.

    Includes objects whose library reads with threads, which do not exist in forked workers.
    """
    for name, value in objects.items():
        walk = ObjectWalk(_is_end_of_walk)
        for path, part in walk.find(name, value, max_holders=_MAX_HOLDERS):
            if _is_shared_by_forks(part):
                yield path, part


def _is_end_of_walk(value: Any) -> bool:
    is_closed = issubclass(type(value), (io.IOBase, logging.Logger))
    is_end = is_closed or is_handle(value) or _is_shared_by_forks(value)
    return is_end or bool(connections_of_queue(value))


def _is_shared_by_forks(value: Any) -> bool:
    if has_threads(type(value)):
        return True
    return is_shared_by_forks(value) or (is_suspect(type(value)) and bool(why_bound(value)))
