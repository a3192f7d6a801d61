"""Totals of a run, and comparisons of two runs."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Timeline
from penstock.trace.accounting import Account, compare
from support import synthetic_traces

pytestmark = pytest.mark.legacy

MS = 1e-3


def account_of(**changes: Any) -> Account:
    return Timeline(synthetic_traces.make_records(**changes)).account


def test_the_first_batch_of_an_epoch_is_start_up_and_the_rest_is_steady() -> None:
    run = account_of(num_workers=1, num_batches=11, fetch_ms=20.0, step_ms=5.0, deliver_ms=0.2)
    assert (run.num_batches, run.num_rows, run.steady_rows) == (11, 88, 80)
    assert run.startup_s == run.first_start_s == pytest.approx(30.2 * MS)
    assert run.step_s == pytest.approx(50 * MS)
    assert run.deliver_s == pytest.approx(2 * MS)
    assert run.steady_s == pytest.approx(run.step_s + run.deliver_s + run.stall_s)
    assert run.rate == pytest.approx(80 / run.steady_s)


def test_a_worker_is_busy_while_the_loop_waits_for_it() -> None:
    (only,) = account_of(num_workers=1, num_batches=11, cpu_share=0.5).workers
    assert only.fetch_s == pytest.approx(220 * MS)
    assert only.cpu_s == pytest.approx(110 * MS)
    assert only.wait_share == pytest.approx(0.5)
    assert only.row_s == pytest.approx(20 * MS / 8)
    assert only.stall_busy_share == pytest.approx(1.0, abs=0.01)


def test_a_worker_that_has_nothing_to_do_is_idle_while_the_loop_waits() -> None:
    slow, *others = account_of(num_workers=3, num_batches=30, slow_worker=0).workers
    assert slow.stall_busy_share > 0.9
    assert all(other.stall_busy_share < 0.3 for other in others)


def test_the_part_behind_the_longest_stalls_is_found() -> None:
    run = account_of(num_batches=60, slow={41: 40.0}, step_ms=11.0)
    assert run.slowest is not None
    assert run.slowest.batch == 41
    assert run.slowest_ratio == pytest.approx(40.0)
    assert account_of(num_batches=4).slowest is None  # too few batches


def test_two_runs_side_by_side_say_which_is_better() -> None:
    slow, fast = (
        Timeline(synthetic_traces.make_records(num_batches=60, num_workers=n)).account
        for n in (1, 4)
    )
    lines = {line.what: line for line in compare(slow, fast)}
    assert lines["samples a second"].is_better is True
    assert lines["waiting for batches"].is_better is True
    assert lines["workers"].change == "4.00x"
    assert all(line.is_better is None for line in compare(slow, slow))
