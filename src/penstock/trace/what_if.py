"""What would another setting bring? Distils a trace and lets the simulator run it again."""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import BadArgument, BadTrace
from penstock.planning import prefetch_depth as pace
from penstock.trace import simulator
from penstock.trace.model import Lane, Model, Span
from penstock.trace.record import BATCH, LEASE, Record
from penstock.trace.simulator import Cost, Run, Settings, Workload

if TYPE_CHECKING:
    from penstock.trace.timeline import Timeline

NUM_BATCHES = 200
MAX_WORKERS, MAX_COUNT = 1024, 10_000_000
"""More takes minutes to imagine, or is no wish but a slip."""
PACKED_S, PACKED_BYTES_PER_S = 2e-5, 2e9
"""What a packed sample costs: finding it, and copying it (150 KB samples, one core)."""


def simulate(
    run: Any,
    *,
    workers: int | None = None,
    prefetch: int | None = None,
    batch_size: int | None = None,
    device_prefetch: int | None = None,
    packed: bool = False,
    faster_decode: float = 1.0,
    step_ms: float | None = None,
    cores: int | None = None,
    num_batches: int = NUM_BATCHES,
) -> Timeline:
    """A run as it would have been with other settings: a timeline like any other.

    Args:
        run: A loader that has delivered batches, its timeline, or the path of a trace.
        workers, prefetch, batch_size: As ``num_workers``, ``prefetch_factor`` and ``batch_size``.
        device_prefetch: Batches on the device ahead of the step; 0: the step waits for each copy.
        packed: As if samples lay ready in a packed file.
        faster_decode: As if a sample took this many times less to compute.
        step_ms: As if each step took so long.
        cores: As if on another machine.

    Example:
        >>> import time, penstock
        >>> class Slow:
        ...     def __len__(self):
        ...         return 120
        ...     def __getitem__(self, i):
        ...         time.sleep(0.01)
        ...         return i
        >>> loader = penstock.DataLoader(Slow(), batch_size=4, num_workers=1)
        >>> for batch in loader:
        ...     pass
        >>> one, four = (penstock.simulate(loader, workers=n).account.rate for n in (1, 4))
        >>> four > one
        True
    """
    from penstock.trace.timeline import Timeline

    timeline = _timeline_of(run)
    _check_counts(workers=workers, device_prefetch=device_prefetch, least=0)
    _check_counts(prefetch=prefetch, batch_size=batch_size, cores=cores, num_batches=num_batches)
    _check_numbers(faster_decode=faster_decode, step_ms=step_ms)
    workload, settings = distil(timeline.model, num_batches)
    if step_ms is not None:
        workload = replace(workload, steps=(Cost(0.0, step_ms * 1e-3),))
    elif batch_size is not None:
        factor = batch_size / max(1, settings.batch_rows)
        workload = replace(workload, steps=tuple(step.times(factor) for step in workload.steps))
    if faster_decode != 1.0 or packed:
        workload = _with_faster_rows(workload, faster_decode, packed, timeline.facts)
    if device_prefetch is not None and device_prefetch > 0:
        workload = replace(workload, transfer_s=0.0)
    settings = replace(
        settings,
        num_workers=settings.num_workers if workers is None else workers,
        batch_rows=batch_size or settings.batch_rows,
        depth=settings.depth if prefetch is None else prefetch,
        cores=cores or settings.cores,
    )
    records = _as_records(run_model(workload, settings), settings, timeline.facts)
    return Timeline(records)


def _check_counts(*, least: int = 1, **counts: Any) -> None:
    for name, value in counts.items():
        most = MAX_WORKERS if name == "workers" else MAX_COUNT
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise BadArgument(
                f"{name}={value!r} is no whole number from {least} to {most:,}",
                remedy=f"simulate(..., {name}=2)",
            )


def _check_numbers(**numbers: Any) -> None:
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_factor = name == "faster_decode"
        if value is not None and not (is_number and (value > 0 if is_factor else 0 <= value < 1e9)):
            raise BadArgument(
                f"{name}={value!r} is no {'factor above 0' if is_factor else 'time from 0 on'}",
                remedy=f"simulate(..., {name}=1.5)",
            )


