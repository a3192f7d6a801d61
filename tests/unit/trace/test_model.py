"""Records of any kind become lanes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.trace.accounting import make_account
from penstock.trace.model import Span, make_model, nest
from penstock.trace.record import Kind, Record

pytestmark = pytest.mark.legacy

MS = 1_000_000


def lane(role: str, *spans: Record, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": f"{role} {number}", "role": role, "number": number, "spans": spans, **more}


def make(*lanes: dict[str, Any], **facts: Any) -> Any:
    return make_model({"facts": facts, "lanes": lanes})


def test_a_batch_is_step_wait_transfer_and_the_rest() -> None:
    batch = Record(Kind.BATCH, "", 100, 200, 0, 0, 3, 2, 8, a=40, b=60)
    model = make(lane("main", batch._replace(extra=0), Record(Kind.USER, "x", 50, 55)))
    kinds = {span.kind: span.took_ns for span in model.lanes[0].spans}
    assert kinds == {"user": 5, "step": 40, "stall": 40, "deliver": 60}
    assert model.ready[0].value == 2


def test_the_way_to_the_device_is_cut_from_a_batch() -> None:
    model = make(lane("main", Record(Kind.BATCH, "", MS, 3 * MS, 0, 0, 0, 0, 8, a=MS, extra=500)))
    kinds = {span.kind: span.took_ns for span in model.lanes[0].spans}
    assert kinds == {"stall": MS, "transfer": MS // 2, "deliver": MS // 2}


def test_collating_is_cut_from_its_part() -> None:
    part, collate = (
        Record(Kind.LEASE, "", 100, 200, 0, 0, 0, 0, 4),
        Record(Kind.COLLATE, "", 160, 190, 0, 0, 0),
    )
    spans = make(lane("worker", part, collate)).lanes[0].spans
    assert [(span.kind, span.took_ns) for span in spans] == [("fetch", 60), ("collate", 40)]


def test_samples_and_spans_of_the_user_lie_within_their_part() -> None:
    spans = (
        make(
            lane(
                "worker",
                Record(Kind.LEASE, "", 100, 200, 0, 0, 0),
                Record(Kind.SAMPLE, "", 100, 150),
                Record(Kind.USER, "decode", 110, 140),
                Record(Kind.SAMPLE, "", 150, 200),
            )
        )
        .lanes[0]
        .spans
    )
    assert [(s.kind, s.depth) for s in spans] == [
        ("fetch", 0),
        ("sample", 1),
        ("user", 2),
        ("sample", 1),
    ]


def test_copies_and_the_gpu_get_lanes_of_their_own() -> None:
    kinds = (Kind.COPY, Kind.GPU, Kind.BATCH)
    main = lane("main", *(Record(kind, "", 10, 20) for kind in kinds))
    assert [found.role for found in make(main).lanes] == ["main", "copy", "gpu"]


def test_a_span_that_never_ended_lasts_until_its_worker_was_replaced() -> None:
    model = make(
        lane(
            "worker",
            Record(Kind.START, "", 5, 5, a=11),
            Record(Kind.LEASE, "", 10, 0, 0, 0, 0, 0, 4),
            Record(Kind.START, "", 60, 60, a=12),
            Record(Kind.LEASE, "", 70, 90, 0, 0, 0, 0, 4),
            pid=12,
        )
    )
    first, second = model.lanes[0].spans
    assert (first.is_open, first.took_ns, second.is_open) == (True, 50, False)
    assert sorted(model.lanes[0].pids) == [11, 12]
    assert any("never ended" in note for note in model.notes)


def test_a_clock_that_jumps_back_and_nonsense_are_told_apart_and_counted() -> None:
    model = make(
        lane(
            "worker",
            Record(Kind.LEASE, "", 100, 40, 0, 0, 0),
            Record(Kind.LEASE, "", 100, 140, 0, 0, 1),
            Record(Kind.LEASE, "", -5, 10),
            Record(99, "", 5, 10),
            Record(Kind.LEASE, "", 10**19, 10**19),
        )
    )
    assert sorted(span.took_ns for span in model.lanes[0].spans) == [0, 40]
    assert any(note.startswith("1 spans ended before") for note in model.notes)
    assert any(note.startswith("3 spans were invalid") for note in model.notes)


@pytest.mark.parametrize("records", [{}, {"lanes": []}, {"lanes": None, "facts": None}])
def test_nothing_at_all_is_a_model_without_lanes(records: dict[str, Any]) -> None:
    model = make_model(records)
    assert (model.lanes, model.total_ns, model.notes) == ([], 0, [])
    assert make_account(model).num_batches == 0


def test_a_hundred_workers_have_a_hundred_lanes_in_order() -> None:
    lanes = [lane("worker", Record(Kind.LEASE, "", 10, 20), number=number) for number in range(100)]
    found = make(*reversed(lanes)).lanes
    assert [one.number for one in found] == list(range(100))


def test_several_pools_share_the_lanes_of_their_workers() -> None:
    one = lane("worker", Record(Kind.LEASE, "", 10, 20, 0, 0), pid=7)
    other = lane("worker", Record(Kind.LEASE, "", 50, 60, 0, 1), pid=8)
    (found,) = make(one, other).lanes
    assert (len(found.spans), found.pids) == (2, [7, 8])


def test_memory_and_page_faults_are_read() -> None:
    worker = lane("worker", Record(Kind.MEMORY, "", 10, 10, a=2048, b=30))
    model = make(worker, lane("main", Record(Kind.MEMORY, "", 12, 12, a=1024, b=4, extra=100)))
    assert [r.value for r in model.lanes[1].memory] == [2048 * 1024]
    assert make_account(model).num_faults == 0  # without a batch, the account is empty
    assert model.free_memory[0].value == 100 * 2**20


def test_spans_that_overlap_are_drawn_apart() -> None:
    spans = nest([Span("user", "a", 0, 10), Span("user", "b", 5, 15), Span("user", "c", 11, 12)])
    assert [span.depth for span in spans] == [0, 1, 1] or [s.depth for s in spans] == [0, 1, 2]
    for one in spans:
        for other in spans:
            if one is not other and one.depth == other.depth:
                assert one.end_ns <= other.start_ns or other.end_ns <= one.start_ns


def test_spans_whose_names_had_no_room_are_counted() -> None:
    unnamed, named = Record(Kind.USER, "", 10, 20), Record(Kind.USER, "part", 20, 30)
    (note,) = make(lane("main", unnamed, named)).notes
    assert note.startswith("1 spans have no name")
