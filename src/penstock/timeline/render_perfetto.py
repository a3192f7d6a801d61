"""Chrome's trace-event JSON: opens in Perfetto, chrome://tracing and others.

One process for each lane's process, one thread for each depth-safe row; flows tie a part of a batch
to the batch; counters carry the batches that were ready and the memory held.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.timeline.model import WORDS, Lane, Model, Span


def render(model: Model) -> dict[str, Any]:
    """The trace in Chrome's form."""
    events: list[dict[str, Any]] = []
    for row, lane in enumerate(model.lanes, 1):
        pid = lane.pids[-1] if lane.pids else row
        events += _names(lane, pid, row)
        events += [event for span in lane.spans for event in _complete(span, pid, row)]
        events += [
            _counter("memory MiB", reading.at_ns, pid, reading.value / 2**20)
            for reading in lane.memory
        ]
    main = next(iter(model.of("main")), None)
    main_pid = main.pids[-1] if main is not None and main.pids else 1
    events += [_counter("batches ready", r.at_ns, main_pid, r.value) for r in model.ready]
    events += _flows(model)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"writer": "penstock", **{k: str(v) for k, v in model.facts.items()}},
        "traceEvents": events,
    }


def dump(model: Model) -> bytes:
    """As the bytes of a file."""
    return json.dumps(render(model), separators=(",", ":")).encode()


def _names(lane: Lane, pid: int, row: int) -> list[dict[str, Any]]:
    name = "workers" if lane.role == "worker" else "training process"
    place = {"ph": "M", "pid": pid, "tid": row}
    return [
        {**place, "name": "process_name", "args": {"name": f"{name} ({pid})"}},
        {**place, "name": "thread_name", "args": {"name": lane.name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": row}},
    ]


def _complete(span: Span, pid: int, row: int) -> list[dict[str, Any]]:
    arguments: dict[str, Any] = {}
    if span.batch >= 0:
        arguments = {"epoch": span.pass_, "batch": span.batch, "part": span.part}
    if span.rows:
        arguments["samples"] = span.rows
    if span.cpu_ns >= 0 and span.kind == "fetch":
        arguments["cpu_ms"] = span.cpu_ns / 1e6
    if span.is_open:
        arguments["ended"] = "never"
    return [
        {
            "ph": "X",
            "name": span.name or WORDS.get(span.kind, span.kind),
            "cat": span.kind,
            "ts": span.start_ns / 1000,
            "dur": max(0, span.took_ns) / 1000,
            "pid": pid,
            "tid": row,
            "args": arguments,
        }
    ]


def _counter(name: str, at_ns: int, pid: int, value: float) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": name,
        "ts": at_ns / 1000,
        "pid": pid,
        "tid": 0,
        "args": {"value": value},
    }


def _flows(model: Model) -> list[dict[str, Any]]:
    """From the part of a batch that was loaded last to the batch that was handed out."""
    rows = {id(lane): row for row, lane in enumerate(model.lanes, 1)}
    handed = {
        (span.pass_, span.batch): (span, lane)
        for lane in model.of("main")
        for span in lane.spans
        if span.kind == "deliver"
    }
    events: list[dict[str, Any]] = []
    for lane in model.of("worker"):
        for span in lane.spans:
            goal = handed.get((span.pass_, span.batch)) if span.kind == "fetch" else None
            if goal is None or goal[0].start_ns < span.start_ns:
                continue
            number = len(events) // 2 + 1
            for phase, one, where in (("s", span, lane), ("f", *goal)):
                pid = where.pids[-1] if where.pids else rows[id(where)]
                event = {
                    "ph": phase,
                    "id": number,
                    "name": "part of a batch",
                    "cat": "flow",
                    "ts": one.start_ns / 1000,
                    "pid": pid,
                    "tid": rows[id(where)],
                }
                events.append({**event, "bp": "e"} if phase == "f" else event)
    return events
