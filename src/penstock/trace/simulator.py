"""What would another setting bring? A discrete-event model of the engine, fed with measured times.

    Workload: what parts of batches, putting together, copies and steps took, as measured
    Settings: workers, batches under way, samples in a batch, ...
    simulate(workload, settings) -> Run: when everything would have happened

What is modelled: batches are leased ahead up to a depth, cut into parts, and given to the worker
with the fewest samples to do; workers load their parts one after the other; delivery is in order;
the training process puts a batch together, brings it to the device, and takes its step. Workers and
the training process share the cores evenly: what computes is slowed down when there are too few,
what waits is not. Times are drawn from those measured, so rare slow ones stay rare and slow.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Cost(NamedTuple):
    """What something takes: computing, and waiting for something else than a core."""

    cpu_s: float
    wait_s: float

    def times(self, factor: float) -> Cost:
        return Cost(self.cpu_s * factor, self.wait_s * factor)


_NONE, _SHORT = Cost(0.0, 0.0), Cost(5e-5, 0.0)


MAX_DRAWS = 1000
"""The mean of so many is as good as that of more."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Measured times, as plain values.

    Args:
        rows: For each part that was measured, what one of its samples took.
        part_s: What a worker needs between two parts.
        collate: What collating takes, for each sample; empty: samples are written straight.
        deliver: What the training process needs for each batch.
        transfer_s: What bringing a batch to the device takes the training process.
        steps: What each step took.
        start_s: Until each worker had started.
        batch_rows: Samples in a batch, when these were measured.
    """

    rows: tuple[Cost, ...]
    part_s: float = 5e-5
    collate: tuple[Cost, ...] = ()
    deliver: Cost = _SHORT
    transfer_s: float = 0.0
    steps: tuple[Cost, ...] = (_NONE,)
    start_s: float = 0.0
    batch_rows: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is to be imagined.

    Args:
        depth: Batches under way for each worker; None: as the engine chooses.
        num_parts: Parts that a batch is cut into; None: as the engine chooses.
        split_from_s, depth_target_s, min_depth, max_depth: The engine's rules for the two.
    """

    num_workers: int
    batch_rows: int
    num_batches: int
    cores: float
    depth: int | None = None
    num_parts: int | None = None
    can_split: bool = True
    split_from_s: float = 0.05
    depth_target_s: float = 0.02
    min_depth: int = 2
    max_depth: int = 16
    seed: int = 0


class Event(NamedTuple):
    """Something that would have happened. ``worker`` -1: the training process."""

    kind: str
    worker: int
    batch: int
    part: int
    rows: int
    start_s: float
    end_s: float
    cost: Cost = _NONE


