"""Messages between parent and workers: leases and replies, plain tuples of a few bytes each.

    parent -> worker   [Lease | NewPass | ResumeStream, ...]    load parts in order; None: stop
    worker -> parent   Reply                                    one per lease, at once
    worker -> parent   ("failed", report)                       it could not start
    worker -> parent   ("warning" | "note", text)               to be raised; for the plan

The first page of the shared file is the control page: 64-bit cells that need no message. Behind it
lies a trace buffer for each worker, where it notes what it does (see
:mod:`penstock.trace.worker_recorder`).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.engine.memory.shared_file import FileHandle

CONTROL_BYTES = 65536
CELLS_PER_WORKER = 8
PASS_CELL = 0
"""The pass that counts now; a worker drops leases of another one. -1: stop."""
STOP = -1
NOTHING = -1


def control_bytes(num_workers: int, trace_bytes: int) -> int:
    """The control page and all trace buffers."""
    return CONTROL_BYTES + num_workers * trace_bytes


def trace_buffers(cells: memoryview, num_workers: int, trace_bytes: int) -> list[memoryview]:
    """The memory where each worker records what it does; none where nothing is recorded."""
    first, size = CONTROL_BYTES // 8, trace_bytes // 8
    starts = range(first, first + num_workers * size, size) if size else ()
    return [cells[start : start + size].cast("B") for start in starts]


def position_cell(worker: int) -> int:
    """The control cell where a worker notes the position that it is loading (or NOTHING).

    The cells after it are named by the constants below.
    """
    return CELLS_PER_WORKER * (1 + worker)


NUM_SAMPLES = 1
"""How many samples the worker loads at once: more than 1 with ``__getitems__``."""
SINCE = 2
"""Since when (time.monotonic_ns) it runs the user's code; 0: it does not. Only with a limit."""
PEAK_KB = 3
"""The most memory that it has held so far, as of its last reply."""
STACK_FD = 4
"""The descriptor, in the worker, of the file that its stack is written to when asked for."""
IS_IDLE = 5
"""1 while it waits for leases."""
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 13
"""Makes a worker write its stack. No real-time signal of libc, Python or torch."""


class Lease(NamedTuple):
    """One part of one batch for one worker: which samples, and where they belong."""

    pass_number: int
    batch: int
    part: int
    index: Any
    position: int
    rows: int
    first_row: int
    is_whole: bool
    segment: tuple[int, int]
    start: int
    slot_bytes: int
    key_epoch: int = 0
    """The epoch that randomness is computed for; ``pass_number`` counts passes of the engine."""
    poison_rows: tuple[tuple[int, Exception], ...] = ()
    """Rows (counted from this part's first) that are not to be loaded, and why: see
    :data:`penstock.engine.loading.bad_samples.PoisonRows`."""
    is_suspect: bool = False
    """One of these samples takes down workers: load them one by one, to see which."""
    trial: tuple[int, int] | None = None
    """First row and number of rows that are loaded alone, to see whether that ends the worker. The
    result is dropped."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self[:3]

    @property
    def num_samples(self) -> int:
        return self.rows if self.is_whole else len(self.index)


class NewPass(NamedTuple):
    """A new pass of persistent workers, with the seed that torch's DataPipes share."""

    pass_number: int
    shared_seed: int


class ResumeStream(NamedTuple):
    """To a replacement, before its first lease: where its stream of an iterable dataset stood.

    ``state``: what the dataset said of itself; without one, ``num_batches`` are taken and dropped.
    """

    pass_number: int
    state: Any
    num_batches: int


ParentMessage = Lease | NewPass | ResumeStream


class Reply(NamedTuple):
    """What became of a lease.

    ``kind``: "fixed" (content: layout number, layout or None, filled rows, objects), "payload"
    (content: PayloadLocation), "odd" (send it whole), "error" (content: ErrorReport), "end" (an
    iterable is exhausted), "dropped" (its pass is over), "empty" (all samples were bad), "tried" (a
    trial is over, and the worker lives).
    """

    pass_number: int
    batch: int
    part: int
    kind: str
    content: Any
    needed_bytes: int
    busy_ns: int
    is_slot_lost: bool = False
    """The worker still holds a tensor in the slot, which is not used again."""
    state: Any = None
    """What an iterable dataset says of itself after this batch, where it has a state_dict."""
    bad_samples: tuple[Any, ...] = ()
    """What was wrong with samples that were left out or replaced: SampleFailure."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self[:3]


@dataclass(frozen=True, kw_only=True)
class PickleLocation:
    """Where the pickled dataset and functions lie in shared memory.

    Written and read by :mod:`penstock.engine.pickling.pickler`.
    """

    handle: FileHandle
    stream_bytes: int
    spans: tuple[tuple[int, int], ...]
    num_bytes: int
    modules: tuple[tuple[str, int], ...]
    """Modules to import first, and how often each was reloaded in the parent."""
    separate: tuple[tuple[int, int], ...] = ()
    """Buffers in a file of their own: which span, and which of the worker's descriptors."""


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What a worker does, as plain values; sent once, when it starts."""

    is_iterable: bool
    auto_collation: bool
    drop_last: bool
    per_sample: bool
    base_seed: int
    shared_seed: int | None
    has_limit: bool = False
    """Is it noted since when the user's code runs?"""
    num_indices: int | None = None
    """See :class:`penstock.engine.loading.bad_samples.BadSamplePolicy`."""
    keeps_init_seed: bool = True
    """Is a seed that worker_init_fn gives to torch kept?"""
    trace_bytes: int = 0
    """Room for what each worker notes, behind the control page; 0: nothing is noted."""
    traces_samples: bool = False
    traces_steps: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerAssignment:
    """Everything that makes a bare process into worker ``worker``."""

    worker: int
    num_workers: int
    task: WorkerTask
    objects: PickleLocation
    memory: FileHandle
    environment: dict[str, Any]
