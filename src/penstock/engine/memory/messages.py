"""Messages between the parent and its workers: leases and replies, tuples of a few bytes each.

    parent -> worker   [Lease | NewPass | ResumeStream, ...]    load in order; None means stop
    worker -> parent   Reply                                    one per lease, sent immediately
    worker -> parent   ("failed", report)                       the worker could not start
    worker -> parent   ("warning" | "note", text)               a warning to issue; a plan note

The first page of the shared file is the control page. Its 64-bit cells are read and written without
messages. It is followed by one trace buffer per worker, where the worker records its activity (see
:mod:`penstock.trace.worker_recorder`).

Annotations are evaluated here, and not kept as text, because NamedTuple would compile each text,
and the first batch of a program waits for the import of this module.

Tested by ``tests/unit/engine/parent/test_in_flight.py``.
"""

import signal
from typing import Any

from penstock.engine.memory.shared_file import FileHandle
from penstock.named_tuple import NamedTuple

CONTROL_BYTES = 65536
CELLS_PER_WORKER = 8
PASS_CELL = 0
"""The current pass. A worker drops leases of any other pass. -1 means stop."""
STOP = -1
NOTHING = -1


def control_bytes(num_workers: int, trace_bytes: int) -> int:
    """Return the size of the control page and all trace buffers."""
    return CONTROL_BYTES + num_workers * trace_bytes


def trace_buffers(cells: memoryview, num_workers: int, trace_bytes: int) -> list[memoryview]:
    """Return the trace buffer of each worker. The list is empty if tracing is off."""
    first, size = CONTROL_BYTES // 8, trace_bytes // 8
    starts = range(first, first + num_workers * size, size) if size else ()
    return [cells[start : start + size].cast("B") for start in starts]


def position_cell(worker: int) -> int:
    """Return the control cell that holds the position a worker is loading (or NOTHING).

    The constants below are offsets from this cell.
    """
    return CELLS_PER_WORKER * (1 + worker)


NUM_SAMPLES = 1
"""The number of samples being loaded together. More than 1 with ``__getitems__``."""
SINCE = 2
"""When user code started (time.monotonic_ns), or 0 if none runs. Set only with a time limit."""
PEAK_KB = 3
"""The worker's peak memory, as of its last reply."""
STACK_FD = 4
"""The worker's descriptor of the file that receives its stack on STACK_SIGNAL."""
IS_IDLE = 5
"""1 while the worker waits for leases."""
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 13
"""Makes a worker write its stack. libc, Python and torch do not use this real-time signal."""


class Lease(NamedTuple):
    """One part of a batch, assigned to one worker: its samples and their place in the slot."""

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
    """The epoch used to compute randomness. ``pass_number`` counts passes of the engine."""
    poison_rows: tuple[tuple[int, Exception], ...] = ()
    """Rows of this part (0 is its first row) that must not be loaded, and why. See
    :data:`penstock.engine.loading.bad_samples.PoisonRows`."""
    is_suspect: bool = False
    """True if one of these samples crashes or hangs workers. To find it, they are loaded one by
    one."""
    trial: tuple[int, int] | None = None
    """First row and number of rows to load in isolation first, to find out whether they crash or
    hang the worker. The result is dropped."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self[:3]

    @property
    def num_samples(self) -> int:
        return self.rows if self.is_whole else len(self.index)


class NewPass(NamedTuple):
    """Starts a new pass of persistent workers, with the shared seed of torch's DataPipes."""

    pass_number: int
    shared_seed: int


class ResumeStream(NamedTuple):
    """Tells a worker where an iterable dataset starts. Sent before the first lease of a pass.

    ``state`` is the dataset's own ``state_dict()``. None: the beginning. The worker then loads and
    drops ``num_batches`` batches.
    """

    pass_number: int
    state: Any
    num_batches: int


ParentMessage = Lease | NewPass | ResumeStream


class Reply(NamedTuple):
    """The result of a lease.

    ``kind`` is one of:

    - "fixed" (content: layout number, layout or None, filled rows, objects)
    - "payload" (content: PayloadLocation)
    - "odd": the samples do not fit the layout or the slot; one worker must load the whole batch
    - "error" (content: ErrorReport)
    - "end": the iterable dataset is exhausted
    - "dropped": the pass is over
    - "empty": all samples were bad
    - "tried": a trial (rows loaded in isolation) is over, and the worker survived it
    """

    pass_number: int
    batch: int
    part: int
    kind: str
    content: Any
    needed_bytes: int
    busy_ns: int
    is_slot_lost: bool = False
    """True if the worker still holds a tensor in the slot. The slot is then not reused."""
    state: Any = None
    """The ``state_dict()`` of an iterable dataset after this batch, if it has an exact one."""
    bad_samples: tuple[Any, ...] = ()
    """One SampleFailure for each sample that was skipped or replaced."""
    has_ended: bool = False
    """True if an iterable dataset has no samples after this batch."""
    first_samples: Any = None
    """FirstSamples in the first reply of a worker with samples of an iterable dataset."""
    in_flight: int = 0
    """Async samples that the worker has in flight, if it found that number itself."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self[:3]


class PickleLocation(NamedTuple):
    """Location of the pickled dataset and functions in shared memory.

    Written and read by :mod:`penstock.engine.pickling.pickler`.
    """

    handle: FileHandle
    stream_bytes: int
    spans: tuple[tuple[int, int], ...]
    num_bytes: int
    modules: tuple[tuple[str, int], ...]
    """Modules to import first, and how many times the parent reloaded each."""
    separate: tuple[tuple[int, int], ...] = ()
    """Buffers in separate files: the span, and the worker's descriptor of the file."""
    inherited: tuple[tuple[int, int], ...] = ()
    """Buffers that the worker's memory holds already: the span, and the address."""


class WorkerTask(NamedTuple):
    """Settings of a worker, as plain values. Sent once, when it starts."""

    is_iterable: bool
    auto_collation: bool
    drop_last: bool
    per_sample: bool
    base_seed: int
    substitute_seed: int
    """Seed of the choice of substitutes for bad samples. The same without workers."""
    shared_seed: int | None
    sample_timeout_s: float | None = None
    """The time limit of a sample. Workers record when user code starts, and the parent checks."""
    in_flight: int | str | None = None
    """Samples that a worker has in flight at once. None if the dataset is not async."""
    num_indices: int | None = None
    """See :class:`penstock.engine.loading.bad_samples.BadSamplePolicy`."""
    keeps_init_seed: bool = True
    """True if a torch seed set in worker_init_fn is kept."""
    trace_bytes: int = 0
    """Size of each worker's trace buffer, after the control page. 0 if tracing is off."""
    traces_samples: bool = False
    traces_steps: bool = False
    node: str = ""
    """The name of the other machine that the worker runs on. See :mod:`penstock.engine.remote`."""

    @property
    def has_limit(self) -> bool:
        return self.sample_timeout_s is not None


def on_node(node: str) -> str:
    """Return where a worker runs, for the end of a phrase. Empty on this machine."""
    return f" on node {node}" if node else ""


class WorkerAssignment(NamedTuple):
    """The first message to a new process: what it needs to become worker number ``worker``."""

    worker: int
    num_workers: int
    task: WorkerTask
    objects: PickleLocation
    memory: FileHandle
    environment: dict[str, Any]
