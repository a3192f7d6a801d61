"""Records read as columns are those that are read one by one."""

from __future__ import annotations

import pytest

from penstock.trace.record import RECORD, TRACE_BYTES, Kind, TraceBuffer, read_records
from penstock.trace.record_columns import RECORD_COLUMNS, read_columns, recent_columns, to_columns

pytestmark = pytest.mark.legacy


def fill(count: int) -> TraceBuffer:
    buffer = TraceBuffer(bytearray(TRACE_BYTES))
    for number in range(count):
        start_ns = 100 * (number + 1)
        place = (number % 3 - 1, number, 2, 8)
        buffer.add(Kind.LEASE, start_ns, start_ns + 50, *place, -1, 7, number % 5)
    return buffer


@pytest.mark.parametrize("count", [0, 1, 100, 10_000])
def test_columns_hold_the_same_records_also_where_the_buffer_is_overwritten(count: int) -> None:
    memory = fill(count).memory
    for since in (0, count - 5, count):
        records, _ = read_records(memory, since)
        columns = read_columns(memory, since)
        for name in set(RECORD_COLUMNS.names or ()) - {"number", "name"}:
            assert columns[name].tolist() == [getattr(one, name) for one in records]
            assert to_columns(records)[name].tolist() == columns[name].tolist()
    assert RECORD_COLUMNS.itemsize == RECORD.size


def test_a_record_that_is_overwritten_during_the_read_is_left_out() -> None:
    buffer = fill(10)
    assert len(read_columns(buffer.memory, 0)) == 10
    buffer.cells[0] = 12  # two numbers were taken, but not written yet
    assert read_columns(buffer.memory, 0)["batch"].tolist() == list(range(10))


def test_recent_records_ended_late_or_not_at_all_and_epochs_count_on() -> None:
    buffer = fill(100)
    buffer.add(Kind.LEASE, 5, 0, pass_=1, batch=500)
    found = recent_columns(buffer.memory, 9_950, pass_offset=10)
    assert found["batch"].tolist() == [98, 99, 500]
    assert found["pass_"].tolist() == [98 % 3 + 9, -1 if 99 % 3 == 0 else 10, 11]
