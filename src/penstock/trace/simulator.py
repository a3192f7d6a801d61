"""Discrete-event simulation of a loader, based on the times in a trace.

    measure_costs(model) -> MeasuredCosts: times of parts of batches, deliveries, copies and steps
                            SimulationSettings: workers, prefetch depth, samples per batch, ...
    simulate_run(costs, settings) -> SimulatedRun: records like those of a real run

Batches are leased ahead up to the prefetch depth, split into parts, and assigned to the worker with
the fewest queued samples. Workers load their parts one after the other. Delivery is in order. The
training process copies a batch to the device, assembles it, and runs its step. Without workers, it
loads each batch itself. Workers and the training process share the cores evenly. Too few cores slow
down computing, but not waiting. Times are drawn from the measured times, so rare slow samples stay
rare and slow.

Called in the training process or by ``penstock trace``, through :mod:`penstock.trace.what_if` and
:attr:`penstock.Timeline.verdict`.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from penstock.errors import BadTrace
from penstock.planning.prefetch_depth import (
    DEPTH_TARGET_S,
    MAX_DEPTH,
    MIN_DEPTH,
    SPLIT_FROM_S,
    batches_ahead,
    num_parts,
)
from penstock.trace.accounting import make_account
from penstock.trace.model import Lane, Span, TraceModel
from penstock.trace.record import Kind, Record

NUM_BATCHES = 200
MAX_WORKERS = 1024
"""Simulating more workers takes minutes."""
MAX_DRAWS = 1000
"""Maximum number of draws per part. More draws would not change the mean noticeably."""
_NEAR = 1.05
"""A simulation that exceeds the measured rate by less than this factor is accurate enough."""
_DONE = 1e-9
"""A task with less than this share of its work left is complete."""


class Cost(NamedTuple):
    """Duration of an operation: CPU time, and time waiting for something other than a core."""

    cpu_s: float
    wait_s: float

    def times(self, factor: float) -> Cost:
        return Cost(self.cpu_s * factor, self.wait_s * factor)


_NO_COST, _SHORT_COST = Cost(0.0, 0.0), Cost(5e-5, 0.0)


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Costs of the operations of a run.

    Args:
        rows: For each measured part, the cost per sample.
        part_s: Time of a worker between two parts.
        collate: Costs of collating, per sample. Empty if samples are written directly into slots.
        deliver: Cost of each batch in the training process.
        transfer_s: Time for which the training process copies a batch to the device.
        steps: Cost of each step.
        start_s: Time until a worker has started.
        part_rows: Samples per part in the measured run.
    """

    rows: tuple[Cost, ...]
    part_s: float = 5e-5
    collate: tuple[Cost, ...] = ()
    deliver: Cost = _SHORT_COST
    transfer_s: float = 0.0
    steps: tuple[Cost, ...] = (_NO_COST,)
    start_s: float = 0.0
    part_rows: int = 1


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """The loader to simulate.

    Args:
        depth: Batches in flight per worker. None means the engine's choice.
        can_split: Batches can be split into parts.
    """

    num_workers: int
    batch_rows: int
    num_batches: int
    cores: float
    depth: int | None = None
    can_split: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The simulated records of the training process and the workers."""

    main: list[Record]
    workers: list[list[Record]]

    @property
    def rate(self) -> float:
        """Samples per second, from the first batch to the last."""
        first, *later = (record for record in self.main if record.kind == Kind.BATCH)
        if not later:
            return 0.0
        took_ns = max(1, later[-1].end_ns - first.end_ns)
        return sum(batch.rows for batch in later) * 1e9 / took_ns

    def lanes(self) -> list[dict[str, Any]]:
        """Return the lanes in the form of a trace file."""
        workers = [
            {"name": f"worker {number}", "role": "worker", "number": number, "spans": records}
            for number, records in enumerate(self.workers)
        ]
        return [{"name": "main", "role": "main", "spans": self.main}, *workers]


def predict_rate(model: TraceModel, num_workers: int) -> float | None:
    """Predict the samples per second with a given number of workers.

    The prediction is at most linear in the number of workers: twice as many workers load at most
    twice as fast as was measured.

    Returns None if the trace has too little data or ``num_workers`` is too large to simulate.
    """
    if num_workers > MAX_WORKERS:
        return None
    try:
        costs, settings = measure_costs(model, NUM_BATCHES)
    except BadTrace:
        return None
    run = make_account(model)
    costs = calibrate(costs, settings, run.rate)
    rate = simulate_run(costs, replace(settings, num_workers=num_workers)).rate
    most = run.rate * max(1.0, num_workers / max(1, settings.num_workers))
    if not settings.num_workers and run.loading_s:  # loading and steps take turns
        most = max(1, num_workers) * run.steady_rows / run.loading_s
    return min(rate, most)


def calibrate(
    costs: MeasuredCosts, settings: SimulationSettings, measured_rate: float
) -> MeasuredCosts:
    """Return costs with which the simulation of the measured run is not faster than that run.

    Costs do not include everything that slows a run down, such as other programs that come and go.
    """
    for _ in range(3):
        rate = simulate_run(costs, settings).rate
        if not measured_rate or rate <= _NEAR * measured_rate:
            break
        factor = rate / measured_rate
        costs = replace(costs, rows=tuple(row.times(factor) for row in costs.rows))
    return costs


def simulate_run(costs: MeasuredCosts, settings: SimulationSettings) -> SimulatedRun:
    """Simulate a run.

    Example:
        >>> slow = MeasuredCosts(rows=(Cost(0.0, 0.01),), part_rows=4)
        >>> def rate(num_workers):
        ...     settings = SimulationSettings(
        ...         num_workers=num_workers, batch_rows=4, num_batches=100, cores=1
        ...     )
        ...     return round(simulate_run(slow, settings).rate, -1)
        >>> rate(0), rate(1), rate(2)  # waiting needs no core
        (100.0, 100.0, 200.0)
    """
    return _Simulation(costs, settings).run()


class _Task:
    """An operation in progress. ``then`` is called when it is complete."""

    __slots__ = ("cost", "left", "then")

    def __init__(self, cost: Cost, then: Callable[[], None]) -> None:
        self.cost = cost
        self.left = 1.0
        self.then = then


class _Simulation:
    """State of a simulated run: tasks in progress, the queue of each worker, and the records."""

    def __init__(self, costs: MeasuredCosts, settings: SimulationSettings) -> None:
        self._costs = costs
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._now_s = 0.0
        self._tasks: list[_Task] = []
        num_workers = settings.num_workers
        self._queues: list[deque[tuple[int, int, int]]] = [deque() for _ in range(num_workers)]
        self._queued_rows = [0] * num_workers
        self._is_busy = [True] * num_workers
        self._missing_parts: dict[int, int] = {}
        self._num_leased = self._num_taken = self._delivered_ns = 0
        self._main: list[Record] = []
        self._workers: list[list[Record]] = [[] for _ in range(num_workers)]
        mean = _mean(costs.rows)
        self._batch_s = (mean.cpu_s + mean.wait_s) * settings.batch_rows
        chosen = min(MAX_DEPTH, max(MIN_DEPTH, int(DEPTH_TARGET_S / max(self._batch_s, 1e-6))))
        depth = chosen if settings.depth is None else settings.depth
        self._limit, self._known_parts = depth * settings.num_workers, 1
        if settings.can_split and self._batch_s >= SPLIT_FROM_S:
            self._known_parts = num_parts(self._batch_s, settings.batch_rows, num_workers)
        if settings.depth is None:
            self._limit = batches_ahead(self._limit, self._known_parts, num_workers)

    def run(self) -> SimulatedRun:
        for worker in range(self._settings.num_workers):
            self._begin(Cost(0.0, self._costs.start_s), partial(self._free, worker))
        for batch in range(self._settings.num_batches):
            if self._settings.num_workers:
                self._take(batch)
            else:
                self._load_inline(batch)
            self._spend(self._random.choice(self._costs.steps))
        return SimulatedRun(main=self._main, workers=self._workers)

    # -- time ------------------------------------------------------------------------------------

    def _begin(self, cost: Cost, then: Callable[[], None] = lambda: None) -> _Task:
        task = _Task(cost, then)
        self._tasks.append(task)
        return task

    def _slowdown(self) -> float:
        """Return how many times slower computing is. All tasks share the cores equally."""
        cores = self._settings.cores
        active = [task.cost for task in self._tasks if task.cost.cpu_s > 0]
        if len(active) <= cores:
            return 1.0
        low, high = 1.0, max(1.0, len(active) / cores)
        for _ in range(20):
            middle = (low + high) / 2
            wanting = sum(c.cpu_s * middle / (c.wait_s + c.cpu_s * middle) for c in active)
            low, high = (middle, high) if wanting > cores * middle else (low, middle)
        return high

    def _advance(self) -> None:
        """Advance the clock to the end of the next task."""
        slowdown = self._slowdown()
        takes_s = [task.cost.wait_s + task.cost.cpu_s * slowdown for task in self._tasks]
        passed_s = min(task.left * s for task, s in zip(self._tasks, takes_s, strict=True))
        self._now_s += passed_s
        for task, task_s in zip(self._tasks, takes_s, strict=True):
            task.left -= passed_s / task_s if task_s > 0 else 1.0
        ended = [task for task in self._tasks if task.left <= _DONE]
        self._tasks = [task for task in self._tasks if task.left > _DONE]
        for task in ended:
            task.then()

    # -- workers ---------------------------------------------------------------------------------

    def _lease(self) -> None:
        settings = self._settings
        limit = self._limit
        num_open = self._num_leased - self._num_taken
        if num_open and limit - num_open < max(1, limit // 4):
            return
        while self._num_leased < min(settings.num_batches, self._num_taken + limit):
            batch, rows, parts = self._num_leased, settings.batch_rows, self._known_parts
            if settings.can_split and batch == 0:
                parts = num_parts(0.0, rows, settings.num_workers)
            self._missing_parts[batch] = parts
            bounds = [rows * part // parts for part in range(parts + 1)]
            for part, (first, last) in enumerate(itertools.pairwise(bounds)):
                worker = min(range(settings.num_workers), key=self._queued_rows.__getitem__)
                self._queued_rows[worker] += last - first
                self._queues[worker].append((batch, part, last - first))
            self._num_leased += 1
        for worker in range(settings.num_workers):
            self._load_next(worker)

    def _load_next(self, worker: int) -> None:
        if self._is_busy[worker] or not self._queues[worker]:
            return
        batch, part, rows = self._queues[worker].popleft()
        self._is_busy[worker] = True
        start_s, cost = self._now_s, self._part_cost(rows)

        def end() -> None:
            self._workers[worker].append(self._lease_record(batch, part, rows, start_s, cost))
            self._missing_parts[batch] -= 1
            self._queued_rows[worker] -= rows
            self._begin(Cost(0.0, self._costs.part_s), partial(self._free, worker))

        self._begin(cost, end)

    def _free(self, worker: int) -> None:
        self._is_busy[worker] = False
        self._load_next(worker)

    def _part_cost(self, rows: int) -> Cost:
        """Draw a cost from the measured costs. Large parts average several draws."""
        num_draws = max(1, min(MAX_DRAWS, round(rows / max(1, self._costs.part_rows))))
        cost = _mean([self._random.choice(self._costs.rows) for _ in range(num_draws)])
        if self._costs.collate:
            collate = self._random.choice(self._costs.collate)
            cost = Cost(cost.cpu_s + collate.cpu_s, cost.wait_s + collate.wait_s)
        return cost.times(rows)

    def _lease_record(self, batch: int, part: int, rows: int, start_s: float, cost: Cost) -> Record:
        start_ns, end_ns = _ns(start_s), _ns(self._now_s)
        queued_ns = max(0, end_ns - start_ns - round((cost.cpu_s + cost.wait_s) * 1e9))
        measured = (round(cost.cpu_s * 1e9), queued_ns, -1)
        return Record(Kind.LEASE, "", start_ns, end_ns, 0, 0, batch, part, rows, *measured)

    # -- the training process --------------------------------------------------------------------

    def _take(self, batch: int) -> None:
        """Wait for a batch, copy it to the device, and assemble it."""
        start_s = self._now_s
        self._lease()
        while self._missing_parts[batch]:
            self._advance()
        del self._missing_parts[batch]
        stall_ns = _ns(self._now_s) - _ns(start_s)
        num_ready = sum(not missing for missing in self._missing_parts.values())
        self._num_taken = batch + 1
        self._lease()
        transfer_us = round(self._spend(Cost(0.0, self._costs.transfer_s)) * 1e6)
        self._spend(self._costs.deliver)
        self._deliver(batch, start_s, num_ready, stall_ns, transfer_us)

    def _load_inline(self, batch: int) -> None:
        start_s, rows = self._now_s, self._settings.batch_rows
        cost = self._part_cost(rows)
        self._spend(cost)
        self._main.append(self._lease_record(batch, 0, rows, start_s, cost))
        self._deliver(batch, start_s)

    def _deliver(
        self,
        batch: int,
        start_s: float,
        num_ready: int = 0,
        stall_ns: int = 0,
        transfer_us: int = 0,
    ) -> None:
        end_ns, rows = _ns(self._now_s), self._settings.batch_rows
        measured = (rows, stall_ns, self._delivered_ns, transfer_us)
        self._main.append(
            Record(Kind.BATCH, "", _ns(start_s), end_ns, 0, 0, batch, num_ready, *measured)
        )
        self._delivered_ns = end_ns

    def _spend(self, cost: Cost) -> float:
        """Run an operation in the training process, while the workers continue.

        Returns how long it took.
        """
        start_s = self._now_s
        if cost.cpu_s + cost.wait_s > 0:
            task = self._begin(cost)
            while task.left > _DONE:
                self._advance()
        return self._now_s - start_s


def _mean(costs: Sequence[Cost]) -> Cost:
    count = len(costs)
    return Cost(sum(c.cpu_s for c in costs) / count, sum(c.wait_s for c in costs) / count)


def _ns(seconds: float) -> int:
    """Convert to nanoseconds. Never returns 0, which means "no time" in a record."""
    return 1 + round(seconds * 1e9)


# -- costs from a trace ----------------------------------------------------------------------------


def measure_costs(model: TraceModel, num_batches: int) -> tuple[MeasuredCosts, SimulationSettings]:
    """Return the costs measured in a trace, and the settings of the traced loader.

    Raises:
        BadTrace: The trace has too few batches.
    """
    main = next(iter(model.of("main")), None)
    workers = model.of("worker")
    lanes = [lane for lane in workers if lane.spans] or ([main] if main else [])
    parts = [span for lane in lanes for span in lane.of("fetch")]
    fetches = [s for s in parts if s.rows > 0 and not s.is_open]  # abandoned parts have 0 rows
    batches = model.batches()
    if main is None or len(batches) < 3 or not fetches:
        raise BadTrace(
            f"{len(batches)} batches and {len(fetches)} parts are too few for a simulation",
            remedy="DataLoader(..., trace=True)"
            if model.facts.get("is_off") is True
            else "let the loader run for a few seconds first",
        )
    costs = MeasuredCosts(
        rows=_row_costs(fetches),
        part_s=_pause_s(lanes) if workers else 0.0,
        collate=_collate_costs(lanes, fetches),
        deliver=Cost(_mean_s(s for s in main.top()[1:] if s.kind == "deliver"), 0.0),
        transfer_s=_mean_s(main.of("transfer")),
        steps=_step_costs(main, is_inline=not workers),
        start_s=_start_s(workers, main),
        part_rows=max(1, int(statistics.median(s.rows for s in fetches))),
    )
    asked, known = model.facts.get("prefetch_factor"), model.facts.get("cores")
    cores = float(known if isinstance(known, (int, float)) and known >= 1 else len(lanes))
    settings = SimulationSettings(
        num_workers=model.num_workers,
        batch_rows=max(1, int(statistics.median(batch.rows for batch in batches))),
        num_batches=num_batches,
        cores=_free_cores(fetches, costs.steps, max(1, model.num_workers), cores),
        depth=asked if isinstance(asked, int) and asked >= 1 else None,
        can_split=not costs.collate,
    )
    return costs, settings


def _row_costs(fetches: list[Span]) -> tuple[Cost, ...]:
    """Return the cost per sample of each part, without the time spent waiting for a core.

    CPU time and waiting time were measured in some parts. The others get the same shares.
    """
    fetches = [span for span in fetches if span.took_ns > 0]
    known = [span for span in fetches if span.cpu_ns >= 0]
    took = sum(span.took_ns for span in known)
    cpu_share = sum(min(span.cpu_ns, span.took_ns) for span in known) / took if took else 1.0
    queued_share = sum(max(0, span.queued_ns) for span in known) / took if took else 0.0
    wait_share = max(0.0, 1.0 - cpu_share - queued_share)
    costs = []
    for span in fetches:
        cpu_ns, wait_ns = span.took_ns * cpu_share, span.took_ns * wait_share
        if span.cpu_ns >= 0:
            cpu_ns = float(min(span.cpu_ns, span.took_ns))
            wait_ns = max(0.0, span.took_ns - cpu_ns - max(0, span.queued_ns))
        costs.append(Cost(cpu_ns, wait_ns).times(1e-9 / span.rows))
    warm = costs[1:] if len(costs) > 4 else costs  # the first opens files and fills caches
    return tuple(warm) or (_NO_COST,)


def _collate_costs(lanes: list[Lane], fetches: list[Span]) -> tuple[Cost, ...]:
    """Return the costs of collating, per sample.

    The CPU time recorded with a part covers both fetching and collating.
    """
    parts = {span.place: span for span in fetches}
    spans = [span for lane in lanes for span in lane.of("collate")]
    pairs = [(span, parts[span.place]) for span in spans if span.place in parts]
    known = [(span, part) for span, part in pairs if part.cpu_ns >= 0]
    took = sum(span.took_ns for span, _ in known)
    cpu = sum(min(s.took_ns, max(0, part.cpu_ns - part.took_ns)) for s, part in known)
    queued = sum(min(s.took_ns, max(0, part.queued_ns)) for s, part in known)
    cpu_share, queued_share = (cpu / took, queued / took) if took else (1.0, 0.0)
    cost = Cost(cpu_share, max(0.0, 1.0 - cpu_share - queued_share))
    return tuple(cost.times(span.took_ns * 1e-9 / part.rows) for span, part in pairs)


def _free_cores(fetches: list[Span], steps: Sequence[Cost], num_lanes: int, cores: float) -> float:
    """Return the number of cores available: fewer than the machine has if other programs ran.

    More workers do not get more cores, because schedulers divide them between sessions and
    containers, and hosts divide them between virtual machines. On two shared cores, 2, 4 and 8
    computing workers had the same rate.
    """
    known = [
        span for span in fetches if span.queued_ns >= 0 and span.cpu_ns > 0 and span.took_ns > 0
    ]
    cpu = sum(span.cpu_ns for span in known)
    wanted = cpu + sum(span.queued_ns for span in known)
    if len(known) < 5:
        return cores
    step = _mean(steps)
    step_s = step.cpu_s + step.wait_s
    own = step.cpu_s / step_s if step_s else 0.0
    own += num_lanes * min(1.0, wanted / sum(span.took_ns for span in known))
    share = cpu / wanted
    if share >= 0.9 * min(1.0, cores / max(own, 1e-9)):
        return cores
    return max(0.25, min(cores, share * max(own, 1.0)))


def _pause_s(lanes: list[Lane]) -> float:
    """Return the time of a worker between two parts when the next part is already queued."""
    pauses = []
    for lane in lanes:
        pairs = itertools.pairwise(lane.of("fetch", "collate"))
        pauses += [b.start_ns - a.end_ns for a, b in pairs if b.start_ns > a.end_ns]
    return sorted(pauses)[len(pauses) // 10] * 1e-9 if pauses else 5e-5


def _mean_s(spans: Iterable[Span]) -> float:
    taken = [span.took_ns for span in spans]
    return statistics.fmean(taken) * 1e-9 if taken else 0.0


def _step_costs(main: Lane, *, is_inline: bool) -> tuple[Cost, ...]:
    """Return the cost of each step. The CPU share is measured over all steps together."""
    steps = main.of("step")
    total_s = sum(step.took_ns for step in steps) * 1e-9
    busy = 0.0
    if len(main.cpu_s) > 1 and total_s > 0 and not is_inline:
        deliver_s = sum(span.took_ns for span in main.of("deliver")) * 1e-9
        cpu_s = main.cpu_s[-1].value - main.cpu_s[0].value
        busy = min(1.0, max(0.0, cpu_s - deliver_s) / total_s)
    costs = [Cost(busy, 1 - busy).times(step.took_ns * 1e-9) for step in steps]
    return tuple(costs) or (_NO_COST,)


def _start_s(workers: list[Lane], main: Lane) -> float:
    """Return the time from launching the workers until they begin to load."""
    launches = main.of("launch")
    firsts = [min(span.start_ns for span in lane.spans) for lane in workers if lane.spans]
    if not launches or not firsts:
        return 0.0
    return max(0.0, (statistics.median(firsts) - launches[0].end_ns) * 1e-9)
