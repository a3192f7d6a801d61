"""The recorder reads buffers while they are written, and drops the oldest records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.memory.messages import CONTROL_BYTES, trace_buffers
from penstock.trace import recorder as recorder_module
from penstock.trace.model import make_model
from penstock.trace.record import TRACE_BYTES, Kind, Record, TraceBuffer
from penstock.trace.recorder import ProcessRecords, Recorder, merge_records

pytestmark = pytest.mark.legacy


def make_pool(recorder: Recorder, num_workers: int = 1) -> tuple[Any, list[TraceBuffer]]:
    """Return a pool of workers in this process's memory, and the buffers that they write."""
    cells = memoryview(bytearray(CONTROL_BYTES + num_workers * TRACE_BYTES)).cast("q")
    buffers = trace_buffers(cells, num_workers, TRACE_BYTES)
    return recorder.add_pool(buffers), [TraceBuffer(buffer) for buffer in buffers]


def lane_of(recorder: Recorder, role: str) -> Any:
    (found,) = (lane for lane in recorder.records()["lanes"] if lane["role"] == role)
    return SimpleNamespace(**found)


def test_a_part_that_has_not_ended_is_shown_and_read_again_when_it_has() -> None:
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    _, (buffer,) = make_pool(recorder)
    buffer.add(Kind.START, 5, 5, a=77)
    number = buffer.add(Kind.LEASE, 10, 0, batch=0)
    assert [span.end_ns for span in lane_of(recorder, "worker").spans] == [5, 0]
    buffer.end(number, 90)
    buffer.add(Kind.LEASE, 95, 99, batch=1)
    worker = lane_of(recorder, "worker")
    assert [span.end_ns for span in worker.spans] == [5, 90, 99]
    assert (worker.pid, worker.num_lost) == (77, 0)


def test_a_part_that_never_ends_holds_up_the_others_for_a_while_only() -> None:
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    _, (buffer,) = make_pool(recorder)
    buffer.add(Kind.LEASE, 10, 0)
    for number in range(recorder_module.MAX_PENDING + 10):
        buffer.add(Kind.LEASE, 20 + number, 21 + number)
    assert len(lane_of(recorder, "worker").spans) == recorder_module.MAX_PENDING + 11
    buffer.add(Kind.LEASE, 9000, 9001)
    assert len(lane_of(recorder, "worker").spans) == recorder_module.MAX_PENDING + 12


def test_a_pool_that_has_ended_leaves_its_records_ended_or_not() -> None:
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    pool, (buffer,) = make_pool(recorder)
    buffer.add(Kind.LEASE, 10, 20)
    buffer.add(Kind.LEASE, 30, 0)
    recorder.remove_pool(pool)
    recorder.remove_pool(pool)
    assert [span.end_ns for span in lane_of(recorder, "worker").spans] == [20, 0]


def test_epochs_are_counted_on_from_pool_to_pool() -> None:
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    for _ in range(2):
        pool, (buffer,) = make_pool(recorder)
        recorder.begin_pass(pool, 0)
        buffer.add(Kind.LEASE, 10, 20, pass_=0)
        recorder.remove_pool(pool)
    lanes = [lane for lane in recorder.records()["lanes"] if lane["role"] == "worker"]
    assert [span.pass_ for lane in lanes for span in lane["spans"]] == [0, 1]


def recent(recorder: Recorder) -> list[Record]:
    return [span for lane in recorder.records()["lanes"] for span in lane["spans"]]


def test_a_batch_is_recorded_with_what_was_waited_for_and_brought_to_the_device() -> None:
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    recorder.begin_pass(None, 0)
    start_ns = recorder.record_request()
    recorder.record_delivery(0, 3, 8, None, {1: SimpleNamespace(is_done=True)})
    end_ns = recorder.record_batch(start_ns, 7, 3, has_prefetcher=True)
    batch = next(span for span in recent(recorder) if span.kind == Kind.BATCH)
    assert (batch.start_ns, batch.end_ns, batch.b) == (start_ns, end_ns, 7)
    assert (batch.pass_, batch.batch, batch.rows, batch.a) == (0, 3, 8, 0)
    assert batch.extra == (end_ns - start_ns) // 1000


def test_one_that_is_off_takes_all_calls_and_records_nothing() -> None:
    recorder = Recorder()
    assert recorder.add_pool([]) is None
    recorder.begin_pass(None, 0)
    recorder.record_launch(1, 2)
    start_ns = recorder.record_request()
    recorder.record_delivery(0, 0, 4, None, {})
    recorder.record_batch(start_ns, 0, 0, has_prefetcher=False)
    recorder.record_no_slot(1)
    recorder.end_epoch()
    recorder.remove_pool(None)
    assert recent(recorder) == []
    assert [lane["spans"] for lane in recorder.records()["lanes"]] == [[]]


def test_the_oldest_records_go_and_are_counted() -> None:
    buffer = TraceBuffer(bytearray(TRACE_BYTES))
    for number in range(10):
        buffer.add(Kind.BATCH, 1 + number, 2 + number)
    process = ProcessRecords("main", "main", buffer.memory)
    process.read()
    process.drop_oldest(4)
    assert [record.start_ns for record in process.records] == [7, 8, 9, 10]
    assert process.num_lost == 6


def test_what_was_recorded_before_it_was_cleared_is_forgotten() -> None:
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    _, (buffer,) = make_pool(recorder)
    buffer.add(Kind.LEASE, 10, 20)
    recorder.clear()
    buffer.add(Kind.LEASE, 30, 40)
    assert [span.start_ns for span in lane_of(recorder, "worker").spans] == [30]


def lane(role: str, *spans: Record) -> dict[str, Any]:
    return {"name": f"{role} 0", "role": role, "number": 0, "spans": spans}


def test_loaders_of_one_program_are_counted_on() -> None:
    def records(number: int) -> dict[str, Any]:
        batch = Record(Kind.BATCH, "", 10 + number, 20 + number, 0, 0, 0, 0, 4)
        worker = lane("worker", Record(Kind.LEASE, "", 5 + number, 9 + number, 0, 0, 0))
        return {"facts": {"number": number}, "lanes": [lane("main", batch), worker]}

    model = make_model(merge_records([records(0), records(1)]))
    assert [one.name for one in model.lanes] == ["main 0", "worker 0", "loader 2: worker 0"]
    assert {batch.pass_ for batch in model.batches()} == {0, 1}
