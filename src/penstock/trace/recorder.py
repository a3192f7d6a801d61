"""What a loader's processes have noted, gathered: its own ring, and one for each worker.

    LoaderIterator, Dispatcher --> Recorder.ring       (this process)
    WorkerRings: the rings of the workers of one pool  (shared file; read when asked for, copied
                                                        when the pool ends)
    Recorder.lanes() --> plain records, which penstock.trace draws

Noting is always on. Where somebody asked for a trace, the rings are read several times a second, so
that long runs are kept whole; otherwise the last few thousand records of each process are there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from penstock.trace.record import (
    ASKED_RING_BYTES,
    BATCH,
    LAUNCH,
    LEASE,
    MEMORY,
    REFUSED,
    RING_BYTES,
    START,
    Record,
    Ring,
    is_on,
    now_ns,
    process_ring,
    read_ring,
)
from penstock.trace.worker_recorder import memory_and_faults, next_look_ns, ring_of

LOOK_NS = 200_000_000
"""How often rings are read where a trace was asked for."""
MAX_KEPT = 400_000
"""Records that are kept of one loader; beyond it the oldest go."""
MAX_KEPT_UNASKED = 40_000
MAX_PENDING = 1000
"""A span that has not ended after this many others in its ring is not waited for any longer."""


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What to trace, where a path alone does not say it: ``DataLoader(..., trace=Tracing(...))``.

    Args:
        file: Where the trace goes: ``.json``, ``.json.gz``, ``.html`` or ``.perfetto.json.gz``.
        samples: Note each ``dataset[i]`` in workers, and not only the parts of batches.
        steps: Note each transform of torchvision's ``Compose`` by its name.

    Example:
        >>> import penstock
        >>> loader = penstock.DataLoader([1, 2, 3], trace=penstock.Tracing(samples=True))
        >>> [batch.item() for batch in loader]
        [1, 2, 3]
        >>> loader.timeline().num_batches
        3
    """

    file: str | os.PathLike[str] | None = None
    samples: bool = False
    steps: bool = False


@dataclass
class Lane:
    """The records of one process or thread, as plain values."""

    name: str
    role: str
    number: int = 0
    pid: int = 0
    worker_rings: int = 0
    launched_ns: int = 0
    spans: list[Record] = field(default_factory=list)
    num_lost: int = 0


class WorkerRings:
    """The workers of one pool: where their rings lie, and how far they were read."""

    def __init__(self, number: int, cells: memoryview, ring_bytes: int, num_workers: int) -> None:
        self.pass_offset = 0
        self._heads = [0] * num_workers
        self._pending: list[list[Record]] = [[] for _ in range(num_workers)]
        self._rings = [ring_of(cells, worker, ring_bytes) for worker in range(num_workers)]
        launched_ns = now_ns()
        self.lanes = [
            Lane(f"worker {worker}", "worker", worker, 0, number, launched_ns)
            for worker in range(num_workers)
        ]

    def read(self) -> None:
        """Take what is new."""
        for worker, (ring, lane) in enumerate(zip(self._rings, self.lanes, strict=True)):
            since = self._heads[worker]
            spans, head = read_ring(ring.cast("B"), since)
            # A span that had not ended is looked at again: from the first of them on.
            waiting = next((place for place, span in enumerate(spans) if not span.end_ns), None)
            lane.num_lost += max(0, head - since - len(spans))
            self._pending[worker] = []
            if waiting is not None and head - since < MAX_PENDING:
                head -= len(spans) - waiting
                self._pending[worker] = spans[waiting:]
                spans = spans[:waiting]
            self._heads[worker] = head
            self._add(lane, spans)

    def finish(self) -> None:
        """Take all that is there, ended or not, and let go of the memory."""
        for worker, (ring, lane) in enumerate(zip(self._rings, self.lanes, strict=True)):
            spans, head = read_ring(ring.cast("B"), self._heads[worker])
            lane.num_lost += max(0, head - self._heads[worker] - len(spans))
            self._add(lane, spans)
        self._rings = []

    def seen(self) -> list[Lane]:
        """What was read so far, with what had not ended then."""
        found = []
        for lane, pending in zip(self.lanes, self._pending, strict=True):
            seen = replace(lane, spans=list(lane.spans))
            self._add(seen, pending)
            found.append(seen)
        return found

    def _add(self, lane: Lane, spans: list[Record]) -> None:
        for span in spans:
            if span.kind == START:
                lane.pid = span.a
            if span.pass_ >= 0:
                span = span._replace(pass_=span.pass_ + self.pass_offset)
            lane.spans.append(span)


