"""The terminal drawing, character by character, compared with the files in snapshots/.

To update them after a change: PENSTOCK_SNAPSHOTS=write pytest tests/unit/trace
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock import Timeline
from penstock.trace.model import Span
from penstock.trace.terminal import STYLES, paint
from support import synthetic_traces

pytestmark = pytest.mark.legacy

SNAPSHOTS = Path(__file__).parent / "snapshots"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def run(**changes: Any) -> Timeline:
    return Timeline(
        synthetic_traces.make_records(**{"num_workers": 3, "num_batches": 12, **changes})
    )


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in ESCAPES.sub("", text).splitlines()]


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("width", [80, 200])
def test_the_drawing_is_the_one_that_was_looked_at(width: int, colour: bool) -> None:
    drawn = run().draw(width, colour=colour)
    path = SNAPSHOTS / f"run-{width}-{'colour' if colour else 'plain'}.txt"
    if os.environ.get("PENSTOCK_SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    assert drawn == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 80, 119, 200, 400])
def test_no_line_is_wider_than_the_window(width: int) -> None:
    drawn = lines_of(run(num_workers=12, num_batches=60).draw(width))
    assert max(len(line) for line in drawn) <= width
    bars = [line for line in drawn if "▕" in line]
    assert {len(line) for line in bars} == {max(len(line) for line in bars)}
    assert max(len(line) for line in bars) >= width - 2


def test_colours_change_nothing_but_colours() -> None:
    timeline = run()
    assert "\x1b[" in timeline.draw(100, colour=True)
    assert "\x1b[" not in timeline.draw(100)
    assert lines_of(timeline.draw(100, colour=True)) == lines_of(timeline.draw(100))


def test_kinds_that_meet_in_a_lane_differ_without_colour_too() -> None:
    for lane in (("step", "stall", "deliver", "transfer", "launch"), ("fetch", "collate")):
        looks = [STYLES[kind].character for kind in lane if kind != "launch"]
        assert len(set(looks)) == len(looks)


def test_a_hundred_workers_are_shown_as_the_first_and_the_last() -> None:
    drawn = lines_of(run(num_workers=100, num_batches=200).draw(100))
    assert any("76 more workers" in line for line in drawn)
    assert any("worker 0 " in line for line in drawn)
    assert any("worker 99 " in line for line in drawn)
    assert len(drawn) < 40


@pytest.mark.parametrize(
    "records", [{}, {"lanes": [{"name": "main", "role": "main", "spans": []}]}]
)
def test_a_run_of_nothing_is_said_to_be_one(records: dict[str, Any]) -> None:
    timeline = Timeline(records)
    assert "nothing to draw" in timeline.draw(80)
    assert "No batch was delivered" in str(timeline.verdict)
    assert "nothing to draw" in str(timeline)


def test_a_gap_is_a_wait() -> None:
    row = paint([Span("fetch", "", 0, 10), Span("fetch", "", 30, 40)], 0, 40, 4)
    assert [cell.kind for cell in row] == ["fetch", "", "", "fetch"]


def test_what_takes_most_of_a_column_is_what_it_shows() -> None:
    spans = [Span("step", "", 0, 30), Span("stall", "", 30, 100)]
    assert paint(spans, 0, 100, 1) == [("stall", False)]
    assert paint(spans[:1], 0, 100, 1) == [("step", True)]
    assert paint([Span("copy", "", 0, 1)], 0, 1000, 1) == [("", False)]


def test_what_is_short_beside_a_column_is_not_lost() -> None:
    records = synthetic_traces.make_records(num_batches=8, fetch_ms=0.5, step_ms=50.0)
    drawn = Timeline(records).draw(60)
    (worker,) = [line for line in lines_of(drawn) if line.strip().startswith("worker 0")]
    assert "·" in worker
    assert "very short" in drawn