@dataclass
class Run:
    """An imagined run."""

    events: list[Event] = field(default_factory=list)
    total_s: float = 0.0
    first_batch_s: float = 0.0
    last_batch_s: float = 0.0
    num_rows: int = 0
    ready: list[tuple[float, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Samples a second, from the first batch to the last."""
        return self.num_rows / (self.last_batch_s - self.first_batch_s) if self.num_rows else 0.0


def simulate(workload: Workload, settings: Settings) -> Run:
    """Run the model.

    Example:
        >>> slow = Workload(rows=(Cost(0.0, 0.01),), batch_rows=4)
        >>> def rate(num_workers):
        ...     settings = Settings(num_workers=num_workers, batch_rows=4, num_batches=100, cores=1)
        ...     return round(simulate(slow, settings).rate, -1)
        >>> rate(1), rate(2)  # samples that wait need no core
        (100.0, 200.0)
    """
    return _Simulation(workload, settings).run()


class _Task:
    """Something under way, at the pace that the cores allow."""

    __slots__ = ("cost", "left", "number", "then")

    def __init__(self, cost: Cost, number: int, then: object) -> None:
        self.cost = cost
        self.left = 1.0
        self.number = number
        self.then = then


class _Simulation:
    """One run: tasks under way, what each worker has to do, and the training process."""

    def __init__(self, workload: Workload, settings: Settings) -> None:
        self._work = workload
        self._request = settings
        self._random = random.Random(settings.seed)
        self._now = 0.0
        self._tasks: list[_Task] = []
        self._run = Run()
        workers = settings.num_workers
        self._queues: list[deque[tuple[int, int, int]]] = [deque() for _ in range(workers)]
        self._loads = [0] * workers
        self._is_busy = [False] * workers
        self._missing: dict[int, int] = {}
        self._sent = self._next = 0
        self._timers: list[tuple[float, int, int]] = []
        self._ticket = itertools.count()
        mean = _mean(workload.rows)
        self._batch_s = (mean.cpu_s + mean.wait_s) * settings.batch_rows
        self._depth = self._choose_depth()

    def _choose_depth(self) -> int:
        request = self._request
        if request.depth is not None:
            return request.depth
        depth = int(request.depth_target_s / max(self._batch_s, 1e-6))
        return min(request.max_depth, max(request.min_depth, depth))

    def _num_parts(self, batch: int) -> int:
        request = self._request
        if request.num_parts is not None:
            return max(1, min(request.num_parts, request.batch_rows))
        is_slow = self._batch_s >= request.split_from_s or batch == 0
        return (
            max(1, min(request.num_workers, request.batch_rows))
            if is_slow and request.can_split
            else 1
        )

    # -- time ------------------------------------------------------------------------------------

    def _slowdown(self) -> float:
        """By how much computing is slowed down: all that want a core get an equal share."""
        cores = self._request.cores
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
        """To the next thing that ends."""
        factor = self._slowdown()
        spans = [task.cost.wait_s + task.cost.cpu_s * factor for task in self._tasks]
        wait = min((t.left * s for t, s in zip(self._tasks, spans, strict=True)), default=math.inf)
        if self._timers:
            wait = min(wait, max(0.0, self._timers[0][0] - self._now))
        if math.isinf(wait):
            raise AssertionError("the imagined run stands still")
        self._now += wait
        ended = []
        for task, span in zip(self._tasks, spans, strict=True):
            task.left -= wait / span if span > 0 else 1.0
            if task.left <= 1e-9:
                ended.append(task)
        if ended:
            self._tasks = [task for task in self._tasks if task.left > 1e-9]
        for task in ended:
            task.then()  # type: ignore[operator]
        while self._timers and self._timers[0][0] <= self._now + 1e-12:
            _, _, worker = heapq.heappop(self._timers)
            self._is_busy[worker] = False
            self._work_on(worker)

    def _begin(self, cost: Cost, then: object) -> None:
        self._tasks.append(_Task(cost, next(self._ticket), then))

    # -- workers ---------------------------------------------------------------------------------

    def _lease(self) -> None:
        request = self._request
        limit = self._depth * request.num_workers
        num_open = self._sent - self._next
        if limit - num_open < max(1, limit // 4) and num_open:
            return
        while self._sent < min(request.num_batches, self._next + limit):
            batch, parts = self._sent, self._num_parts(self._sent)
            self._missing[batch] = parts
            bounds = [request.batch_rows * part // parts for part in range(parts + 1)]
            for part, (first, last) in enumerate(itertools.pairwise(bounds)):
                worker = min(range(request.num_workers), key=self._loads.__getitem__)
                self._loads[worker] += last - first
                self._queues[worker].append((batch, part, last - first))
            self._sent += 1
        for worker in range(request.num_workers):
            self._work_on(worker)

    def _work_on(self, worker: int) -> None:
        if self._is_busy[worker] or not self._queues[worker]:
            return
        batch, part, rows = self._queues[worker].popleft()
        self._is_busy[worker] = True
        start, cost = self._now, self._part_cost(rows)

        def end() -> None:
            place = (worker, batch, part, rows)
            self._run.events.append(Event("fetch", *place, start, self._now, cost))
            self._missing[batch] -= 1
            self._loads[worker] -= rows
            pause = self._now + self._work.part_s
            heapq.heappush(self._timers, (pause, next(self._ticket), worker))

        self._begin(cost, end)

    def _part_cost(self, rows: int) -> Cost:
        """Drawn from what was measured; large parts are sums of several draws."""
        measured = self._work.rows
        draws = max(1, min(MAX_DRAWS, round(rows / max(1, self._work.batch_rows))))
        found = [measured[self._random.randrange(len(measured))] for _ in range(draws)]
        cost = _mean(tuple(found)).times(rows)
        if self._work.collate:
            extra = self._work.collate[self._random.randrange(len(self._work.collate))]
            cost = Cost(cost.cpu_s + extra.cpu_s * rows, cost.wait_s + extra.wait_s * rows)
        return cost

    # -- the training process --------------------------------------------------------------------

    def run(self) -> Run:
        request, work, run = self._request, self._work, self._run
        for worker in range(request.num_workers):
            self._is_busy[worker] = True
            heapq.heappush(self._timers, (work.start_s, next(self._ticket), worker))
        self._lease()
        for batch in range(request.num_batches):
            start = self._now
            while self._missing[batch]:
                self._advance()
            del self._missing[batch]
            run.ready.append((self._now, sum(not left for left in self._missing.values())))
            if self._now > start:
                run.events.append(Event("stall", -1, batch, 0, 0, start, self._now))
            self._next = batch + 1
            self._lease()
            self._main("transfer", batch, Cost(0.0, work.transfer_s))
            self._main("deliver", batch, work.deliver)
            if not batch:
                run.first_batch_s = self._now
            else:
                run.num_rows += request.batch_rows
            run.last_batch_s = self._now
            step = work.steps[self._random.randrange(len(work.steps))]
            self._main("step", batch, step)
        run.total_s = self._now
        return run

    def _main(self, kind: str, batch: int, cost: Cost) -> None:
        """The training process does something; the workers go on meanwhile."""
        if cost.cpu_s + cost.wait_s <= 0 and kind != "deliver":
            return
        start, is_over = self._now, [False]
        self._begin(Cost(cost.cpu_s, max(cost.wait_s, 1e-9)), lambda: is_over.__setitem__(0, True))
        while not is_over[0]:
            self._advance()
        rows = self._request.batch_rows
        self._run.events.append(Event(kind, -1, batch, 0, rows, start, self._now))


def _mean(costs: tuple[Cost, ...]) -> Cost:
    count = len(costs)
    return Cost(sum(c.cpu_s for c in costs) / count, sum(c.wait_s for c in costs) / count)


def simulate_inline(workload: Workload, settings: Settings) -> Run:
    """Without workers: the training process loads each batch when it is asked for.

    Example:
        >>> slow = Workload(rows=(Cost(0.01, 0.0),), batch_rows=4)
        >>> settings = Settings(num_workers=0, batch_rows=4, num_batches=10, cores=4)
        >>> round(simulate_inline(slow, settings).rate)
        100
    """
    run, now, generator = Run(), 0.0, random.Random(settings.seed)
    for batch in range(settings.num_batches):
        cost = workload.rows[generator.randrange(len(workload.rows))].times(settings.batch_rows)
        slowdown = max(1.0, 1.0 / settings.cores)
        load_s = cost.cpu_s * slowdown + cost.wait_s
        place = (-1, batch, 0, settings.batch_rows)
        run.events.append(Event("fetch", *place, now, now + load_s, cost))
        now += load_s
        if not batch:
            run.first_batch_s = now
        else:
            run.num_rows += settings.batch_rows
        run.last_batch_s = now
        step = workload.steps[generator.randrange(len(workload.steps))]
        step_s = step.cpu_s + step.wait_s
        run.events.append(Event("step", -1, batch, 0, settings.batch_rows, now, now + step_s))
        now += step_s
        run.ready.append((now, 0))
    run.total_s = now
    return run
