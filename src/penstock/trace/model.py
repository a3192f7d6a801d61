"""Model of the timeline: records converted to lanes of spans.

    lease, collate  --> worker lanes: fetch, collate      (gaps: the worker waited for work)
    batch           --> main lane: step, stall, transfer, deliver
    copy, gpu,
    download        --> separate lanes
    user, sample,
    network         --> in the lane where they ran, nested in the enclosing span

Records can come from a file that another program wrote. Invalid records are left out or clipped,
counted, and reported in ``notes``. Called by :class:`penstock.Timeline`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.trace.record import NUM_KINDS, Kind, Record

WORDS = {
    "fetch": "loading samples",
    "collate": "collate_fn",
    "stall": "waiting for a batch",
    "deliver": "assembling the batch",
    "transfer": "copying batches to the device",
    "step": "your step",
    "launch": "starting workers",
    "copy": "copy to the device",
    "gpu": "GPU busy",
    "sample": "one sample",
    "transform": "one transform",
    "network": "waiting for object storage",
    "download": "downloading a block",
    "user": "your own span",
}
"""The kinds of spans, with the text shown for each."""
_INNER = {
    Kind.USER: "user",
    Kind.SAMPLE: "sample",
    Kind.TRANSFORM: "transform",
    Kind.NETWORK: "network",
}
INNER_KINDS = frozenset(_INNER.values())
"""Kinds of spans that are nested in others."""
_OWN_LANES = {
    Kind.COPY: ("copy", "to device"),
    Kind.GPU: ("gpu", "GPU"),
    Kind.DOWNLOAD: ("download", "downloads"),
}
MAX_YEARS_NS = 10**18
"""Times beyond this (32 years of uptime) are invalid."""


class Span(NamedTuple):
    """One timed operation. Times are in nanoseconds since the trace began."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    depth: int = 0
    pass_: int = -1
    batch: int = -1
    part: int = 0
    rows: int = 0
    is_open: bool = False
    """True if it never ended, because its worker was killed or had not finished."""
    cpu_ns: int = -1
    """CPU time, or -1 if not measured."""
    queued_ns: int = -1
    """Time waiting for a core, or -1 if not measured."""
    copied_ns: int = -1
    """Time copying into the batch, or -1 if not measured."""

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, batch and part of the span."""
        return self.pass_, self.batch, self.part


class Reading(NamedTuple):
    """A value at a point in time, such as batches ready or bytes held."""

    at_ns: int
    value: float


@dataclass
class Lane:
    """One row of the timeline."""

    name: str
    role: str
    number: int = 0
    pids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    num_lost: int = 0
    memory: list[Reading] = field(default_factory=list)
    num_faults: int = 0
    """Number of major page faults."""
    cpu_s: list[Reading] = field(default_factory=list)
    """CPU time of the process so far."""

    def top(self) -> list[Span]:
        """Return the spans that are not nested in another span."""
        return [span for span in self.spans if not span.depth]

    def of(self, *kinds: str) -> list[Span]:
        """Return the spans of these kinds that are not nested in another span."""
        return [span for span in self.spans if not span.depth and span.kind in kinds]


@dataclass
class TraceModel:
    """A whole trace: lanes, curves, and notes about irregular records."""

    lanes: list[Lane] = field(default_factory=list)
    ready: list[Reading] = field(default_factory=list)
    free_memory: list[Reading] = field(default_factory=list)
    num_refused: int = 0
    """Number of times no slot was free for the next batch."""
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    total_ns: int = 0

    def of(self, role: str) -> list[Lane]:
        return [lane for lane in self.lanes if lane.role == role]

    @property
    def num_spans(self) -> int:
        return sum(len(lane.spans) for lane in self.lanes)

    @property
    def num_workers(self) -> int:
        """The largest number of workers that loaded in one epoch of a loader, or of several loaders
        at the same time. Workers of loaders that ran one after the other are not added up.
        """
        intervals: list[tuple[int, int]] = []
        for lane in self.of("worker"):
            times: dict[int, tuple[int, int]] = {}
            for span in lane.spans:
                start_ns, end_ns = times.get(span.pass_, (span.start_ns, span.end_ns))
                times[span.pass_] = min(start_ns, span.start_ns), max(end_ns, span.end_ns)
            intervals += times.values()
        return most_at_once(intervals)

    def batches(self) -> list[Span]:
        """One ``deliver`` span for each batch that was handed out, in order of time."""
        return [s for lane in self.of("main") for s in lane.spans if s.kind == "deliver"]


def most_at_once(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of intervals that overlap.

    Example:
        >>> most_at_once([(0, 5), (3, 8), (8, 9)])
        2
    """
    edges = [edge for start, end in intervals for edge in ((start, 1), (end, -1))]
    return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)


