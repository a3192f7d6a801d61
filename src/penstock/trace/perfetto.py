"""Perfetto renderer of the timeline: Chrome's trace-event JSON, also for chrome://tracing.

Each process of the run is a process and each lane a thread. A lane gets more threads if its spans
overlap without being nested: a span around a ``yield``, a span that never ended, or two threads.
Flows connect the parts of a batch to the batch. Counters show the batches ready and the memory
held.
"""

from __future__ import annotations

import bisect
import itertools
import json
from typing import Any

from penstock.trace.model import INNER_KINDS, WORDS, Lane, Span, TraceModel

_LINE_IDS = 10_000
"""Distance between the thread ids of two lines of one lane."""


def render(model: TraceModel) -> dict[str, Any]:
    """Return the trace in Chrome's trace-event format."""
    events: list[dict[str, Any]] = []
    fetched: list[tuple[Span, dict[str, Any]]] = []
    delivered: dict[tuple[int, int], dict[str, Any]] = {}
    for row, lane in enumerate(model.lanes, 1):
        pid = lane.pids[-1] if lane.pids else row
        lines = lay_out(lane.spans)
        for line in sorted({0, *lines}):
            events += _names(lane, pid, row + _LINE_IDS * line, line)
        for span, line in zip(lane.spans, lines, strict=True):
            event = _complete(span, pid, row + _LINE_IDS * line)
            events.append(event)
            if span.kind == "fetch" and lane.role == "worker":
                fetched.append((span, event))
            elif span.kind == "deliver":
                delivered[span.pass_, span.batch] = event
        events += [
            _counter("memory MiB", reading.at_ns, pid, reading.value / 2**20)
            for reading in lane.memory
        ]
    main = next(iter(model.of("main")), None)
    main_pid = main.pids[-1] if main is not None and main.pids else 1
    events += [_counter("batches ready", r.at_ns, main_pid, r.value) for r in model.ready]
    for number, (span, start) in enumerate(fetched, 1):
        end = delivered.get((span.pass_, span.batch))
        if end is not None and end["ts"] >= start["ts"]:
            events += [_flow("s", number, start), {**_flow("f", number, end), "bp": "e"}]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"writer": "penstock", **{k: str(v) for k, v in model.facts.items()}},
        "traceEvents": events,
    }


def dump(model: TraceModel) -> bytes:
    """Serialize the trace as a JSON file."""
    return json.dumps(render(model), separators=(",", ":")).encode()


def lay_out(spans: list[Span]) -> list[int]:
    """Assign each span a line, so that spans on one line are either nested or disjoint.

    The loader's own spans are on the first line. User spans that cross them move to other lines.

    Example:
        >>> fetches = [Span("fetch", "", 0, 10), Span("fetch", "", 10, 20)]
        >>> lay_out([*fetches, Span("user", "all", 5, 15), Span("user", "one", 6, 8)])
        [0, 0, 1, 0]
    """
    lines = [0] * len(spans)
    open_until: list[list[int]] = []
    starts, ends = _main_line(spans)
    order = sorted(range(len(spans)), key=lambda n: (spans[n].start_ns, -spans[n].end_ns))
    for number in order:
        span = spans[number]
        line = int(span.kind in INNER_KINDS and _crosses(span, starts, ends))
        while line < len(open_until):
            stack = open_until[line]
            while stack and stack[-1] <= span.start_ns:
                stack.pop()
            if not stack or span.end_ns <= stack[-1]:
                break
            line += 1
        while len(open_until) <= line:
            open_until.append([])
        open_until[line].append(span.end_ns)
        lines[number] = line
    return lines


def _main_line(spans: list[Span]) -> tuple[list[int], list[int]]:
    """Return the starts of the loader's own spans, and the latest end up to each of them."""
    own = sorted((s.start_ns, s.end_ns) for s in spans if s.kind not in INNER_KINDS)
    ends = list(itertools.accumulate((end for _, end in own), max))
    return [start for start, _ in own], ends


def _crosses(span: Span, starts: list[int], ends: list[int]) -> bool:
    """Return True if the span partly overlaps one of the loader's own spans."""
    place = bisect.bisect_right(starts, span.start_ns) - 1
    if place >= 0 and span.start_ns < ends[place]:
        return span.end_ns > ends[place]
    return place + 1 < len(starts) and starts[place + 1] < span.end_ns


def _names(lane: Lane, pid: int, row: int, line: int) -> list[dict[str, Any]]:
    name = "workers" if lane.role == "worker" else "training process"
    arguments = {
        "process_name": {"name": f"{name} ({pid})"},
        "thread_name": {"name": f"{lane.name} ({line + 1})" if line else lane.name},
        "thread_sort_index": {"sort_index": row},
    }
    place = {"ph": "M", "pid": pid, "tid": row}
    return [{**place, "name": key, "args": value} for key, value in arguments.items()]


def _complete(span: Span, pid: int, row: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if span.batch >= 0:
        arguments = {"epoch": span.pass_, "batch": span.batch, "part": span.part}
    if span.rows:
        arguments["samples"] = span.rows
    if span.cpu_ns >= 0 and span.kind == "fetch":
        arguments["cpu_ms"] = span.cpu_ns / 1e6
    if span.is_open:
        arguments["ended"] = "never"
    return {
        "ph": "X",
        "name": span.name or WORDS.get(span.kind, span.kind),
        "cat": span.kind,
        "ts": span.start_ns / 1000,
        "dur": max(0, span.took_ns) / 1000,
        "pid": pid,
        "tid": row,
        "args": arguments,
    }


def _counter(name: str, at_ns: int, pid: int, value: float) -> dict[str, Any]:
    place = {"ts": at_ns / 1000, "pid": pid, "tid": 0}
    return {"ph": "C", "name": name, **place, "args": {"value": value}}


def _flow(phase: str, number: int, event: dict[str, Any]) -> dict[str, Any]:
    """Return one end of the arrow from a part of a batch to the delivered batch."""
    place = {key: event[key] for key in ("ts", "pid", "tid")}
    return {"ph": phase, "id": number, "name": "part of a batch", "cat": "flow", **place}