class Recorder:
    """The records of one loader. One that is off (``ring_bytes=0``) takes all calls and notes none.

    Args:
        keeps_all: Read the rings while the run goes on.
    """

    def __init__(self, *, ring_bytes: int = 0, keeps_all: bool = False) -> None:
        self.ring_bytes = ring_bytes if is_on() else 0
        self.ring = Ring(bytearray(self.ring_bytes)) if self.ring_bytes else None
        self.traces_samples = self.traces_steps = False
        self.keeps_all = keeps_all
        self.facts: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._main = Lane("main", "main", pid=os.getpid())
        self._main_head = 0
        self._all_rings: list[WorkerRings] = []
        self._past: list[Lane] = []
        self._num_pools = self._num_passes = 0
        self._place = (-1, -1, 0)
        self._waited_ns = self._taken_ns = self._inside_ns = 0
        self._read_ns = self._born_ns = now_ns()
        self._own_head = _num_named()
        self._next_look_ns = 0
        self._num_ready = self._num_looks = 0
        self._is_close = False
        self._process = psutil.Process() if self.ring_bytes else None
        self.on_end: Callable[[], None] = lambda: None
        """Called at the end of an epoch."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Left behind when a loader is copied or pickled; the copy gets its own."""
        return type(None), ()

    # -- from the engine -------------------------------------------------------------------------

    def hire(self, cells: memoryview, ring_bytes: int, num_workers: int) -> WorkerRings | None:
        """A pool of workers begins. Pairs with :meth:`dismiss`."""
        if not ring_bytes:
            return None
        with self._lock:
            worker_rings = WorkerRings(self._num_pools, cells, ring_bytes, num_workers)
            self._num_pools += 1
            self._all_rings.append(worker_rings)
        return worker_rings

    def dismiss(self, worker_rings: WorkerRings | None) -> None:
        """A pool has ended: keep what its workers noted, and let go of its memory."""
        with self._lock:
            if worker_rings is None or worker_rings not in self._all_rings:
                return
            self._all_rings.remove(worker_rings)
            worker_rings.finish()
            self._past += worker_rings.lanes
            limit = MAX_KEPT if self.keeps_all else MAX_KEPT_UNASKED
            while self._past and sum(len(lane.spans) for lane in self._past) > limit:
                self._past.pop(0)

    def launched(self, start_ns: int, num_workers: int) -> None:
        """Workers were asked for; they come up meanwhile."""
        if self.ring is not None:
            self.ring.add(LAUNCH, start_ns, now_ns(), self._num_passes, a=num_workers)

    def begin_pass(self, worker_rings: WorkerRings | None, epoch: int) -> None:
        """An epoch begins; ``epoch``: as the workers of this crew count."""
        if worker_rings is not None and epoch == 0:
            worker_rings.pass_offset = self._num_passes
        self._place = (self._num_passes, -1, 0)
        self._num_passes += 1

    def begin_batch(self) -> int:
        """Somebody asks for a batch; when that was."""
        self._waited_ns = self._taken_ns = 0
        start_ns = now_ns()
        self._is_close = start_ns > self._next_look_ns
        return start_ns

    def waited(self, started: float) -> None:
        """A batch was waited for since then (time.monotonic)."""
        self._waited_ns += int((time.monotonic() - started) * 1e9)

    def deliver(
        self, epoch: int, batch: int, rows: int, worker_rings: WorkerRings | None, jobs: Any
    ) -> None:
        """A batch is about to be handed out; ``jobs``: those under way."""
        self._place = (
            epoch + (worker_rings.pass_offset if worker_rings is not None else 0),
            batch,
            rows,
        )
        if self._is_close:
            others = sum(job.is_done for job in jobs.values()) - 1  # beside this one
            self._num_ready = min(max(0, others), 65535)

    def taken(self, started_ns: int) -> None:
        """A courier has been given a batch, which was loaded since then."""
        self._taken_ns += now_ns() - started_ns

    def end_batch(
        self, start_ns: int, returned_ns: int, batch: int, *, has_prefetcher: bool
    ) -> int:
        """The batch is handed out; when that was. ``returned_ns``: when the one before it was."""
        ring, end_ns = self.ring, now_ns()
        if ring is None:
            return end_ns
        pass_, number, rows = self._place
        transfer_us = 0
        if has_prefetcher or number < 0:
            number = batch
            if has_prefetcher:
                took_ns = end_ns - start_ns - self._taken_ns
                transfer_us = min(max(0, took_ns) // 1000, 2**31 - 1)
        ready, waited_ns = self._num_ready, self._waited_ns
        ring.add(
            BATCH, start_ns, end_ns, pass_, number, ready, rows, waited_ns, returned_ns, transfer_us
        )
        if self._is_close:
            self._look(ring, end_ns)
        return end_ns

    def end_pass(self) -> None:
        """The epoch is over."""
        self.on_end()

    def load_inline(self, start_ns: int, cpu_ns: int, rows: int, batch: int) -> None:
        """This process itself has loaded a batch."""
        if self.ring is not None:
            pass_ = self._place[0]
            cpu_ns = time.thread_time_ns() - cpu_ns
            self._place = (pass_, batch, rows)
            self.ring.add(LEASE, start_ns, now_ns(), pass_, batch, 0, rows, cpu_ns, -1, -1)

    def on_device(
        self, kind: int, start_ns: int, end_ns: int, *, batch: int = -1, num_bytes: int = 0
    ) -> None:
        """The device copied a batch (``COPY``) or computed (``GPU``) from then to then.

        Times are of this machine's clock (:data:`penstock.trace.record.now_ns`): what a device's
        own events say is to be set against it first. Called from: whoever brings batches to a
        device, when the device is done.
        """
        if self.ring is not None:
            self.ring.add(kind, start_ns, end_ns, self._place[0], batch, a=num_bytes)

    def refuse(self, num_held: int) -> None:
        """There was no slot for another batch."""
        if self.ring is not None:
            at_ns = now_ns()
            self.ring.add(REFUSED, at_ns, at_ns, self._place[0], a=num_held)

    def _look(self, ring: Ring, at_ns: int) -> None:
        self._num_looks += 1
        self._next_look_ns = next_look_ns(at_ns, self._num_looks)
        assert self._process is not None
        num_bytes, faults = memory_and_faults(self._process)
        try:
            left = psutil.virtual_memory().available >> 20
        except OSError:
            left = 0
        cpu_ms = int(time.process_time() * 1000)
        ring.add(MEMORY, at_ns, at_ns, rows=cpu_ms, a=num_bytes >> 10, b=faults, extra=left)
        if self.keeps_all and at_ns - self._read_ns > LOOK_NS:
            self._read_ns = at_ns
            self._read()

    # -- for the timeline ------------------------------------------------------------------------

    def _read(self) -> None:
        if self.ring is None:
            return
        with self._lock:
            spans, head = read_ring(self.ring.buffer, self._main_head)
            self._main.num_lost += head - self._main_head - len(spans)
            self._main_head = head
            self._main.spans += spans
            for worker_rings in self._all_rings:
                worker_rings.read()
            limit = MAX_KEPT if self.keeps_all else MAX_KEPT_UNASKED
            for lane in (
                self._main,
                *(lane for worker_rings in self._all_rings for lane in worker_rings.lanes),
            ):
                if len(lane.spans) > limit:
                    lane.num_lost += len(lane.spans) - limit
                    del lane.spans[: len(lane.spans) - limit]

    def lanes(self) -> list[Lane]:
        """All that is known by now. Called from: the process that iterates."""
        with self._lock:
            self._read()
            found = [self._main, *self._past]
            found += [lane for worker_rings in self._all_rings for lane in worker_rings.seen()]
            return [*found, *self._own_lane()]

    def _own_lane(self) -> list[Lane]:
        """What the user named in this process since this loader first ran."""
        own = process_ring()
        if own is None or self.ring is None:
            return []
        spans, head = read_ring(own.buffer, self._own_head)
        num_lost = head - self._own_head - len(spans)
        spans = [span for span in spans if span.start_ns >= self._born_ns]
        lane = Lane("your code", "user", pid=os.getpid(), spans=spans, num_lost=num_lost)
        return [lane] if spans else []

    def forget(self) -> None:
        """Begin anew: what was noted so far is not asked for."""
        with self._lock:
            self._read()
            self._past = []
            self._born_ns, self._own_head = now_ns(), _num_named()
            self._main.spans = []
            self._main.num_lost = 0
            for worker_rings in self._all_rings:
                for lane in worker_rings.lanes:
                    lane.spans, lane.num_lost = [], 0

    def records(self) -> dict[str, Any]:
        """All that is known by now, as plain values."""
        return {"facts": dict(self.facts), "lanes": plain_lanes(self.lanes())}

    def recent(self) -> list[Record]:
        """The last few thousand records of this process alone."""
        return [] if self.ring is None else read_ring(self.ring.buffer, 0)[0]


_kept: list[Recorder] | None = None


def keep_recorders() -> list[Recorder]:
    """A list that gets every recorder made from now on. Called from: ``penstock run --trace``."""
    global _kept
    _kept = []
    return _kept


def make_recorder(trace: Any) -> Recorder:
    """The recorder that a checked ``trace=`` asks for."""
    if trace is False:
        return Recorder()
    is_asked = isinstance(trace, Tracing)
    keeps_all = is_asked or _kept is not None  # the whole run is traced: loaders of ours, too
    recorder = Recorder(
        ring_bytes=ASKED_RING_BYTES if keeps_all else RING_BYTES, keeps_all=keeps_all
    )
    if is_asked:
        recorder.traces_samples, recorder.traces_steps = trace.samples, trace.steps
    if _kept is not None:
        _kept.append(recorder)
    return recorder


def plain_lanes(lanes: Iterable[Lane]) -> list[dict[str, Any]]:
    """Lanes as dictionaries: what another room, or a file, gets."""
    return [{**vars(lane), "spans": list(lane.spans)} for lane in lanes]


def _num_named() -> int:
    """How many spans the user has named in this process so far."""
    own = process_ring()
    return 0 if own is None else own.cells[0]
