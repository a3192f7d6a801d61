"""The status that a loader writes is what a reader gets, whole or not at all."""

from __future__ import annotations

import os

import pytest

from penstock.trace.live_status import BUFFER_AT, HEAD, LiveStatus, read_status
from penstock.trace.record import TRACE_BYTES, Kind, TraceBuffer, read_records
from penstock.trace.recorder import Recorder

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs a memfd"),
]


def fill(buffer: TraceBuffer, first: int, last: int) -> None:
    for batch in range(first, last):
        buffer.add(Kind.BATCH, batch + 1, batch + 2, batch=batch, name=buffer.name("a name"))


def test_the_copy_holds_the_records_of_the_buffer_also_after_it_wrapped() -> None:
    buffer, status = TraceBuffer(bytearray(TRACE_BYTES)), LiveStatus()
    num_batches = 0
    for more in (1, 10, buffer.capacity // 2, buffer.capacity, 3 * buffer.capacity, 7):
        fill(buffer, num_batches, num_batches + more)
        num_batches += more
        status.write({"round": more}, buffer)
        found = read_status(status._fd)
        assert found is not None
        header, copied = found
        assert header == {"round": more}
        assert read_records(copied, 0) == read_records(buffer.memory, 0)
        assert read_records(copied, 0)[0][-1].name == "a name"
    fill(buffer, num_batches, num_batches + 1)
    assert read_records(copied, 0) != read_records(buffer.memory, 0)


def test_a_write_in_progress_is_not_read() -> None:
    buffer, status = TraceBuffer(bytearray(TRACE_BYTES)), LiveStatus()
    assert read_status(status._fd) is None  # nothing was written
    status.write({}, buffer)
    assert read_status(status._fd) is not None
    os.pwrite(status._fd, HEAD.pack(3, 2), 0)
    assert read_status(status._fd) is None


def test_a_header_that_is_too_long_is_left_out() -> None:
    buffer, status = TraceBuffer(bytearray(TRACE_BYTES)), LiveStatus()
    status.write({"is_short": True}, buffer)
    status.write({"text": "x" * BUFFER_AT}, buffer)
    found = read_status(status._fd)
    assert found is not None
    assert found[0] == {"is_short": True}


def num_statuses() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # of the listing itself
            continue
    return sum("penstock-status" in link for link in links)


def test_a_loader_has_a_status_after_a_second_and_until_it_is_gone() -> None:
    before = num_statuses()
    recorder = Recorder(trace_bytes=TRACE_BYTES)
    recorder.record_batch(recorder.record_request(), 0, 0, has_prefetcher=False)
    assert num_statuses() == before
    recorder._publish_ns = recorder._next_look_ns = 0  # a second later
    recorder.record_batch(recorder.record_request(), 0, 1, has_prefetcher=False)
    assert num_statuses() == before + 1
    del recorder
    assert num_statuses() == before


def test_a_recorder_that_is_off_has_no_status() -> None:
    before = num_statuses()
    recorder = Recorder()
    recorder._publish()
    recorder.note_waiting(0.0, list)
    assert num_statuses() == before
