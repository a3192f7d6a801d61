"""Chrome's trace-event JSON: opens in Perfetto, chrome://tracing and others.

One process for each lane's process, one thread for each lane, and more where spans overlap without
lying within each other: a span around a ``yield``, one that never ended, two threads. Flows tie a
part of a batch to the batch; counters carry the batches that were ready and the memory held.
"""

from __future__ import annotations

import bisect
import itertools
import json
from typing import Any

from penstock.trace.model import WORDS, Lane, Span, TraceModel


def render(model: TraceModel) -> dict[str, Any]:
    """The trace in Chrome's form."""
    events: list[dict[str, Any]] = []
    threads: dict[int, int] = {}
    for row, lane in enumerate(model.lanes, 1):
        pid = lane.pids[-1] if lane.pids else row
        lines = lay_out(lane.spans)
        for line in sorted({0, *lines}):
            events += _names(lane, pid, _thread(row, line), line)
        for span, line in zip(lane.spans, lines, strict=True):
            threads[id(span)] = _thread(row, line)
            events.append(_complete(span, pid, threads[id(span)]))
        events += [
            _counter("memory MiB", reading.at_ns, pid, reading.value / 2**20)
            for reading in lane.memory
        ]
    main = next(iter(model.of("main")), None)
    main_pid = main.pids[-1] if main is not None and main.pids else 1
    events += [_counter("batches ready", r.at_ns, main_pid, r.value) for r in model.ready]
    events += _flows(model, threads)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"writer": "penstock", **{k: str(v) for k, v in model.facts.items()}},
        "traceEvents": events,
    }


def dump(model: TraceModel) -> bytes:
    """As the bytes of a file."""
    return json.dumps(render(model), separators=(",", ":")).encode()


def lay_out(spans: list[Span]) -> list[int]:
    """For each span a line, so that those of one line lie within each other or apart.

    What the loader noted comes first: spans of the user give way to it.

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
        line = int(span.kind in _GIVES_WAY and _crosses(span, starts, ends))
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


_GIVES_WAY = frozenset(("user", "sample", "transform"))


def _main_line(spans: list[Span]) -> tuple[list[int], list[int]]:
    """When each of the loader's own spans begins, and when the last one up to it ends."""
    own = sorted((s.start_ns, s.end_ns) for s in spans if s.kind not in _GIVES_WAY)
    ends = list(itertools.accumulate((end for _, end in own), max))
    return [start for start, _ in own], ends


def _crosses(span: Span, starts: list[int], ends: list[int]) -> bool:
    """Does it begin or end in the middle of one of the loader's own spans?"""
    place = bisect.bisect_right(starts, span.start_ns) - 1
    if place >= 0 and span.start_ns < ends[place]:
        return span.end_ns > ends[place]
    return place + 1 < len(starts) and starts[place + 1] < span.end_ns


def _thread(row: int, line: int) -> int:
    return row + 10_000 * line


def _names(lane: Lane, pid: int, row: int, line: int) -> list[dict[str, Any]]:
    name = "workers" if lane.role == "worker" else "training process"
    place = {"ph": "M", "pid": pid, "tid": row}
    return [
        {**place, "name": "process_name", "args": {"name": f"{name} ({pid})"}},
        {
            **place,
            "name": "thread_name",
            "args": {"name": f"{lane.name} ({line + 1})" if line else lane.name},
        },
        {**place, "name": "thread_sort_index", "args": {"sort_index": row}},
    ]


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
    return {
        "ph": "C",
        "name": name,
        "ts": at_ns / 1000,
        "pid": pid,
        "tid": 0,
        "args": {"value": value},
    }


def _flows(model: TraceModel, threads: dict[int, int]) -> list[dict[str, Any]]:
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
                    "tid": threads[id(one)],
                }
                events.append({**event, "bp": "e"} if phase == "f" else event)
    return events