def predict_rate(model: Model, *, num_workers: int) -> float | None:
    """Samples a second with another number of workers; None where the trace does not tell."""
    if num_workers > MAX_WORKERS:
        return None
    try:
        workload, settings = distil(model, NUM_BATCHES)
    except BadTrace:
        return None
    return run_model(workload, replace(settings, num_workers=num_workers)).rate


def run_model(workload: Workload, settings: Settings) -> Run:
    if settings.num_workers:
        return simulator.simulate(workload, settings)
    return simulator.simulate_inline(workload, settings)


def distil(model: Model, num_batches: int) -> tuple[Workload, Settings]:
    """What a trace says about the work, and the settings it was made with.

    Raises:
        BadTrace: There is too little in it.
    """
    main = next(iter(model.of("main")), None)
    lanes = [lane for lane in model.of("worker") if lane.spans] or ([main] if main else [])
    spans = [s for lane in lanes for s in lane.top() if s.kind == "fetch"]
    fetches = [s for s in spans if s.rows > 0 and not s.is_open]  # no rows: dropped half way
    batches = model.batches()
    if main is None or len(batches) < 3 or not fetches:
        raise BadTrace(
            f"{len(batches)} batches and {len(fetches)} parts of them are too few to imagine "
            "another run from",
            remedy="DataLoader(..., trace=True)"
            if model.facts.get("is_off") is True
            else "let the loader run for a few seconds first",
        )
    batch_rows = int(statistics.median(batch.rows for batch in batches))
    is_inline = not model.of("worker")
    steps = [s for s in main.top() if s.kind == "step"]
    workload = Workload(
        rows=_row_costs(fetches),
        part_s=_pause_s(lanes) if not is_inline else 0.0,
        collate=_collate_costs(lanes, fetches),
        deliver=Cost(_mean_s(s for s in main.top()[1:] if s.kind == "deliver"), 0.0),
        transfer_s=_mean_s(s for s in main.top() if s.kind == "transfer"),
        steps=_step_costs(main, steps, is_inline),
        start_s=_start_s(model, main),
        batch_rows=max(1, int(statistics.median(s.rows for s in fetches))),
    )
    asked = model.facts.get("prefetch_factor")
    known = model.facts.get("cores")
    cores = float(known if isinstance(known, (int, float)) and known >= 1 else len(lanes))
    settings = Settings(
        num_workers=0 if is_inline else len(model.of("worker")),
        batch_rows=max(1, batch_rows),
        num_batches=num_batches,
        cores=_free_cores(fetches, workload, lanes, cores),
        depth=asked if isinstance(asked, int) and asked >= 1 else None,
        can_split=not workload.collate,
        split_from_s=pace.SPLIT_FROM_S,
        depth_target_s=pace.DEPTH_TARGET_S,
        min_depth=pace.MIN_DEPTH,
        max_depth=pace.MAX_DEPTH,
    )
    return workload, settings


def _row_costs(fetches: list[Span]) -> tuple[Cost, ...]:
    """What a sample took in each part, without the time that others held the cores.

    How much of a part was computing, and how much such time, was measured in some; the others are
    taken to be like those.
    """
    known = [span for span in fetches if span.cpu_ns >= 0 and span.took_ns > 0]
    took = sum(span.took_ns for span in known)
    cpu_share = sum(min(span.cpu_ns, span.took_ns) for span in known) / took if took else 1.0
    queued_share = sum(max(0, span.queued_ns) for span in known) / took if took else 0.0
    wait_share = max(0.0, 1.0 - cpu_share - queued_share)
    costs = []
    for span in fetches:
        if not span.rows or span.took_ns <= 0:
            continue
        if span.cpu_ns >= 0:
            cpu_ns = float(min(span.cpu_ns, span.took_ns))
            wait_ns = max(0.0, span.took_ns - cpu_ns - max(0, span.queued_ns))
        else:
            cpu_ns, wait_ns = span.took_ns * cpu_share, span.took_ns * wait_share
        costs.append(Cost(cpu_ns, wait_ns).times(1e-9 / span.rows))
    warm = costs[1:] if len(costs) > 4 else costs  # the first opens files and fills caches
    return tuple(warm) or (Cost(0.0, 0.0),)


