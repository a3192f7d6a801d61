"""Columns of spans, made from records or from a model, give the same totals."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from penstock.trace.accounting import account_spans, make_account
from penstock.trace.metrics import Percentiles, make_metrics
from penstock.trace.model import TraceModel, make_model
from penstock.trace.record import Kind, Record
from penstock.trace.recorder import merge_records
from penstock.trace.span_table import tabulate_records
from support import synthetic_traces

pytestmark = pytest.mark.legacy


def with_collate(records: dict[str, Any]) -> dict[str, Any]:
    for lane in records["lanes"][1:]:
        for span in list(lane["spans"])[1:]:
            start_ns = span.end_ns - (span.end_ns - span.start_ns) // 3
            record = Record(Kind.COLLATE, "", start_ns, span.end_ns, 0, 0, span.batch)
            lane["spans"].append(record)
    return records


def with_waits(records: dict[str, Any]) -> dict[str, Any]:
    for lane in records["lanes"][1:]:
        for span in list(lane["spans"])[1:]:
            lane["spans"].append(Record(Kind.NETWORK, "", span.start_ns, span.start_ns + 10**6))
    return records


def inline(prefetches: bool) -> dict[str, Any]:
    """A loader without workers. With a prefetcher, the copy overlaps the loading."""
    spans, at_ns, before_ns = [], 10**9, 0
    for batch in range(30):
        loaded_ns = at_ns + 4_000_000 + batch * 1000
        spans.append(
            Record(Kind.LEASE, "", at_ns + 10, loaded_ns, 0, 0, batch, 0, 8, 10**6, -1, -1)
        )
        end_ns = loaded_ns + 300_000
        moved_us = 2000 if prefetches else 0
        place = (0, 0, batch, 0, 8, 0, before_ns, moved_us)
        spans.append(Record(Kind.BATCH, "", at_ns, end_ns, *place))
        before_ns, at_ns = end_ns, end_ns + 1_000_000
    return {"facts": {"cores": 2}, "lanes": [{"name": "main", "role": "main", "spans": spans}]}


def killed() -> dict[str, Any]:
    """A part that never ended, because its worker was replaced, and one that is being loaded."""
    records = synthetic_traces.make_records(num_batches=40)
    spans = records["lanes"][1]["spans"]
    spans[5] = spans[5]._replace(end_ns=0)
    spans.append(Record(Kind.START, "", spans[5].start_ns + 5, spans[5].start_ns + 5, a=9))
    last_ns = max(span.end_ns for span in spans)
    spans.append(Record(Kind.LEASE, "", last_ns + 1, 0, 0, 0, 99, 0, 8, -1, -1, -1))
    return records


def scrambled(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    slow = {batch: draw.uniform(0.1, 4.0) for batch in range(60)}
    records = synthetic_traces.make_records(num_batches=60, num_workers=3, slow=slow)
    for lane in records["lanes"]:
        draw.shuffle(lane["spans"])
    return records


CASES: dict[str, Any] = {
    "plain": synthetic_traces.make_records,
    "slow": lambda: synthetic_traces.make_records(num_batches=60, slow={41: 40.0}, step_ms=11.0),
    "transfer": lambda: synthetic_traces.make_records(transfer_ms=3.0),
    "collate": lambda: with_collate(synthetic_traces.make_records()),
    "network": lambda: with_waits(synthetic_traces.make_records()),
    "inline": lambda: inline(prefetches=False),
    "inline, prefetched": lambda: inline(prefetches=True),
    "killed": killed,
    "epochs": lambda: merge_records(
        [synthetic_traces.make_records(at_ms=at_ms) for at_ms in (1_000.0, 11_000.0, 21_000.0)]
    ),
    "scrambled": lambda: scrambled(1),
    "empty": lambda: {"facts": {}, "lanes": []},
}


@pytest.mark.parametrize("case", CASES)
def test_the_totals_of_records_are_those_of_their_model(case: str) -> None:
    records = CASES[case]()
    plain, quick = make_account(make_model(records)), account_spans(tabulate_records(records))
    assert flat(quick) == pytest.approx(flat(plain), rel=1e-6, abs=1e-9)


def flat(account: Any) -> dict[str, float]:
    values = asdict(account)
    for worker in values.pop("workers"):
        values.update({f"{name} of {worker['number']}": worker[name] for name in worker})
    slowest = account.slowest
    values["slowest"] = -1.0 if slowest is None else slowest.pass_ * 1e6 + slowest.batch
    return values


# The same numbers, computed span by span


def sum_by_batch(model: TraceModel, role: str, *kinds: str) -> dict[Any, float]:
    took_s: dict[Any, float] = defaultdict(float)
    for lane in model.of(role):
        for span in lane.of(*kinds):
            if not span.is_open:
                took_s[span.pass_, span.batch] += span.took_ns * 1e-9
    return took_s


def percentiles(values: Any) -> Percentiles:
    p50_s, p95_s, p99_s = (float(np.percentile(list(values), q)) for q in (50, 95, 99))
    return Percentiles(p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)


@pytest.mark.parametrize("case", [name for name in CASES if name != "empty"])
def test_metrics_are_those_of_a_plain_computation(case: str) -> None:
    records = CASES[case]()
    model, metrics = make_model(records), make_metrics(records, {})
    batches = [(span.pass_, span.batch) for span in model.batches()]
    load = sum_by_batch(model, "worker" if model.of("worker") else "main", "fetch", "collate")
    wait = sum_by_batch(model, "main", "stall", "fetch")
    step = sum_by_batch(model, "main", "step")
    expected = {
        "load": percentiles([load[key] for key in batches]),
        "wait": percentiles([wait[key] for key in batches]),
        "step": percentiles(step.values()),
    }
    for name, value in expected.items():
        assert asdict(getattr(metrics, name)) == pytest.approx(asdict(value), rel=1e-6, abs=1e-12)
    first: dict[int, int] = {}
    for pass_, batch in batches:
        first[pass_] = min(batch, first.get(pass_, batch))
    steady_s = dict.fromkeys(("stall", "fetch", "step", "deliver", "transfer"), 0.0)
    for span in model.of("main")[0].top():
        if span.kind in steady_s and (span.kind == "step" or first[span.pass_] != span.batch):
            steady_s[span.kind] += span.took_ns * 1e-9
    waited = (steady_s["stall"] + steady_s["fetch"]) / sum(steady_s.values())
    assert metrics.wait_share == pytest.approx(waited)
    assert metrics.num_ready == model.ready[-1].value
    assert metrics.window_s == pytest.approx(model.total_ns * 1e-9)


def test_a_record_more_changes_the_totals() -> None:
    """The comparison above would fail if a lane were left out."""
    records = synthetic_traces.make_records()
    fewer = {**records, "lanes": records["lanes"][:-1]}
    plain = flat(account_spans(tabulate_records(records)))
    assert flat(account_spans(tabulate_records(fewer))) != pytest.approx(plain)


def test_values_of_a_damaged_file_that_are_too_large_do_not_stop_the_account() -> None:
    records = synthetic_traces.make_records()
    spans = records["lanes"][1]["spans"]
    spans[3] = spans[3]._replace(batch=10**30, extra=10**25)
    assert make_account(make_model(records)).num_batches == 20
