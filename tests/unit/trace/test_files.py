"""Traces on disk survive a round trip, and other files are rejected."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from penstock import Timeline
from penstock.errors import BadTrace
from penstock.trace.files import dump_records, read_records, write_records
from penstock.trace.record import Kind, Record
from support import synthetic_traces

pytestmark = pytest.mark.legacy

RECORDS: dict[str, Any] = {
    "facts": {"num_workers": 2, "dataset": "Images"},
    "lanes": [
        {
            "name": "main",
            "role": "main",
            "pid": 3,
            "spans": [Record(Kind.BATCH, "", 10, 20, 0, 0, 1, 2, 8, 3, 4, 5)],
        },
        {
            "name": "worker 0",
            "role": "worker",
            "number": 0,
            "num_lost": 6,
            "spans": [Record(Kind.LEASE, "", 1, 9), Record(Kind.USER, "</script><b>", 2, 0)],
        },
    ],
}


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    write_records(RECORDS, tmp_path / name)
    found = read_records(tmp_path / name)
    assert found["facts"] == RECORDS["facts"]
    for one, other in zip(found["lanes"], RECORDS["lanes"], strict=True):
        assert one == {**other, "spans": other["spans"]}
    assert (tmp_path / name).read_bytes()[:2] == (b"\x1f\x8b" if name.endswith("gz") else b'{"')
    assert [path.name for path in tmp_path.iterdir()] == [name]


def bad(tmp_path: Path, content: bytes) -> BadTrace:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadTrace) as caught:
        Timeline.load(path)
    assert "Try:" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"import torch\n", "is not JSON"),
        (b"\x00\xff\xfe" * 50, "is not JSON"),
        (b"[1, 2]", "a list"),
        (b"<!doctype html><html>", "open it in a browser"),
        (b"{}", "an object with no keys"),
        (b'{"traceEvents": []}', "Perfetto"),
        (b'{"format": "penstock-trace", "version": 7}', "version 7"),
        (b'{"format": "penstock-trace", "version": "x"}', "version 'x'"),
        (b'{"format": "penstock-trace", "version": 1}', "damaged"),
        (b'{"format": "penstock-trace", "version": 1, "lanes": [3]}', "damaged"),
        (b"[" * 100_000, "is truncated"),
        (b"\x1f\x8b\x08garbage", "cannot be decompressed"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in str(bad(tmp_path, content))


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_breaks_off_anywhere_is_never_a_traceback(tmp_path: Path, packed: bool) -> None:
    whole = dump_records(RECORDS)
    whole = gzip.compress(whole) if packed else whole
    for end in range(0, len(whole) - 1, 7):
        bad(tmp_path, whole[:end])


def test_a_file_with_any_value_spoiled_is_a_bad_trace_or_a_timeline(tmp_path: Path) -> None:
    generator = random.Random(0)
    spoils: list[Any] = [None, "x", -1, 2**70, [], {}, 1.5, True, math.nan, math.inf]
    path = tmp_path / "spoiled.json"
    for _ in range(300):
        content = json.loads(dump_records(RECORDS))
        place: Any = content
        while True:
            key = generator.choice(list(place) if isinstance(place, dict) else range(len(place)))
            deeper = place[key]
            if not isinstance(deeper, (dict, list)) or not deeper or generator.random() < 0.15:
                break
            place = deeper
        place[key] = generator.choice(spoils)
        path.write_text(json.dumps(content))
        try:
            timeline = Timeline.load(path)
        except BadTrace:
            continue
        str(timeline)
        timeline.to_html()
        timeline.to_perfetto()


@pytest.mark.parametrize("field", ["pid", "num_lost", "number", "name"])
def test_a_lane_with_a_spoiled_field_is_damaged(tmp_path: Path, field: str) -> None:
    content = json.loads(dump_records(RECORDS))
    content["lanes"][0][field] = math.nan
    assert "damaged" in str(bad(tmp_path, json.dumps(content).encode()))


def test_a_trace_that_claims_a_billion_cores_is_judged_all_the_same() -> None:
    odd = {"cores": 2**31, "prefetch_factor": 0}
    verdict = Timeline(synthetic_traces.make_records(num_batches=120, **odd)).verdict
    assert verdict.cause == "decode"


def test_a_queue_that_counts_below_zero_is_drawn() -> None:
    records = synthetic_traces.make_records(num_workers=2)
    main = records["lanes"][0]["spans"]
    main[3] = main[3]._replace(part=-(2**63))
    assert "worker 0" in Timeline(records).draw()


def test_a_file_that_is_not_there_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        Timeline.load(tmp_path / "none.json")
    with pytest.raises(BadTrace, match="cannot be read"):
        Timeline.load(tmp_path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_records({"facts": {("no", "key"): 1}, "lanes": []}, path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_timeline_is_not_written_to_a_name_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"run\.txt"):
        Timeline(RECORDS).save(tmp_path / "run.txt")
