"""Spans of a run as NumPy columns: the input of :mod:`penstock.trace.accounting`.

    TraceModel, of a whole trace               --tabulate_model()----+
    records of the last seconds, for metrics   --tabulate_records()--+--> SpanTable

Both give the same table. The second does not build a model, because metrics are computed each
second in a program that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.trace.model import WORDS, TraceModel, most_at_once
from penstock.trace.record import Kind
from penstock.trace.record_columns import RECORD_COLUMNS, Columns, to_columns

CODES = {kind: code for code, kind in enumerate(WORDS)}
"""The number of each kind of span."""
SPAN_COLUMNS = np.dtype(
    [
        *(("kind", "u1"), ("is_top", "?"), ("is_open", "?"), ("start_ns", "i8"), ("end_ns", "i8")),
        *(("pass_", "i8"), ("batch", "i8"), ("rows", "i8"), ("cpu_ns", "i8")),
        *(("queued_ns", "i8"), ("copied_ns", "i8"), ("part_ns", "i8")),
    ],
    align=True,
)
"""As in :class:`penstock.trace.model.Span`. ``is_top``: it is not nested in another span.
``part_ns``: the time of a ``fetch`` and its ``collate`` together."""
NO_SPANS = np.zeros(0, SPAN_COLUMNS)
_LANES = {Kind.COPY: "copy", Kind.GPU: "gpu"}
_MAX = 2**62


@dataclass
class LaneColumns:
    """The spans of one lane, sorted by start."""

    role: str
    number: int
    spans: Columns = field(default_factory=lambda: NO_SPANS)
    num_faults: int = 0
    cpu_s: float = 0.0

    def of(self, *kinds: str) -> Columns:
        """Return the spans of these kinds that are not nested in another span."""
        return of_kind(self.spans[self.spans["is_top"]], *kinds)


@dataclass
class SpanTable:
    """What the totals of a run are computed from."""

    lanes: list[LaneColumns] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    total_ns: int = 0
    num_refused: int = 0
    num_ready: int = 0
    least_free_bytes: float | None = None
    num_workers: int = 0
    """See :attr:`penstock.trace.model.TraceModel.num_workers`."""

    def of(self, role: str) -> list[LaneColumns]:
        return [lane for lane in self.lanes if lane.role == role]

    def spans(self, role: str, *kinds: str) -> Columns:
        """Return the spans of all lanes of a role that are not nested in another span."""
        return join([lane.of(*kinds) for lane in self.of(role)])


def of_kind(spans: Columns, *kinds: str) -> Columns:
    """Return the spans of these kinds."""
    is_wanted = np.zeros(len(CODES), np.bool_)
    is_wanted[[CODES[kind] for kind in kinds]] = True
    wanted: Columns = spans[is_wanted[spans["kind"]]]
    return wanted


def join(pieces: Sequence[Columns]) -> Columns:
    """Concatenate spans. Much faster than ``np.concatenate``, which compares all fields."""
    joined, at = np.empty(sum(map(len, pieces)), SPAN_COLUMNS), 0
    for piece in pieces:
        joined[at : at + len(piece)] = piece
        at += len(piece)
    return joined


def took_ns(spans: Columns) -> Any:
    """Return the time of each span."""
    return spans["end_ns"] - spans["start_ns"]


def batch_keys(spans: Columns) -> Any:
    """Return a number for each span that is the same for spans of one batch of one epoch."""
    return (spans["pass_"].astype(np.int64) << 32) + spans["batch"]


# -- from a model ----------------------------------------------------------------------------------


def tabulate_model(model: TraceModel) -> SpanTable:
    """Return the spans of a model."""
    lanes = []
    for lane in model.lanes:
        collate_ns = {span.place: span.took_ns for span in lane.of("collate")}
        rows = [
            (
                *(CODES[s.kind], not s.depth, s.is_open, s.start_ns, s.end_ns),
                *(s.pass_, s.batch, s.rows, s.cpu_ns, s.queued_ns, s.copied_ns),
                s.took_ns + collate_ns.get(s.place, 0),
            )
            for s in lane.spans
        ]
        cpu_s = lane.cpu_s[-1].value - lane.cpu_s[0].value if lane.cpu_s else 0.0
        lanes.append(LaneColumns(lane.role, lane.number, _fill(rows), lane.num_faults, cpu_s))
    return SpanTable(
        lanes=lanes,
        facts=model.facts,
        total_ns=model.total_ns,
        num_refused=model.num_refused,
        num_ready=int(model.ready[-1].value) if model.ready else 0,
        least_free_bytes=min((reading.value for reading in model.free_memory), default=None),
        num_workers=model.num_workers,
    )


def _fill(rows: list[tuple[Any, ...]]) -> Columns:
    try:
        return np.array(rows, SPAN_COLUMNS)
    except OverflowError:  # a damaged file
        return np.array([tuple(max(-_MAX, min(_MAX, x)) for x in r) for r in rows], SPAN_COLUMNS)


# -- from records ----------------------------------------------------------------------------------


def tabulate_records(records: Mapping[str, Any]) -> SpanTable:
    """Return the spans of the records of a running loader.

    Args:
        records: As of :meth:`penstock.trace.recorder.Recorder.recent_records`. The spans of a lane
            are columns or decoded records.
    """
    table = SpanTable(facts=dict(records.get("facts") or {}))
    raw = [(lane, _sorted(lane["spans"])) for lane in records.get("lanes") or ()]
    every = np.concatenate([np.zeros(0, RECORD_COLUMNS), *(found for _, found in raw)])
    if not len(every):
        return table
    origin_ns = int(every["start_ns"].min())
    table.total_ns = int(max(every["start_ns"].max(), every["end_ns"].max())) - origin_ns
    table.num_refused = int((every["kind"] == Kind.REFUSED).sum())
    lanes: dict[tuple[str, int], LaneColumns] = {}
    for one, found in raw:
        role, number = str(one["role"]), int(one.get("number") or 0)
        lane = lanes.setdefault((role, number), LaneColumns(role, number))
        found["end_ns"] = np.where(found["end_ns"] == 0, 0, np.maximum(*_times(found)))
        pieces = [
            lane.spans,
            _leases(found),
            *(_batches(found, origin_ns) if role == "main" else ()),
        ]
        for kind, name in _PLAIN.items():
            pieces.append(_spans(name, found[(found["kind"] == kind) & (found["end_ns"] > 0)]))
        lane.spans = join(pieces)
        _add_readings(table, lane, found)
        for kind, name in _LANES.items():
            if len(some := found[found["kind"] == kind]):
                own = lanes.setdefault((name, 0), LaneColumns(name, 0))
                own.spans = join([own.spans, _spans(name, some)])
    for lane in lanes.values():
        lane.spans = _mark_top(lane.spans)
    table.lanes = sorted(lanes.values(), key=lambda lane: (lane.role, lane.number))
    table.num_workers = most_at_once(
        (int(some["start_ns"].min()), int(some["end_ns"].max()))
        for lane in table.of("worker")
        for pass_ in np.unique(lane.spans["pass_"])
        for some in (lane.spans[lane.spans["pass_"] == pass_],)
    )
    return table


_PLAIN = {Kind.NETWORK: "network", Kind.LAUNCH: "launch"}


def _sorted(spans: Any) -> Columns:
    columns = spans if isinstance(spans, np.ndarray) else to_columns(spans)
    return columns[np.lexsort((-columns["end_ns"], columns["start_ns"]))]


def _times(found: Columns) -> tuple[Any, Any]:
    return found["start_ns"], found["end_ns"]


def _spans(kind: str, found: Columns, start_ns: Any = None, end_ns: Any = None) -> Columns:
    """Return one span for each record, with the times of the record unless others are given."""
    spans = np.zeros(len(found), SPAN_COLUMNS)
    spans["kind"], spans["is_top"] = CODES[kind], True
    spans["start_ns"] = found["start_ns"] if start_ns is None else start_ns
    spans["end_ns"] = found["end_ns"] if end_ns is None else end_ns
    for name in ("pass_", "batch", "rows"):
        spans[name] = found[name]
    spans["cpu_ns"] = spans["queued_ns"] = spans["copied_ns"] = -1
    return spans


def _leases(found: Columns) -> Columns:
    """Return the spans of the parts that were loaded: ``fetch``, and ``collate`` at the end."""
    leases = found[found["kind"] == Kind.LEASE]
    fetches = _spans("fetch", leases)
    fetches["is_open"] = is_open = leases["end_ns"] == 0
    if is_open.any():
        starts_ns = found["start_ns"][found["kind"] == Kind.START]
        after = np.searchsorted(starts_ns, leases["start_ns"], side="right")
        last_ns = max(found["start_ns"].max(), found["end_ns"].max())
        ends_ns = np.append(starts_ns, last_ns)[after]  # its worker was replaced, or is loading
        fetches["end_ns"] = np.where(is_open, ends_ns, leases["end_ns"])
    fetches["part_ns"] = took_ns(fetches)
    fetches["cpu_ns"], fetches["queued_ns"] = leases["a"], leases["b"]
    copied_us = leases["extra"].astype(np.int64)
    fetches["copied_ns"] = np.where(copied_us >= 0, copied_us * 1000, -1)
    collates = found[(found["kind"] == Kind.COLLATE) & (found["end_ns"] > 0)]
    if not len(collates) or not len(leases):
        return fetches
    at = np.maximum(np.searchsorted(leases["start_ns"], collates["start_ns"], side="right") - 1, 0)
    is_within = (collates["start_ns"] >= leases["start_ns"][at]) & ~is_open[at]
    is_within &= collates["end_ns"] <= leases["end_ns"][at]
    for name in ("pass_", "batch", "part"):  # otherwise from a different attempt
        is_within &= collates[name] == leases[name][at]
    at, collates = at[is_within], collates[is_within]
    fetches["end_ns"][at] = collates["start_ns"]
    rest = _spans("collate", leases[at], collates["start_ns"], leases["end_ns"][at])
    return join([fetches, rest])


def _batches(found: Columns, origin_ns: int) -> list[Columns]:
    """Return the spans of each delivery: the step before it, wait, transfer and assembly."""
    batches = found[found["kind"] == Kind.BATCH]
    start_ns, end_ns = _times(batches)
    waited_ns = start_ns + np.clip(batches["a"], 0, end_ns - start_ns)
    moved_us = np.maximum(batches["extra"], 0).astype(np.int64)
    moved_ns = waited_ns + np.minimum(moved_us * 1000, end_ns - waited_ns)
    inline = found[found["kind"] == Kind.LEASE]
    ends_ns = dict(zip(batch_keys(inline).tolist(), inline["end_ns"].tolist(), strict=True))
    loaded_ns = [ends_ns.get(key, 0) for key in batch_keys(batches).tolist()] if ends_ns else 0
    delivered_ns = np.minimum(end_ns, np.maximum(moved_ns, loaded_ns))
    has_step = (batches["b"] > 0) & (batches["b"] < start_ns)
    before = batches[has_step]
    steps = _spans("step", before, np.maximum(before["b"], origin_ns), before["start_ns"])
    steps["batch"] -= 1
    stalls = _spans("stall", batches, start_ns, waited_ns)[waited_ns > start_ns]
    transfers = _spans("transfer", batches, waited_ns, moved_ns)[moved_ns > waited_ns]
    return [steps, stalls, transfers, _spans("deliver", batches, delivered_ns, end_ns)]


def _add_readings(table: SpanTable, lane: LaneColumns, found: Columns) -> None:
    memory = found[found["kind"] == Kind.MEMORY]
    if len(memory):
        lane.num_faults = max(lane.num_faults, int(memory["b"].max()))
    if lane.role != "main":
        return
    if len(memory):
        lane.cpu_s = int(memory["rows"][-1] - memory["rows"][0]) * 1e-3
        free_mib = memory["extra"][memory["extra"] > 0]
        table.least_free_bytes = int(free_mib.min()) * 2.0**20 if len(free_mib) else None
    batches = found[found["kind"] == Kind.BATCH]
    if len(batches):
        table.num_ready = int(batches["part"][-1])


def _mark_top(spans: Columns) -> Columns:
    """Sort by start, and mark the spans that begin after the ones before them have ended."""
    is_inner = spans["kind"] == CODES["network"]
    keys = (-spans["end_ns"], spans["end_ns"] > spans["start_ns"], is_inner, spans["start_ns"])
    spans = spans[np.lexsort(keys)]
    spans["is_top"] = spans["kind"] != CODES["network"]
    start_ns, end_ns = spans["start_ns"], np.maximum.accumulate(spans["end_ns"])
    if (start_ns[1:] >= end_ns[:-1]).all():  # usual: nothing overlaps
        return spans
    last_ns = 0
    for span in spans:
        if span["is_top"] and span["start_ns"] >= last_ns:
            last_ns = span["end_ns"]
        else:
            span["is_top"] = False
    return spans
