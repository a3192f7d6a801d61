"""Reads the Python stack of a worker from the parent, even while the worker hangs.

    worker: offer_stack()   faulthandler writes to a memory file when a signal arrives
            (engine/worker/parent_link.py)
    parent: take_stack()    sends the signal, then reads the file through /proc

faulthandler needs neither the GIL nor the worker's cooperation, so this also works for a decoder
that hangs in C. Linux only. On other systems the stack is not available, and everything else works
without it.

Tested by ``tests/faults/engine/parent/test_watchdog.py``.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from penstock.engine.memory.messages import NOTHING, STACK_SIGNAL
from penstock.machine.kernel_files import read_fields

ANSWER_S = 0.5
"""A running process answers within a millisecond. A stopped process never does."""
MAX_BYTES = 65_536
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")
_SERVING = os.path.join(_OURS, "engine", "worker", "loop.py")


def take_stack(pid: int | None, fd: int) -> str:
    """Return the stack of a worker process as text, innermost call first, or why there is none.

    Args:
        fd: The value that ``offer_stack`` returned in the worker.
    """
    if pid is None or fd == NOTHING:
        return "  (the stack is not available on this system)"
    path = f"/proc/{pid}/fd/{fd}"
    try:
        before = os.stat(path).st_size
        os.kill(pid, STACK_SIGNAL)
        limit = time.monotonic() + ANSWER_S
        size = before
        while time.monotonic() < limit:
            time.sleep(0.01)
            last, size = size, os.stat(path).st_size
            if size == last > before:
                break
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read(MAX_BYTES).decode(errors="replace")
    except OSError as error:
        return f"  (the stack could not be read: {error})"
    if not text:
        return f"  (the process does not respond to signals: {_kernel_state(pid)})"
    return _without_ours(text)


def stack_of_thread(ident: int | None) -> str:
    """Return the stack of a thread of this process, in the same format."""
    frame = sys._current_frames().get(ident or 0)
    if frame is None:
        return "  (the thread has ended)"
    frames = reversed(traceback.extract_stack(frame))
    lines = [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in frames]
    return _without_ours("\n".join(lines))


def all_stacks(workers: Iterable[tuple[str, str]]) -> str:
    """Return the stacks of the named workers and of every thread of this process."""
    parts = [f"{name}:\n{stack}" for name, stack in workers]
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame)).rstrip()
        parts.append(f"this process, thread {ident}:\n{lines}")
    return "\n".join(parts)


def _kernel_state(pid: int) -> str:
    return read_fields(Path(f"/proc/{pid}/status")).get("State", "the process is gone")


def _without_ours(text: str) -> str:
    """Return the frames of the thread that serves leases, without the outer frames of Penstock."""
    threads = [part for part in text.split("\n\n") if part.strip()]
    serving = [part for part in threads if _SERVING in part] or threads[-1:]
    frames = [line for line in serving[0].splitlines() if line.startswith("  File")]
    users = list(itertools.takewhile(lambda line: _OURS not in line, frames))
    return "\n".join(users or frames) or text.rstrip()