def _free_cores(fetches: list[Span], workload: Workload, lanes: list[Lane], cores: float) -> float:
    """The cores that were to be had: fewer than the machine has where other programs ran.

    More workers do not get more of them: schedulers share out between sessions and containers, and
    hosts between machines (seen on two shared cores: 2, 4 and 8 computing workers, the same rate).
    """
    known = [span for span in fetches if span.queued_ns >= 0 and span.cpu_ns > 0]
    cpu = sum(span.cpu_ns for span in known)
    wanted = cpu + sum(span.queued_ns for span in known)
    if len(known) < 5 or not cpu:
        return cores
    step_s = sum(cost.cpu_s + cost.wait_s for cost in workload.steps)
    own = sum(cost.cpu_s for cost in workload.steps) / step_s if step_s else 0.0
    took = sum(span.took_ns for span in known)
    own += len(lanes) * min(1.0, wanted / took)
    share = cpu / wanted
    if share >= 0.9 * min(1.0, cores / max(own, 1e-9)):
        return cores
    return max(0.25, min(cores, share * max(own, 1.0)))


def _collate_costs(lanes: list[Lane], fetches: list[Span]) -> tuple[Cost, ...]:
    """What collating took for each sample. What it computed is noted with its part, for both."""
    parts = {(s.pass_, s.batch, s.part): s for s in fetches if s.rows}
    spans = [s for lane in lanes for s in lane.top() if s.kind == "collate"]
    pairs = [(s, parts[s.pass_, s.batch, s.part]) for s in spans if s[5:8] in parts]
    known = [(s, part) for s, part in pairs if part.cpu_ns >= 0]
    took = sum(s.took_ns for s, _ in known)
    cpu = sum(min(s.took_ns, max(0, part.cpu_ns - part.took_ns)) for s, part in known)
    queued = sum(min(s.took_ns, max(0, part.queued_ns)) for s, part in known)
    cpu_share = cpu / took if took else 1.0
    wait_share = max(0.0, 1.0 - cpu_share - (queued / took if took else 0.0))
    return tuple(
        Cost(cpu_share, wait_share).times(s.took_ns * 1e-9 / part.rows) for s, part in pairs
    )


