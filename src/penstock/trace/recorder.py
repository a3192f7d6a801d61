"""Recorder of one loader in the training process: its own records and those of the workers.

    LoaderIterator, Dispatcher --> Recorder.buffer         (this process)
    WorkerBuffers: the buffers of the workers of one pool  (shared file; read on request, copied
                                                            when the pool ends)
    Recorder.records() --> plain records, which penstock.Timeline draws

Recording is always on. If a trace was requested, the buffers are read several times per second, so
that long runs are recorded completely. Otherwise, only the last few thousand records of each
process are available.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.options import Tracing
from penstock.trace.record import (
    ASKED_TRACE_BYTES,
    NO_PLACE,
    TRACE_BYTES,
    Kind,
    Record,
    TraceBuffer,
    first_since,
    is_on,
    next_look_ns,
    now_ns,
    process_buffer,
    read_records,
    start_of_last,
)

if TYPE_CHECKING:
    from penstock.trace.live_status import LiveStatus
    from penstock.trace.record_columns import Columns

PUBLISH_NS = 1_000_000_000
"""Interval between updates of the status that ``penstock top`` reads."""
LOOK_NS = 200_000_000
"""Interval between reads of the buffers, if a trace was requested."""
MAX_KEPT = 400_000
"""Maximum number of records kept per loader. Beyond it, the oldest are dropped."""
MAX_KEPT_UNASKED = 40_000
MAX_RECENT, MIN_RECENT = 1000, 30
"""Number of records from which metrics are computed: over all processes, and of each at least."""
MAX_PENDING = 1000
"""A span that has not ended after this many newer records is no longer waited for."""


class ProcessRecords:
    """The records read so far from the buffer of one process or thread.

    Args:
        memory: The memory of the buffer.
        head: The number of the first record to read.
    """

    def __init__(
        self, name: str, role: str, memory: Any, *, number: int = 0, pid: int = 0, head: int = 0
    ) -> None:
        self.name, self.role, self.number, self.pid = name, role, number, pid
        self.records: list[Record] = []
        self.num_lost = 0
        self._memory = memory
        self._head = head
        self._open: list[Record] = []
        self._columns: Columns | None = None
        """The records of a process that has ended."""

    def read(self, pass_offset: int = 0, *, is_last: bool = False) -> None:
        """Read the new records. With ``is_last``, include open spans and release the memory."""
        records, head = read_records(self._memory, self._head)
        self.num_lost += max(0, head - self._head - len(records))
        for place, record in enumerate(records):
            if record.kind == Kind.START:
                self.pid = record.a
            if record.pass_ >= 0 and pass_offset:
                records[place] = record._replace(pass_=record.pass_ + pass_offset)
        self._open = []
        if not is_last and head - self._head < MAX_PENDING:
            # Open spans are read again next time, starting with the first of them.
            num_ended = next((n for n, one in enumerate(records) if not one.end_ns), len(records))
            records, self._open = records[:num_ended], records[num_ended:]
        self._head = head - len(self._open)
        self.records += records
        if is_last:
            self._memory = None

    def drop_oldest(self, max_records: int) -> None:
        if len(self.records) > max_records:
            self.num_lost += len(self.records) - max_records
            del self.records[:-max_records]

    def clear(self) -> None:
        self.records, self.num_lost = [], 0

    def start_of_last(self, num_records: int) -> int:
        """Return when the last ``num_records`` records start, or 0 if there are fewer."""
        if self._memory is not None:
            return start_of_last(self._memory, num_records)
        return self.records[-num_records].start_ns if len(self.records) > num_records else 0

    def recent(self, since_ns: int, pass_offset: int = 0) -> dict[str, Any]:
        """Return the lane of the records that ended after ``since_ns``, as columns.

        Nothing is consumed.
        """
        from penstock.trace.record_columns import is_recent, recent_columns, to_columns

        if self._memory is not None:
            spans = recent_columns(self._memory, since_ns, pass_offset)
        else:
            if self._columns is None:
                self._columns = to_columns(self.records)
            spans = self._columns[is_recent(self._columns, since_ns)]
        return {**self._describe(), "spans": spans}

    def to_lane(self) -> dict[str, Any]:
        """Return the records as plain values, including open spans."""
        return {**self._describe(), "spans": [*self.records, *self._open]}

    def _describe(self) -> dict[str, Any]:
        names = ("name", "role", "number", "pid", "num_lost")
        return {name: getattr(self, name) for name in names}


class WorkerBuffers:
    """The buffers of the workers of one pool."""

    def __init__(
        self, buffers: list[memoryview], processes: Sequence[Any] = (), file: Any = None
    ) -> None:
        self.pass_offset = 0
        self.processes = processes
        self._file = file
        self._trace_bytes = buffers[0].nbytes
        self.workers = [
            ProcessRecords(f"worker {worker}", "worker", buffer, number=worker)
            for worker, buffer in enumerate(buffers)
        ]

    def describe(self) -> dict[str, Any]:
        """Return where another process finds the buffers. See :class:`LiveStatus`."""
        return {
            "pids": [process.pid or 0 for process in self.processes],  # 0: on another machine
            "fd": self._file.fd,
            "trace_bytes": self._trace_bytes,
            "pass_offset": self.pass_offset,
        }

    def read(self, *, is_last: bool = False) -> None:
        for worker in self.workers:
            worker.read(self.pass_offset, is_last=is_last)


class Recorder:
    """Records one loader. With ``trace_bytes=0``, all calls are accepted and nothing is recorded.

    Args:
        keeps_all: Read the buffers during the run.
    """

    def __init__(self, *, trace_bytes: int = 0, keeps_all: bool = False) -> None:
        self.trace_bytes = trace_bytes if is_on() else 0
        self.buffer = TraceBuffer(bytearray(self.trace_bytes)) if self.trace_bytes else None
        self.traces_samples = self.traces_steps = False
        self.keeps_all = keeps_all
        self.facts: dict[str, Any] = {}
        self.count_sources: Callable[[], dict[str, int]] | None = None
        """Counts the samples of each source of a mixture so far in this epoch, over all ranks."""
        self.count_faults: Callable[[], dict[str, Any]] | None = None
        """Counts restarts, hangs and bad samples."""
        self.count_network: Callable[..., dict[str, Any]] | None = None
        """Counts downloads of a dataset in object storage."""
        self._max_kept = MAX_KEPT if keeps_all else MAX_KEPT_UNASKED
        self._lock = threading.RLock()
        memory = None if self.buffer is None else self.buffer.memory
        self._main = ProcessRecords("main", "main", memory, pid=os.getpid())
        self._pools: list[WorkerBuffers] = []
        self._ended: list[ProcessRecords] = []
        self._num_passes = 0
        self._place = NO_PLACE
        self._waited_ns = self._taken_ns = 0
        self._read_ns = self._born_ns = now_ns()
        self._user_head = _num_user_spans()
        self._next_look_ns = 0
        self._num_ready = self._num_looks = 0
        self._num_batches = self._num_samples = 0
        self._is_close = False
        self._status: LiveStatus | None = None
        self._machine: dict[str, int] = {}
        self._publish_ns = self._born_ns + PUBLISH_NS
        self.on_end: Callable[[], None] = lambda: None
        """Called at the end of an epoch."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None. A copied or unpickled loader gets its own recorder."""
        return type(None), ()

    # -- from the engine -------------------------------------------------------------------------

    def add_pool(
        self, buffers: list[memoryview], processes: Sequence[Any] = (), file: Any = None
    ) -> WorkerBuffers | None:
        """Add the buffers of a pool of workers. Paired with :meth:`remove_pool`.

        Args:
            processes: The workers. A worker that is replaced is replaced in this list too.
            file: The shared file that holds the buffers.
        """
        if not buffers:
            return None
        worker_buffers = WorkerBuffers(buffers, processes, file)
        with self._lock:
            self._pools.append(worker_buffers)
        return worker_buffers

    def remove_pool(self, worker_buffers: WorkerBuffers | None) -> None:
        """Copy the records of a pool that has ended, and release its memory."""
        with self._lock:
            if worker_buffers is None or worker_buffers not in self._pools:
                return
            self._pools.remove(worker_buffers)
            worker_buffers.read(is_last=True)
            self._ended += worker_buffers.workers
            while sum(len(worker.records) for worker in self._ended) > self._max_kept:
                self._ended.pop(0)
        if self._status is not None:
            self._publish({"has_ended": not self._pools})

    def record_launch(self, start_ns: int, num_workers: int) -> None:
        """Record that workers were launched. They continue to start in the background."""
        if self.buffer is not None:
            self.buffer.add(Kind.LAUNCH, start_ns, now_ns(), self._num_passes, a=num_workers)

    def begin_pass(self, worker_buffers: WorkerBuffers | None, pass_number: int) -> None:
        """Begin a pass over the data. ``pass_number`` counts from the start of this pool."""
        if worker_buffers is not None and pass_number == 0:
            worker_buffers.pass_offset = self._num_passes
        self._place = (self._num_passes, -1, 0)
        self._num_passes += 1

    def record_request(self) -> int:
        """Record a request for a batch. Returns its timestamp."""
        self._waited_ns = self._taken_ns = 0
        start_ns = now_ns()
        # Not at the first batch, which would wait for the import of penstock.machine.host.
        self._is_close = self._num_batches > 0 and start_ns > self._next_look_ns
        return start_ns

    def add_wait(self, started: float) -> None:
        """Add the time since ``started`` (``time.monotonic``) to the wait for the batch."""
        self._waited_ns += int((time.monotonic() - started) * 1e9)

    def record_delivery(
        self,
        pass_number: int,
        batch: int,
        rows: int,
        worker_buffers: WorkerBuffers | None,
        jobs: Any,
    ) -> None:
        """Record which batch is about to be delivered. ``jobs`` are the jobs in progress."""
        pass_offset = 0 if worker_buffers is None else worker_buffers.pass_offset
        self._place = (pass_number + pass_offset, batch, rows)
        if self._is_close:
            others = sum(job.is_done for job in jobs.values()) - 1  # without this one
            self._num_ready = min(max(0, others), 65535)

    def add_prefetch(self, started_ns: int) -> None:
        """Add the time since ``started_ns`` that a device prefetcher spent getting a batch."""
        self._taken_ns += now_ns() - started_ns

    def record_batch(
        self, start_ns: int, returned_ns: int, batch: int, *, has_prefetcher: bool
    ) -> int:
        """Record the delivery of a batch. Returns its timestamp.

        ``returned_ns`` is the timestamp of the previous delivery.
        """
        buffer, end_ns = self.buffer, now_ns()
        if buffer is None:
            return end_ns
        pass_, number, rows = self._place
        self._num_batches += 1
        self._num_samples += rows
        transfer_us = 0
        if has_prefetcher:
            transfer_us = min(max(0, end_ns - start_ns - self._taken_ns) // 1000, 2**31 - 1)
        if has_prefetcher or number < 0:
            number = batch
        place = (pass_, number, self._num_ready, rows)
        buffer.add(Kind.BATCH, start_ns, end_ns, *place, self._waited_ns, returned_ns, transfer_us)
        if self._is_close:
            self._look(buffer, end_ns)
        return end_ns

    def end_epoch(self) -> None:
        """End an epoch. Calls ``on_end``."""
        self.on_end()

    def record_inline_load(self, start_ns: int, cpu_ns: int, rows: int, batch: int) -> None:
        """Record that this process loaded a batch itself."""
        if self.buffer is not None:
            pass_ = self._place[0]
            cpu_ns = time.thread_time_ns() - cpu_ns
            self._place = (pass_, batch, rows)
            self.buffer.add(Kind.LEASE, start_ns, now_ns(), pass_, batch, 0, rows, cpu_ns, -1, -1)

    def record_device(
        self, kind: int, start_ns: int, end_ns: int, *, batch: int = -1, num_bytes: int = 0
    ) -> None:
        """Record that the device copied a batch (``COPY``) or computed (``GPU``).

        Times are on the host's clock (:data:`penstock.trace.record.now_ns`), so times of device
        events must be converted first. Called by the code that copies batches to a device, when
        the device has finished.
        """
        if self.buffer is not None:
            self.buffer.add(kind, start_ns, end_ns, self._place[0], batch, a=num_bytes)

    def record_no_slot(self, num_held: int) -> None:
        """Record that no slot was free for the next batch."""
        if self.buffer is not None:
            at_ns = now_ns()
            self.buffer.add(Kind.REFUSED, at_ns, at_ns, self._place[0], a=num_held)

    def _look(self, buffer: TraceBuffer, at_ns: int) -> None:
        from penstock.machine import host

        self._num_looks += 1
        self._next_look_ns = next_look_ns(at_ns, self._num_looks)
        num_kb, faults = host.resident_bytes() >> 10, host.num_major_faults()
        left = host.memory_bytes()[1] >> 20
        cpu_ms = int(time.process_time() * 1000)
        buffer.add(Kind.MEMORY, at_ns, at_ns, rows=cpu_ms, a=num_kb, b=faults, extra=left)
        if at_ns > self._publish_ns:
            self._publish()
        if self.keeps_all and at_ns - self._read_ns > LOOK_NS and self._lock.acquire(False):
            # If another thread reads metrics now, the next look reads the buffers.
            try:
                self._read_ns = at_ns
                self._read()
            finally:
                self._lock.release()

    # -- for the timeline ------------------------------------------------------------------------

    def _read(self) -> None:
        if self.buffer is None:
            return
        with self._lock:
            self._main.read()
            self._main.drop_oldest(self._max_kept)
            for pool in self._pools:
                pool.read()
            for worker in self._workers():
                worker.drop_oldest(self._max_kept)

    def _workers(self) -> list[ProcessRecords]:
        return [worker for pool in self._pools for worker in pool.workers]

    def clear(self) -> None:
        """Discard all records so far."""
        with self._lock:
            self._read()
            self._ended = []
            self._born_ns, self._user_head = now_ns(), _num_user_spans()
            for process in (self._main, *self._workers()):
                process.clear()

    def records(self) -> dict[str, Any]:
        """Return all records so far as plain values. Called in the process that iterates."""
        with self._lock:
            self._read()
            processes = [self._main, *self._ended, *self._workers(), *self._user_records()]
            lanes = [one.to_lane() for one in processes]
        here: dict[str, Any] = _about_machine()
        if self.count_sources is not None:
            here["sources"] = self.count_sources()
        if self.count_network is not None:
            here["network"] = self.count_network(self._born_ns)
            lanes += _download_lanes(here["network"].pop("downloads", ()), lanes)
        return {"facts": {**self.facts, **here}, "lanes": lanes}

    def _user_records(self, since_ns: int = 0) -> list[ProcessRecords]:
        """Return the user's spans in this process since this recorder was created or cleared."""
        buffer = process_buffer()
        if buffer is None or self.buffer is None:
            return []
        since_ns = max(since_ns, self._born_ns)
        head = max(self._user_head, first_since(buffer.memory, since_ns))
        user = ProcessRecords("your code", "user", buffer.memory, pid=os.getpid(), head=head)
        user.read(is_last=True)
        user.records = [span for span in user.records if span.start_ns >= since_ns]
        # What loading in this process waited for belongs to the lane of the training loop.
        main = ProcessRecords("main", "main", None, pid=os.getpid())
        main.records = [span for span in user.records if span.kind == Kind.NETWORK]
        user.records = [span for span in user.records if span.kind != Kind.NETWORK]
        return [one for one in (main, user) if one.records]

    # -- for penstock top ------------------------------------------------------------------------

    def note_waiting(self, waiting_since: float, samples: Callable[[], list[Any]]) -> None:
        """Publish that the loop has been waiting since then (``time.monotonic``).

        Called while no worker answers. ``samples`` returns what each worker is loading.
        """
        at_ns = now_ns()
        if self.buffer is not None and at_ns > self._publish_ns:
            waited_ns = int((time.monotonic() - waiting_since) * 1e9)
            shown = [None if one is None else repr(one)[:60] for one in samples()]
            self._publish({"waiting_ns": at_ns - waited_ns, "samples": shown})

    def _publish(self, more: Mapping[str, Any] | None = None) -> None:
        """Write the status that ``penstock top`` reads."""
        self._publish_ns = now_ns() + PUBLISH_NS
        if self.buffer is None:
            return
        from penstock.trace.live_status import LiveStatus  # short programs do not need it

        try:
            if self._status is None or self._status.pid != os.getpid():  # not a fork's copy
                self._status = LiveStatus()
                self._machine = _about_machine()
            header = {
                "pid": os.getpid(),
                "rank": os.environ.get("RANK"),
                "facts": {**self.facts, **self._machine},
                "counts": self.counts(),
                "pools": [pool.describe() for pool in list(self._pools)],
                **(more or {}),
            }
            self._status.write(header, self.buffer)
        except OSError:  # no memfd, or no descriptor left
            self._publish_ns = 2**62

    # -- for metrics -----------------------------------------------------------------------------

    def recent_records(self, window_ns: int) -> dict[str, Any]:
        """Return the records of the last part of the run as columns, at most ``window_ns`` of it.

        The part is shorter where it would hold more than ``MAX_RECENT`` records. The user's spans
        are left out. Unlike :meth:`records`, a call reads no more than that part.
        """
        if self.buffer is None:
            return {"facts": {**self.facts, "is_off": True}, "lanes": []}
        with self._lock:
            since_ns = self._main.start_of_last(1) - window_ns
            ended = [one for one in self._ended if one.records]
            processes = [(one, 0) for one in ended if one.records[-1].end_ns >= since_ns]
            processes.append((self._main, 0))
            for pool in self._pools:
                processes += [(one, pool.pass_offset) for one in pool.workers]
            limit = max(MIN_RECENT, MAX_RECENT // len(processes))
            since_ns = max([since_ns, *(one.start_of_last(limit) for one, _ in processes)])
            lanes = [one.recent(since_ns, offset) for one, offset in processes]
        here: dict[str, Any] = _about_machine()
        if self.count_network is not None:
            here["network"] = self.count_network()
            waits = self._user_records(since_ns)
            lanes += [one.to_lane() for one in waits if one.role == "main"]
        return {"facts": {**self.facts, **here}, "lanes": lanes}

    def counts(self) -> dict[str, Any]:
        """Return the number of batches, samples, samples of each source, and faults so far."""
        return {
            "num_batches": self._num_batches,
            "num_samples": self._num_samples,
            "sources": None if self.count_sources is None else self.count_sources(),
            "network": None if self.count_network is None else self.count_network(),
            **({} if self.count_faults is None else self.count_faults()),
        }

    def pids(self) -> list[int]:
        """Return the processes that load: this one and its workers."""
        pools = list(self._pools)
        workers = [process.pid for pool in pools for process in pool.processes]
        return [*{os.getpid(), *(pid for pid in workers if isinstance(pid, int))}]


def _about_machine() -> dict[str, int]:
    from penstock.machine.host import memory_bytes, usable_cores

    return {"cores": usable_cores(), "memory_bytes": memory_bytes()[0]}


def _download_lanes(
    downloads: Sequence[tuple[int, int, str, int]], lanes: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a lane with the downloads that began before the last record of the others."""
    last_ns = max((span.end_ns for lane in lanes for span in lane["spans"]), default=0)
    spans = [
        Record(Kind.DOWNLOAD, name, start_ns, end_ns, a=num_bytes)
        for start_ns, end_ns, name, num_bytes in downloads
        if start_ns < last_ns
    ]
    return [{"name": "downloads", "role": "download", "spans": spans}] if spans else []


def _num_user_spans() -> int:
    """Return the number of user spans recorded in this process so far."""
    buffer = process_buffer()
    return 0 if buffer is None else buffer.cells[0]


_kept: list[Recorder] | None = None
_live: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_when_made: list[Callable[[], None]] = []


def live_recorders() -> list[Recorder]:
    """Return the recorders of the loaders that were iterated and still exist, oldest first."""
    return [recorder for _, recorder in sorted(_live.items())]


def when_made(call: Callable[[], None]) -> None:
    """Call a function once, when the next loader is iterated for the first time."""
    _when_made.append(call)


def keep_recorders() -> list[Recorder]:
    """Return a list that collects every recorder created from now on.

    Called by ``penstock run --trace``.
    """
    global _kept
    _kept = []
    return _kept


def make_recorder(trace: Any) -> Recorder:
    """Create the recorder for a validated ``trace=`` option."""
    if trace is False:
        return Recorder()
    is_asked = isinstance(trace, Tracing)
    keeps_all = is_asked or _kept is not None  # penstock run --trace records every loader
    recorder = Recorder(
        trace_bytes=ASKED_TRACE_BYTES if keeps_all else TRACE_BYTES, keeps_all=keeps_all
    )
    if is_asked:
        recorder.traces_samples, recorder.traces_steps = trace.samples, trace.steps
        recorder.facts["traces_samples"] = trace.samples
    if _kept is not None:
        _kept.append(recorder)
    _live[next(_numbers)] = recorder
    while _when_made:
        _when_made.pop()()
    return recorder


def merge_records(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the records of several loaders of one program, such as training and validation.

    Workers and epochs are numbered consecutively across loaders.

    Example:
        >>> one = {"facts": {}, "lanes": [{"name": "worker 0", "role": "worker", "spans": []}]}
        >>> [lane["name"] for lane in merge_records([one, one])["lanes"]]
        ['worker 0', 'loader 2: worker 0']
    """
    lanes: list[dict[str, Any]] = []
    num_workers = num_passes = 0
    facts: Mapping[str, Any] = {}
    most = -1
    has_user = False
    for place, records in enumerate(several):
        new_workers, new_passes, num_batches = num_workers, num_passes, 0
        for lane in records.get("lanes") or ():
            if lane.get("role") == "user":
                if has_user:  # the records of every loader contain the same user lane
                    continue
                has_user = True
            moved = dict(lane, spans=[_moved(span, num_passes) for span in lane["spans"]])
            if lane.get("role") == "worker":
                moved["number"] = int(lane.get("number") or 0) + num_workers
                new_workers = max(new_workers, moved["number"] + 1)
                if place:
                    moved["name"] = f"loader {place + 1}: {lane['name']}"
            new_passes = max([new_passes, *(span.pass_ + 1 for span in moved["spans"])])
            num_batches += sum(span.kind == Kind.BATCH for span in lane["spans"])
            lanes.append(moved)
        num_workers, num_passes = new_workers, new_passes
        if num_batches > most:
            most, facts = num_batches, records.get("facts") or {}
    return {"facts": dict(facts), "lanes": lanes}


def _moved(span: Any, by: int) -> Any:
    return span._replace(pass_=span.pass_ + by) if span.pass_ >= 0 else span
