"""What to say about a worker that died or is late: where it stands, probably why, what to do."""

from __future__ import annotations

import signal
from typing import Any

from penstock.errors import WorkerDied, WorkerTimeout

_CAUSES = {
    "SIGKILL": "something killed it from outside; most often the kernel, because memory ran out.",
    "SIGSEGV": "native code (a decoder, an extension) crashed on this sample.",
    "SIGBUS": "memory behind a mapped file went away: a full disk, or a truncated file.",
    "SIGABRT": "native code gave up (an assertion or a double free).",
}


def write_obituary(worker: int, pid: int | None, exit_code: int | None, index: Any) -> WorkerDied:
    """The error for a dead worker; the wording of its first sentence is PyTorch's."""
    cause = None
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        how, cause = f"is killed by signal: {name}", _CAUSES.get(name)
    else:
        how = f"exited unexpectedly with exit code {exit_code}"
        cause = "user code called os._exit or sys.exit, or the interpreter itself stopped."
    sample, remedy = "", "DataLoader(..., num_workers=0), to see the error where it happens"
    if isinstance(index, list):
        sample = f" while loading one of the samples {index!r}"
        remedy = f"dataset.__getitems__({index!r}) alone, in this process"
    elif index is not None:
        sample = f" while loading sample {index!r}"
        remedy = f"dataset[{index!r}] alone, in this process"
    return WorkerDied(
        f"DataLoader worker (pid {pid}) {how}{sample} (worker {worker})",
        likely=cause,
        remedy=remedy,
        worker=worker,
        pid=pid,
        exit_code=exit_code,
        sample_index=index,
    )


def write_timeout(timeout_s: float, batch: int, busy: dict[int, Any]) -> WorkerTimeout:
    """The error for a batch that is late; ``busy`` says which sample each worker is at."""
    places = [
        f"worker {worker} is at sample {index!r}"
        for worker, index in busy.items()
        if index is not None
    ]
    return WorkerTimeout(
        f"DataLoader timed out after {timeout_s} seconds; batch {batch} is not here",
        where=", ".join(places) or None,
        remedy=f"DataLoader(..., timeout={timeout_s * 10:g}), or find out why the samples named "
        "here are slow",
        samples=busy,
    )