def _pause_s(lanes: list[Lane]) -> float:
    """What a worker needs between two parts when it has another one to do."""
    pauses = []
    for lane in lanes:
        spans = [span for span in lane.top() if span.kind in ("fetch", "collate")]
        pairs = itertools.pairwise(spans)
        pauses += [b.start_ns - a.end_ns for a, b in pairs if b.start_ns > a.end_ns]
    if not pauses:
        return 5e-5
    return sorted(pauses)[len(pauses) // 10] * 1e-9


def _mean_s(spans: Any) -> float:
    taken = [span.took_ns for span in spans]
    return statistics.fmean(taken) * 1e-9 if taken else 0.0


def _step_costs(main: Lane, steps: list[Span], is_inline: bool) -> tuple[Cost, ...]:
    if not steps:
        return (Cost(0.0, 0.0),)
    total_s = sum(step.took_ns for step in steps) * 1e-9
    busy = 0.0
    if len(main.cpu_s) > 1 and total_s > 0 and not is_inline:
        first, last = main.cpu_s[0], main.cpu_s[-1]
        deliver_s = sum(s.took_ns for s in main.top() if s.kind == "deliver") * 1e-9
        span_s = max((last.at_ns - first.at_ns) * 1e-9, 1e-9)
        busy = max(0.0, (last.value - first.value) / span_s - deliver_s / span_s)
        busy = min(1.0, busy * span_s / total_s)
    return tuple(
        Cost(step.took_ns * 1e-9 * busy, step.took_ns * 1e-9 * (1 - busy)) for step in steps
    )


def _start_s(model: Model, main: Lane) -> float:
    """From the moment that workers were asked for until they began to load."""
    launches = [s for s in main.top() if s.kind == "launch"]
    firsts = [min(s.start_ns for s in lane.spans) for lane in model.of("worker") if lane.spans]
    if not launches or not firsts:
        return 0.0
    return max(0.0, (statistics.median(firsts) - launches[0].end_ns) * 1e-9)


def _with_faster_rows(
    workload: Workload, factor: float, packed: bool, facts: dict[str, Any]
) -> Workload:
    if packed:
        sample_bytes = facts.get("sample_bytes")
        num_bytes = sample_bytes if isinstance(sample_bytes, (int, float)) else 0
        return replace(workload, rows=(Cost(PACKED_S + num_bytes / PACKED_BYTES_PER_S, 0.0),))
    rows = tuple(Cost(cost.cpu_s / factor, cost.wait_s) for cost in workload.rows)
    return replace(workload, rows=rows)


def _timeline_of(run: Any) -> Timeline:
    from penstock.trace.timeline import Timeline

    if isinstance(run, Timeline):
        return run
    if isinstance(run, (str, os.PathLike)):
        return Timeline.load(run)
    if callable(getattr(run, "timeline", None)):
        return run.timeline()  # type: ignore[no-any-return]
    raise BadArgument(
        f"a {type(run).__name__} is no loader, no timeline and no path of a trace",
        remedy="penstock.simulate(loader, workers=4)",
    )


def _as_records(run: Run, settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    """An imagined run in the form of a real one."""
    workers: dict[int, list[Record]] = {number: [] for number in range(settings.num_workers)}
    main: list[Record] = []
    stalls = {e.batch: e for e in run.events if e.kind == "stall"}
    transfers = {e.batch: e for e in run.events if e.kind == "transfer"}
    inline = {e.batch: e for e in run.events if e.kind == "fetch" and e.worker < 0}
    steps = {e.batch: e for e in run.events if e.kind == "step"}
    ready = dict(enumerate(count for _, count in run.ready))
    for event in run.events:
        start, end = _ns(event.start_s), _ns(event.end_s)
        if event.kind == "fetch":
            lane = main if event.worker < 0 else workers[event.worker]
            note = Record(LEASE, "", start, end, 0, 0, event.batch, event.part, event.rows)
            cpu_ns, wait_ns = _ns(event.cost.cpu_s), _ns(event.cost.wait_s)
            queued_ns = max(0, end - start - cpu_ns - wait_ns)
            lane.append(note._replace(a=cpu_ns, b=queued_ns, extra=-1))
        is_batch = event.kind == "deliver" or (event.kind == "fetch" and event.worker < 0)
        if is_batch:
            batch, rows = event.batch, settings.batch_rows
            begun = min(e.start_s for e in (stalls.get(batch), transfers.get(batch), event) if e)
            begun = inline[batch].start_s if batch in inline else begun
            stall, transfer = stalls.get(batch), transfers.get(batch)
            waited = _ns(stall.end_s) - _ns(stall.start_s) if stall else 0
            moved = int((transfer.end_s - transfer.start_s) * 1e6) if transfer else 0
            before = steps.get(batch - 1)
            returned = _ns(before.start_s) if before else 0
            note = Record(BATCH, "", _ns(begun), end, 0, 0, batch, ready.get(batch, 0), rows)
            main.append(note._replace(a=waited, b=returned, extra=moved))
    lanes: list[dict[str, Any]] = [{"name": "main", "role": "main", "spans": main}]
    lanes += [
        {"name": f"worker {number}", "role": "worker", "number": number, "spans": spans}
        for number, spans in workers.items()
    ]
    imagined = {
        "num_workers": settings.num_workers,
        "batch_size": settings.batch_rows,
        "prefetch_factor": settings.depth,
    }
    return {"facts": {**facts, **imagined, "imagined": True}, "lanes": lanes}


def _ns(seconds: float) -> int:
    return 1 + round(seconds * 1e9)