def make_model(records: Mapping[str, Any]) -> TraceModel:
    """Build a model from the records of a loader or a trace file.

    Example:
        >>> batch = Record(Kind.BATCH, "", 1_000, 1_500, batch=0, rows=4, a=300)
        >>> model = make_model({"lanes": [{"name": "main", "role": "main", "spans": [batch]}]})
        >>> [(span.kind, span.took_ns) for span in model.lanes[0].spans]
        [('stall', 300), ('deliver', 200)]
    """
    return _ModelBuilder(records).build()


class _ModelBuilder:
    """Builds one model."""

    def __init__(self, records: Mapping[str, Any]) -> None:
        self._model = TraceModel(facts=dict(records.get("facts") or {}))
        self._odd: Counter[str] = Counter()
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._loaded_ns: dict[tuple[int, int], int] = {}
        """When the training process finished loading a batch inline."""
        self._raw = [
            (lane, self._valid(lane.get("spans") or ())) for lane in records.get("lanes") or ()
        ]
        every = [record for _, found in self._raw for record in found]
        self._origin_ns = min((record.start_ns for record in every), default=0)
        self._end_ns = max((max(r.start_ns, r.end_ns) for r in every), default=0)

    def build(self) -> TraceModel:
        for raw, records in self._raw:
            self._add_lane(raw, records)
        model = self._model
        order = ("main", "worker", "copy", "gpu", "download", "user")
        model.lanes = sorted(
            self._lanes.values(),
            key=lambda lane: (order.index(lane.role) if lane.role in order else 9, lane.number),
        )
        for lane in model.lanes:
            lane.spans = nest(lane.spans)
        model.total_ns = max(0, self._end_ns - self._origin_ns)
        model.notes += [f"{count:,} {what}" for what, count in sorted(self._odd.items())]
        if num_lost := sum(lane.num_lost for lane in model.lanes):
            model.notes.append(f"{num_lost:,} spans were lost: overwritten before they were read")
        return model

    def _valid(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that can be drawn, sorted by start time."""
        found = []
        for record in records:
            if not 0 <= record.kind < NUM_KINDS or not 0 < record.start_ns < MAX_YEARS_NS:
                self._odd["spans were invalid and left out"] += 1
                continue
            if record.end_ns and not record.start_ns <= record.end_ns < MAX_YEARS_NS:
                self._odd["spans ended before they began, because the clock jumped"] += 1
                record = record._replace(end_ns=record.start_ns)
            found.append(record)
        found.sort(key=lambda record: (record.start_ns, -record.end_ns))
        return found

    def _lane(self, role: str, number: int, name: str) -> Lane:
        return self._lanes.setdefault((role, number), Lane(name, role, number))

    def _add_lane(self, raw: Mapping[str, Any], records: list[Record]) -> None:
        role, number = str(raw.get("role", "main")), int(raw.get("number") or 0)
        lane = self._lane(role, number, str(raw.get("name", role)))
        lane.num_lost += int(raw.get("num_lost") or 0)
        _add_pid(lane, int(raw.get("pid") or 0))
        starts_ns = [record.start_ns for record in records if record.kind == Kind.START]
        last_ns = max((max(r.start_ns, r.end_ns) for r in records), default=0)
        if role == "main":
            leases = [record for record in records if record.kind == Kind.LEASE]
            self._loaded_ns = {(lease.pass_, lease.batch): lease.end_ns for lease in leases}
        collates = {_place(r): r for r in records if r.kind == Kind.COLLATE and r.end_ns}
        for record in records:
            if record.end_ns:
                self._draw(lane, record, collates)
                continue
            self._odd["spans never ended: the worker was killed or had not finished"] += 1
            restarted_ns = next((at_ns for at_ns in starts_ns if at_ns > record.start_ns), last_ns)
            end_ns = max(restarted_ns, record.start_ns)
            self._draw(lane, record._replace(end_ns=end_ns), {}, is_open=True)

    def _draw(
        self,
        lane: Lane,
        record: Record,
        collates: Mapping[tuple[int, int, int], Record],
        *,
        is_open: bool = False,
    ) -> None:
        start, end = record.start_ns - self._origin_ns, record.end_ns - self._origin_ns
        place = (*_place(record), record.rows)
        kind = record.kind
        if kind == Kind.LEASE:
            collate = collates.get(_place(record))
            if (
                collate
                and not record.start_ns <= collate.start_ns <= collate.end_ns <= record.end_ns
            ):
                collate = None  # from a different attempt to load this part
            middle = collate.start_ns - self._origin_ns if collate else end
            copied_ns = record.extra * 1000 if record.extra >= 0 else -1
            measured = (record.a, record.b, copied_ns)
            lane.spans.append(Span("fetch", "", start, middle, 0, *place, is_open, *measured))
            if collate:
                lane.spans.append(Span("collate", "", middle, end, 0, *place))
        elif kind == Kind.BATCH:
            self._draw_batch(lane, record, start, end)
        elif kind in _INNER:
            if kind == Kind.USER and not record.name:
                self._odd["spans have no name: a process records at most 128 names"] += 1
            lane.spans.append(Span(_INNER[kind], record.name, start, end, 0, *place, is_open))
        elif kind in _OWN_LANES:
            role, name = _OWN_LANES[kind]
            span = Span(role, record.name, start, end, 0, *place, is_open)
            self._lane(role, 0, name).spans.append(span)
        elif kind == Kind.LAUNCH:
            name = f"{record.a} workers"
            lane.spans.append(Span("launch", name, start, end, 0, *place, is_open))
        elif kind == Kind.REFUSED:
            self._model.num_refused += 1
        elif kind == Kind.START:
            _add_pid(lane, record.a)
        elif kind == Kind.MEMORY:
            self._add_readings(lane, record, start)

    def _add_readings(self, lane: Lane, record: Record, at_ns: int) -> None:
        lane.memory.append(Reading(at_ns, record.a * 1024))
        lane.num_faults = max(lane.num_faults, record.b)
        if lane.role == "main":
            lane.cpu_s.append(Reading(at_ns, record.rows * 1e-3))
            if record.extra > 0:
                self._model.free_memory.append(Reading(at_ns, record.extra * 2**20))

    def _draw_batch(self, lane: Lane, record: Record, start: int, end: int) -> None:
        """Split a batch record into the preceding step, the wait, the transfer and the delivery."""
        pass_, batch, num_ready = _place(record)
        self._model.ready.append(Reading(start, max(0, num_ready)))
        place = (pass_, batch, 0, record.rows)
        if 0 < record.b < record.start_ns:
            before = max(0, record.b - self._origin_ns)
            lane.spans.append(Span("step", "", before, start, 0, pass_, batch - 1))
        waited = start + min(max(0, record.a), end - start)
        if waited > start:
            lane.spans.append(Span("stall", "", start, waited, 0, *place))
        moved = waited + min(max(0, record.extra) * 1000, end - waited)
        if moved > waited:
            lane.spans.append(Span("transfer", "", waited, moved, 0, *place))
        loaded = self._loaded_ns.get((pass_, batch), 0) - self._origin_ns
        lane.spans.append(Span("deliver", "", min(end, max(moved, loaded)), end, 0, *place))


def _place(record: Record) -> tuple[int, int, int]:
    return record.pass_, record.batch, record.part


def _add_pid(lane: Lane, pid: int) -> None:
    if pid and pid not in lane.pids:
        lane.pids.append(pid)


def nest(spans: list[Span]) -> list[Span]:
    """Return the spans with their nesting depth, sorted by start time.

    Spans that overlap without being nested (two threads in one lane) get different depths.

    Example:
        >>> inner, outer = Span("user", "a", 2, 3), Span("fetch", "", 0, 9)
        >>> [(span.kind, span.depth) for span in nest([inner, outer])]
        [('fetch', 0), ('user', 1)]
    """
    found = []
    ends: list[int] = []
    for span in sorted(
        spans,
        key=lambda s: (s.start_ns, s.kind in INNER_KINDS, s.end_ns > s.start_ns, -s.end_ns),
    ):
        depth = 1 if span.kind in INNER_KINDS and ends else 0
        while depth < len(ends) and ends[depth] > span.start_ns:
            depth += 1
        ends[depth:] = [span.end_ns]
        found.append(span._replace(depth=depth) if depth != span.depth else span)
    return found
