"""Hand-made traces: regular runs in which every number is known."""

from __future__ import annotations

from typing import Any

from penstock.trace.record import Kind, Record

MS = 1_000_000


def make_records(
    *,
    num_workers: int = 2,
    num_batches: int = 20,
    fetch_ms: float = 20.0,
    cpu_share: float = 1.0,
    queued_share: float = 0.0,
    step_ms: float = 5.0,
    deliver_ms: float = 0.2,
    transfer_ms: float = 0.0,
    rows: int = 8,
    start_ms: float = 10.0,
    at_ms: float = 1000.0,
    slow: dict[int, float] | None = None,
    slow_worker: int | None = None,
    spans_per_part: int = 0,
    name: str = "decode",
    **facts: Any,
) -> dict[str, Any]:
    """Make records of a run in which worker k loads batches k, k + num_workers, ...

    Args:
        queued_share: Share of the workers' time in which they wait for a core.
        slow: Batches that take this many times longer.
        slow_worker: The worker that takes ten times longer.
        spans_per_part: User spans within each part.
    """
    origin = int(at_ms * MS)
    workers: list[list[Record]] = [[] for _ in range(num_workers)]
    free = [origin + int(start_ms * MS)] * num_workers
    ends: list[int] = []
    for batch in range(num_batches):
        worker = batch % num_workers
        factor = (slow or {}).get(batch, 1.0) * (10.0 if worker == slow_worker else 1.0)
        took = int(fetch_ms * factor * MS)
        start = free[worker]
        cpu, queued = int(took * cpu_share), int(took * queued_share)
        place = (0, 0, batch, 0, rows)
        workers[worker].append(
            Record(Kind.LEASE, "", start, start + took, *place, cpu, queued, took // 50000)
        )
        for place in range(spans_per_part):
            first = start + took * place // spans_per_part
            last = start + took * (place + 1) // spans_per_part
            workers[worker].append(Record(Kind.USER, name, first, last, 0, 0, batch, 0))
        ends.append(start + took)
        free[worker] = start + took + MS // 10
    main = [Record(Kind.LAUNCH, "", origin, origin + int(start_ms * MS), 0, 0, a=num_workers)]
    now, before = origin + int(start_ms * MS), 0
    for batch, end in enumerate(ends):
        waited = max(0, end - now)
        last = now + waited + int((deliver_ms + transfer_ms) * MS)
        ready = sum(other <= now for other in ends[batch:])
        moved = int(transfer_ms * 1000)
        place = (0, 0, batch, ready, rows)
        main.append(Record(Kind.BATCH, "", now, last, *place, waited, before, moved))
        main.append(Record(Kind.MEMORY, "", last, last, a=(200 + batch) << 10, extra=8000))
        before, now = last, last + int(step_ms * MS)
    lanes: list[dict[str, Any]] = [{"name": "main", "role": "main", "pid": 100, "spans": main}]
    for number, spans in enumerate(workers):
        born = Record(Kind.START, "", origin + MS, origin + MS, a=101 + number)
        lane = {"name": f"worker {number}", "role": "worker", "number": number}
        lanes.append({**lane, "pid": 101 + number, "spans": [born, *spans]})
    known = {"num_workers": num_workers, "batch_size": rows, "pool": "process", "cores": 8}
    return {"facts": {**known, **facts}, "lanes": lanes}
