"""From records to lanes: what each process did, when, and for which batch.

    lease, collate  --> worker lanes: fetch, collate      (gaps: the worker waited for work)
    batch           --> main lane: step, stall, transfer, deliver
    copy, gpu       --> lanes of their own
    user, sample    --> where they happened, inside what they happened in

Records may come from a file that somebody else wrote: what makes no sense is left out or cut to
size, counted, and said in ``notes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.trace.record import (
    BATCH,
    COLLATE,
    COPY,
    GPU,
    KINDS,
    LAUNCH,
    LEASE,
    MEMORY,
    REFUSED,
    SAMPLE,
    START,
    STEP,
    USER,
    Record,
)

WORDS = {
    "fetch": "loading samples",
    "collate": "collate_fn",
    "stall": "waiting for a batch",
    "deliver": "putting the batch together",
    "transfer": "bringing batches to the device",
    "step": "your step",
    "launch": "starting workers",
    "copy": "copy to the device",
    "gpu": "GPU busy",
    "sample": "one sample",
    "transform": "one transform",
    "user": "your own span",
}
"""Every kind of span that is drawn, in a person's words."""
_INNER = {USER: "user", SAMPLE: "sample", STEP: "transform"}
_OWN_LANES = {COPY: ("copy", "to device"), GPU: ("gpu", "GPU")}
MAX_YEARS_NS = 10**18
"""Times beyond this (32 years of uptime) are nonsense."""


class Span(NamedTuple):
    """One timed piece of work. Times are nanoseconds since the trace began."""

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
    """It never ended: its worker was killed, or was still at it."""
    cpu_ns: int = -1
    """How long it computed; -1: not measured."""
    queued_ns: int = -1
    """How long it waited for a core; -1: not measured."""
    copied_ns: int = -1
    """How much of it was copying into the batch; -1: not measured."""

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


class Reading(NamedTuple):
    """A number at a time: batches ready, or bytes held."""

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
    """Pages that had to come from the disk."""
    started_ns: list[int] = field(default_factory=list)
    cpu_s: list[Reading] = field(default_factory=list)
    """What the process had computed by then."""

    def top(self) -> list[Span]:
        """What the lane did, without what is inside it."""
        return [span for span in self.spans if not span.depth]


@dataclass
class Model:
    """A whole trace: lanes, curves, and what is odd about it."""

    lanes: list[Lane] = field(default_factory=list)
    ready: list[Reading] = field(default_factory=list)
    free_memory: list[Reading] = field(default_factory=list)
    refused_ns: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    total_ns: int = 0

    def of(self, role: str) -> list[Lane]:
        return [lane for lane in self.lanes if lane.role == role]

    @property
    def num_spans(self) -> int:
        return sum(len(lane.spans) for lane in self.lanes)

    def batches(self) -> list[Span]:
        """One ``deliver`` span for each batch that was handed out, in time."""
        return [s for lane in self.of("main") for s in lane.spans if s.kind == "deliver"]


def make_model(records: Mapping[str, Any]) -> Model:
    """Lanes from records, as :meth:`penstock.DataLoader.timeline` and trace files have them.

    Example:
        >>> batch = Record(BATCH, "", 1_000, 1_500, batch=0, rows=4, a=300)
        >>> model = make_model({"lanes": [{"name": "main", "role": "main", "spans": [batch]}]})
        >>> [(span.kind, span.took_ns) for span in model.lanes[0].spans]
        [('stall', 300), ('deliver', 200)]
    """
    return _Maker(records).make()


