"""Chrome's trace-event format, checked by a validator in this file."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock import Timeline
from penstock.trace.record import Kind, Record
from penstock.trace.recorder import merge_records
from support import synthetic_traces

pytestmark = pytest.mark.legacy

NEEDS = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "ts", "pid", "tid", "id"},
    "f": {"name", "ts", "pid", "tid", "id"},
}
METADATA = {"process_name", "thread_name", "thread_sort_index"}


def faults_of(trace: Any) -> list[str]:
    """Return the violations of the trace-event rules in a trace."""
    found = []
    if set(trace) - {"traceEvents", "displayTimeUnit", "otherData"}:
        found.append("unknown member")
    rows: dict[Any, list[Any]] = defaultdict(list)
    flows: dict[Any, list[Any]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phase = event.get("ph")
        if phase not in NEEDS:
            found.append(f"unknown phase {phase!r}")
            continue
        if missing := NEEDS[phase] - set(event):
            found.append(f"{phase} without {sorted(missing)}")
            continue
        if any(type(event[key]) is not int for key in ("pid", "tid") if key in event):
            found.append("an id is no number")
        if "ts" in event and not event["ts"] >= 0:
            found.append("a time before the beginning")
        if phase == "X":
            rows[event["pid"], event["tid"]].append(event)
        elif phase in "sf":
            flows[event["cat"], event["id"]].append(event)
        elif phase == "M" and event["name"] not in METADATA:
            found.append(f"metadata {event['name']!r}")
        elif phase == "C" and not all(
            isinstance(value, (int, float)) for value in event["args"].values()
        ):
            found.append("a counter that counts no number")
    return found + _badly_nested(rows) + _badly_flowing(flows, rows)


def _badly_nested(rows: dict[Any, list[Any]]) -> list[str]:
    """Report spans of a row that are neither nested nor disjoint."""
    found = []
    for row, events in rows.items():
        ends: list[float] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            if event["dur"] < 0:
                found.append("a negative duration")
            end = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            if ends and end > ends[-1] + 1e-6:
                found.append(f"row {row}: {event['name']!r} at {event['ts']} reaches out")
            ends.append(end)
    return found


def _badly_flowing(flows: dict[Any, list[Any]], rows: dict[Any, list[Any]]) -> list[str]:
    """Report flows that are not one start and one later end, within spans of their rows."""
    found = []
    for key, events in flows.items():
        if sorted(event["ph"] for event in events) != ["f", "s"]:
            found.append(f"flow {key} is no pair")
            continue
        start, end = sorted(events, key=lambda event: event["ph"] == "f")
        if start["ts"] > end["ts"]:
            found.append(f"flow {key} goes back in time")
        for event in events:
            spans = rows[event["pid"], event["tid"]]
            if not any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in spans):
                found.append(f"flow {key} hangs in the air")
    return found


def test_an_exported_run_is_valid() -> None:
    records = synthetic_traces.make_records(num_batches=30, spans_per_part=3, transfer_ms=1.0)
    trace = Timeline(records).to_perfetto()
    assert faults_of(trace) == []
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert {"fetch", "stall", "step", "deliver", "transfer", "user", "flow"} <= kinds
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters == {"batches ready", "memory MiB"}


def test_every_part_flows_to_its_batch() -> None:
    trace = Timeline(synthetic_traces.make_records(num_batches=30)).to_perfetto()
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == 30


@pytest.mark.parametrize("records", [{}, synthetic_traces.make_records(num_batches=0)])
def test_a_run_of_nothing_is_valid_too(records: Any) -> None:
    assert faults_of(Timeline(records).to_perfetto()) == []


def test_a_file_of_it_is_packed_json(tmp_path: Path) -> None:
    path = tmp_path / "run.perfetto.json.gz"
    Timeline(synthetic_traces.make_records(name='"<é>')).save(path)
    assert faults_of(json.loads(gzip.decompress(path.read_bytes()))) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"ph": "Q"}, "unknown phase"),
        ({"dur": -5.0}, "negative"),
        ({"ts": -5.0}, "before the beginning"),
        ({"pid": "x"}, "no number"),
        ({"dur": 1e9}, "reaches out"),
    ],
)
def test_a_fault_would_be_noticed(spoil: dict[str, Any], words: str) -> None:
    trace = Timeline(synthetic_traces.make_records(spans_per_part=2)).to_perfetto()
    inner = [event for event in trace["traceEvents"] if event.get("cat") == "user"][1]
    inner.update(spoil)
    assert any(words in fault for fault in faults_of(trace))


def test_a_flow_without_an_end_would_be_noticed() -> None:
    trace = Timeline(synthetic_traces.make_records()).to_perfetto()
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ph"] != "f"]
    assert any("no pair" in fault for fault in faults_of(trace))


def test_spans_that_overlap_their_neighbours_get_a_line_of_their_own() -> None:
    records = synthetic_traces.make_records(num_batches=8, num_workers=1)
    first, *_, last = records["lanes"][1]["spans"][1:]
    middle = (first.start_ns + first.end_ns) // 2
    around = Record(Kind.USER, "around a yield", middle, last.end_ns - 5)
    never = Record(Kind.USER, "never ended", middle + 7, 0)
    records["lanes"][1]["spans"] += [around, never]
    trace = Timeline(records).to_perfetto()
    assert faults_of(trace) == []
    rows = {event["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert len({rows["around a yield"], rows["never ended"], rows["loading samples"]}) == 3


def test_two_loaders_that_run_at_once_are_two_lines() -> None:
    both = [synthetic_traces.make_records(at_ms=at_ms) for at_ms in (1000.0, 1007.0)]
    assert faults_of(Timeline(merge_records(both)).to_perfetto()) == []
