from __future__ import annotations

import pytest

from penstock.engine.remote.node_clock import NodeClock
from penstock.trace.record import TRACE_BYTES, Kind, Record, read_records

pytestmark = pytest.mark.legacy
AHEAD_NS = 7_000_000_000


def test_the_offset_comes_from_the_fastest_answer() -> None:
    clock = NodeClock()
    clock.note(1_000_000, AHEAD_NS + 1_900_000, answered_ns=2_000_000)  # slow, and lopsided
    assert clock.error_ns == 500_000
    clock.note(3_000_000, AHEAD_NS + 3_000_100, answered_ns=3_000_200)
    assert (clock.offset_ns, clock.error_ns) == (-AHEAD_NS, 100)
    clock.note(4_000_000, AHEAD_NS + 4_900_000, answered_ns=5_000_000)  # slow again
    assert clock.offset_ns == -AHEAD_NS


def test_an_answer_that_is_older_than_the_drift_of_clocks_gives_way() -> None:
    clock, hour_ns = NodeClock(), 3600 * 10**9
    clock.note(0, AHEAD_NS, answered_ns=0)
    clock.note(hour_ns, AHEAD_NS + hour_ns + 40_000_000, answered_ns=hour_ns + 20_000_000)
    assert clock.offset_ns == -AHEAD_NS - 30_000_000


def test_records_are_copied_with_the_times_of_this_process() -> None:
    clock = NodeClock()
    clock.note(1000, AHEAD_NS + 1000, answered_ns=1000)
    ours = memoryview(bytearray(TRACE_BYTES))
    record = Record(Kind.LEASE, "decode", AHEAD_NS + 50, AHEAD_NS + 90, 1, 2, 3, 4, 5, 6, 7, 8)
    clock.copy([record], ours)
    clock.copy([record._replace(batch=9)], ours)
    found, head = read_records(ours, 0)
    assert head == 2
    assert found[0] == record._replace(start_ns=50, end_ns=90)
    assert found[1].batch == 9