class _Maker:
    """Makes one model."""

    def __init__(self, records: Mapping[str, Any]) -> None:
        self._model = Model(facts=dict(records.get("facts") or {}))
        self._odd: Counter[str] = Counter()
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._inline: dict[tuple[int, int], int] = {}
        """When this process itself had loaded a batch."""
        self._raw = [
            (lane, self._sound(lane.get("spans") or ())) for lane in records.get("lanes") or ()
        ]

    def make(self) -> Model:
        starts = [span.start_ns for _, spans in self._raw for span in spans]
        ends = [max(span.start_ns, span.end_ns) for _, spans in self._raw for span in spans]
        self._origin, self._end = min(starts, default=0), max(ends, default=0)
        for raw, spans in self._raw:
            self._add_lane(raw, spans)
        model = self._model
        order = {"main": 0, "worker": 1, "copy": 2, "gpu": 3, "user": 4}
        model.lanes = sorted(
            self._lanes.values(), key=lambda lane: (order.get(lane.role, 9), lane.number)
        )
        for lane in model.lanes:
            lane.spans = nest(lane.spans)
        model.total_ns = max(0, self._end - self._origin)
        model.notes += [f"{count:,} {what}" for what, count in sorted(self._odd.items())]
        lost = sum(lane.num_lost for lane in model.lanes)
        if lost:
            model.notes.append(f"{lost:,} spans were overwritten before they were read")
        return model

    def _sound(self, spans: Iterable[Any]) -> list[Record]:
        """Records that can be drawn, in the order of their beginnings."""
        found = []
        for span in spans:
            if not 0 <= span.kind < len(KINDS) or not 0 < span.start_ns < MAX_YEARS_NS:
                self._odd["spans made no sense and were left out"] += 1
            elif span.end_ns and not span.start_ns <= span.end_ns < MAX_YEARS_NS:
                self._odd["spans ended before they began: the clock jumped"] += 1
                found.append(span._replace(end_ns=span.start_ns))
            else:
                found.append(span)
        found.sort(key=lambda span: (span.start_ns, -span.end_ns))
        return found

    def _lane(self, role: str, number: int, name: str) -> Lane:
        if (role, number) not in self._lanes:
            self._lanes[role, number] = Lane(name, role, number)
        return self._lanes[role, number]

    def _add_lane(self, raw: Mapping[str, Any], spans: list[Record]) -> None:
        role, number = str(raw.get("role", "main")), int(raw.get("number") or 0)
        lane = self._lane(role, number, str(raw.get("name", role)))
        lane.num_lost += int(raw.get("num_lost") or 0)
        pid = int(raw.get("pid") or 0)
        if pid and pid not in lane.pids:
            lane.pids.append(pid)
        starts = [span.start_ns for span in spans if span.kind == START]
        last_ns = max((max(span.start_ns, span.end_ns) for span in spans), default=0)
        if role == "main":
            self._inline = {(s.pass_, s.batch): s.end_ns for s in spans if s.kind == LEASE}
        collating = [span for span in spans if span.kind == COLLATE and span.end_ns]
        inside = iter(collating)
        collate = next(inside, None)
        for span in spans:
            if not span.end_ns and span.kind != START:
                reborn = next((at for at in starts if at > span.start_ns), 0)
                self._odd["spans never ended: their worker was killed, or still at it"] += 1
                self._draw(lane, span, reborn or max(last_ns, span.start_ns), None, is_open=True)
                continue
            mine = None
            if span.kind == LEASE:
                while collate is not None and collate.start_ns < span.start_ns:
                    collate = next(inside, None)
                if collate is not None and collate.end_ns <= span.end_ns:
                    mine = collate
            self._draw(lane, span, span.end_ns, mine)

    def _draw(
        self,
        lane: Lane,
        span: Record,
        end_ns: int,
        collate: Record | None,
        *,
        is_open: bool = False,
    ) -> None:
        start = span.start_ns - self._origin
        end = end_ns - self._origin
        place = (span.pass_, span.batch, span.part, span.rows)
        if span.kind == LEASE:
            copied_ns = span.extra * 1000 if span.extra >= 0 else -1
            middle = end if collate is None else collate.start_ns - self._origin
            found = Span("fetch", "", start, middle, 0, *place, is_open, span.a, span.b, copied_ns)
            lane.spans.append(found)
            if collate is not None:
                lane.spans.append(Span("collate", "", middle, end, 0, *place))
        elif span.kind == BATCH:
            self._draw_batch(lane, span, place)
        elif span.kind in _INNER:
            if span.kind == USER and not span.name:
                self._odd["spans have no name: a process keeps the first 128 names"] += 1
            lane.spans.append(
                Span(_INNER[span.kind], span.name, start, end, span.thread, *place, is_open)
            )
        elif span.kind in _OWN_LANES:
            role, name = _OWN_LANES[span.kind]
            other = self._lane(role, 0, name)
            other.spans.append(Span(role, span.name, start, end, 0, *place, is_open))
        elif span.kind == LAUNCH:
            lane.spans.append(Span("launch", f"{span.a} workers", start, end, 0, *place, is_open))
        else:
            self._note(lane, span, start)

    def _note(self, lane: Lane, span: Record, at_ns: int) -> None:
        if span.kind == MEMORY:
            lane.memory.append(Reading(at_ns, span.a * 1024))
            lane.num_faults = max(lane.num_faults, span.b)
            if lane.role == "main":
                lane.cpu_s.append(Reading(at_ns, span.rows * 1e-3))
                if span.extra > 0:
                    self._model.free_memory.append(Reading(at_ns, span.extra * 2**20))
        elif span.kind == REFUSED:
            self._model.refused_ns.append(at_ns)
        elif span.kind == START:
            lane.started_ns.append(at_ns)
            if span.a and span.a not in lane.pids:
                lane.pids.append(span.a)

    def _draw_batch(self, lane: Lane, span: Record, place: tuple[int, int, int, int]) -> None:
        """One record holds the step before it, the wait, the way to the device, and the rest."""
        start, end = span.start_ns - self._origin, span.end_ns - self._origin
        before = span.b - self._origin if 0 < span.b <= span.start_ns else start
        waited = min(max(0, span.a), end - start)
        transfer = min(max(0, span.extra) * 1000, end - start - waited)
        pass_, batch, ready, rows = place
        place = (pass_, batch, 0, rows)
        if before < start:
            lane.spans.append(Span("step", "", max(before, 0), start, 0, pass_, batch - 1, 0, 0))
        if waited:
            lane.spans.append(Span("stall", "", start, start + waited, 0, *place))
        if transfer:
            middle = start + waited
            lane.spans.append(Span("transfer", "", middle, middle + transfer, 0, *place))
        loaded = self._inline.get((pass_, batch), 0) - self._origin
        middle = min(end, max(start + waited + transfer, loaded))
        lane.spans.append(Span("deliver", "", middle, end, 0, *place))
        self._model.ready.append(Reading(start, max(0, ready)))


def nest(spans: list[Span]) -> list[Span]:
    """Spans with their depth: how many others they lie within. Those that overlap without lying
    within (two threads in one lane) go as deep as needed to keep apart.

    Example:
        >>> inner, outer = Span("user", "a", 2, 3), Span("fetch", "", 0, 9)
        >>> [(span.kind, span.depth) for span in nest([inner, outer])]
        [('fetch', 0), ('user', 1)]
    """
    found = []
    ends: list[int] = []
    ordered = sorted(
        spans,
        key=lambda s: (s.start_ns, s.kind in _DEEP, s.end_ns > s.start_ns, -s.end_ns),
    )
    for span in ordered:
        depth = 1 if span.kind in _DEEP and ends else 0
        while depth < len(ends) and ends[depth] > span.start_ns:
            depth += 1
        del ends[depth + 1 :]
        if depth == len(ends):
            ends.append(span.end_ns)
        else:
            ends[depth] = span.end_ns
        found.append(span._replace(depth=depth) if depth != span.depth else span)
    return found


_DEEP = frozenset(_INNER.values())
