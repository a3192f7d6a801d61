"""Changes the number of workers of ``num_workers="auto"`` while an epoch runs.

    every WINDOW_S: the totals of the window -> WorkerTuning -> another number
        -> a second pool is started in a thread, so that no batch is late
        -> it loads from the next batch on; the first pool is drained, then stopped

The batches do not change: each pool loads the samples of its positions. Epochs shorter than a
window are added up, and a new number applies from the next one on. The reason is in the plan, and
each pool is in the timeline.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from penstock.engine.parent.context import BatchProducer, EpochPass, LoadContext
from penstock.engine.parent.worker_producer import WorkerProducer
from penstock.engine.parent.worker_tuning import WindowTotals, WorkerTuning
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import PenstockError
from penstock.machine.collect import quick_facts
from penstock.machine.host import busy_s_of
from penstock.planning.worker_count import choose_num_workers, most_workers
from penstock.trace.record import span

WINDOW_S = 1.0
MIN_BATCHES = 8
"""A window has at least this many batches."""
NUM_TIMED = 16
"""Workers whose CPU time is read. That takes 0.1 ms for each."""


def make_worker_producer(
    context: LoadContext, pickled: PickledObjects | None = None
) -> BatchProducer:
    """Return the producer of ``num_workers="auto"``. Its number of workers can change.

    Not if that would change the samples (``randomness="worker"``), if workers take seconds to start
    (spawn), if each has many samples in flight already (async), or if remote workers may join.
    """
    settings = context.settings
    is_async = settings.in_flight is not None
    is_fixed = context.is_iterable or is_async or bool(settings.remote_workers)
    can_change = settings.per_sample and not is_fixed
    if can_change and settings.pool == "process" and settings.start_method == "forkserver":
        return ResizingProducer(context, pickled)
    return WorkerProducer(context, pickled)


class ResizingProducer:
    """Loads with workers, and changes their number when the work changes.

    Args:
        pickled: The user's objects, if they are already pickled. Each pool gets the same.
    """

    def __init__(self, context: LoadContext, pickled: PickledObjects | None = None) -> None:
        self._context = context
        self._kept_alive = None if context.is_persistent else context.loader()
        """The caller may keep only the iterator. A persistent loader holds this producer."""
        self._pickled = pickled or PickledObjects(context.worker_objects())
        self._lock = threading.Lock()
        """Several threads can share one iterator."""
        self._producer = self._make_producer()
        self._next: WorkerProducer | None = None
        """The second pool."""

    def _make_producer(self, *, in_background: bool = False) -> WorkerProducer:
        producer = WorkerProducer(self._context, self._pickled, in_background=in_background)
        producer.stops_at_end = False  # their CPU time is read first
        return producer

    @property
    def workers(self) -> list[Any]:
        return self._producer.workers + (self._next.workers if self._next is not None else [])

    def start_epoch(self, epoch: EpochPass) -> None:
        self._epoch = epoch
        if self._next is not None and self._finish_start(self._next):
            self._switch(self._next)
        elif self._is_outdated():
            self._switch(self._make_producer())
        self._producer.start_epoch(epoch)
        self._num_windows, self._is_over = 0, False
        self._is_fresh = True
        """True in the first window: workers start, or their pipeline fills."""
        self._begin_window()

    def _is_outdated(self) -> bool:
        """Return True if another number of workers was chosen near the end of an epoch."""
        is_closed = self._producer.dispatcher is None or self._producer.dispatcher.is_closed
        return not is_closed and len(self._producer.workers) != self._context.settings.num_workers

    def next_batch(self) -> tuple[Any, bool]:
        with self._lock:
            is_ready, start_s = self._producer.is_ready(), time.perf_counter()
            try:
                batch = self._take()
            except StopIteration:
                self._end_epoch()
                raise
            now_s = time.perf_counter()
            if not is_ready:  # otherwise more workers could not save this time
                self._waited_s += now_s - start_s
            self._num_batches += 1
            if self._has_started():
                self._hand_over()
            if now_s - self._start_s >= WINDOW_S and self._num_batches >= MIN_BATCHES:
                self._end_window()
            return batch

    def _take(self) -> tuple[Any, bool]:
        try:
            return self._producer.next_batch()
        except StopIteration:
            if self._next is None or self._next.dispatcher is None:
                raise
        self._switch(self._next)
        return self._producer.next_batch()

    def _switch(self, to: WorkerProducer) -> None:
        self._producer.stop()
        self._producer, self._next, self._is_fresh = to, None, True
        self._begin_window()

    def is_ready(self) -> bool:
        return self._producer.is_ready()

    def stop(self) -> None:
        self._producer.stop()
        if self._next is not None:
            self._next.stop()

    # -- windows ---------------------------------------------------------------------------------

    def _begin_window(self, busy_s: dict[int, float] | None = None) -> None:
        self._start_s, self._own_s = time.perf_counter(), time.process_time()
        self._waited_s, self._num_batches = 0.0, 0
        dispatcher = self._producer.dispatcher
        assert dispatcher is not None
        busy_s = self._busy_s() if busy_s is None else busy_s
        self._before = dispatcher.busy_ns, dispatcher.num_loaded, busy_s

    def _busy_s(self) -> dict[int, float]:
        """Return how long some workers have computed or waited for a core, by pid."""
        timed = self._producer.workers[:NUM_TIMED]
        found = {worker.pid: busy_s_of(worker.pid or 0) for worker in timed}
        return {pid: busy_s for pid, busy_s in found.items() if busy_s is not None}

    def _read_window(self, busy_s: dict[int, float]) -> WindowTotals:
        dispatcher = self._producer.dispatcher
        assert dispatcher is not None
        busy_ns, num_loaded, before = self._before
        busy = [s - before.get(pid, 0.0) for pid, s in busy_s.items()]  # some are new
        return WindowTotals(
            wall_s=time.perf_counter() - self._start_s,
            waited_s=self._waited_s,
            own_s=time.process_time() - self._own_s,
            leased_s=(dispatcher.busy_ns - busy_ns) * 1e-9,
            busy_s=sum(busy) / len(busy) * len(self._producer.workers) if busy else math.nan,
            num_batches=self._num_batches,
            num_loaded=dispatcher.num_loaded - num_loaded,
        )

    def _end_window(self) -> None:
        was_fresh, self._is_fresh = self._is_fresh, False
        busy_s = self._busy_s()
        if not was_fresh and self._next is None:
            self._num_windows += 1
            self._consider(self._read_window(busy_s))
        self._begin_window(busy_s)

    def _end_epoch(self) -> None:
        """Add an epoch without a complete window to those before it. Stops the workers."""
        loader = self._context.loader()
        if self._is_over:
            return
        self._is_over = True
        if not self._num_windows and loader is not None:
            tuning = _tuning_of(loader)
            tuning.carried = tuning.carried.plus(self._read_window(self._busy_s()))
            if tuning.carried.wall_s >= WINDOW_S and tuning.carried.num_batches >= MIN_BATCHES:
                self._consider(tuning.carried)
                tuning.carried = WindowTotals()
        if not self._context.is_persistent:
            self.stop()

    # -- changing the number ---------------------------------------------------------------------

    def _consider(self, window: WindowTotals) -> None:
        loader, settings = self._context.loader(), self._context.settings
        is_free = loader is not None and loader._chooses_workers() and not self._is_outdated()
        if not is_free or not window.is_known:
            return
        machine, request, method = quick_facts(), loader._request(), settings.start_method or ""
        num_workers = settings.num_workers
        known = {**loader._measured, **window.measured(), "num_running": num_workers, "tuned": None}

        work = loader._workload()._replace(**known)
        most = most_workers(machine, request, work, method).num_workers - num_workers
        decided = _tuning_of(loader).decide(
            window,
            num_workers,
            wanted=choose_num_workers(machine, request, work, method).value,
            most=most,
            now_s=time.perf_counter(),
        )
        if decided is not None:
            self._resize(loader, {**known, "tuned": decided}, decided[0])

    def _resize(self, loader: Any, known: dict[str, Any], num_workers: int) -> None:
        context, dispatcher = self._context, self._producer.dispatcher
        assert dispatcher is not None
        before, measured_before = context.settings, loader._measured
        loader._measured = known
        context.settings = loader._settings(loader.plan)._replace(num_workers=num_workers)
        if not dispatcher.has_more:  # from the next epoch on
            loader._settle(context.settings)
            return
        waits = f"samples wait {1 - known['busy_share']:.0%}"  # of the time; names are short
        self._fallback = before, measured_before
        try:
            with span(f"auto: {before.num_workers} to {num_workers} workers, {waits}"):
                self._next = self._make_producer(in_background=True)
        except (PenstockError, OSError) as error:
            self._give_up(error)
        else:
            loader._settle(context.settings)

    def _has_started(self) -> bool:
        """Return True once, when all workers of the second pool are started."""
        following = self._next
        if following is None or following.dispatcher is not None or following.is_starting:
            return False
        return self._finish_start(following)

    def _finish_start(self, following: WorkerProducer) -> bool:
        try:
            if following.dispatcher is None:
                following.finish_start()
        except (PenstockError, OSError) as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        context, loader = self._context, self._context.loader()
        context.note(f"{context.settings.num_workers} workers could not be started: {error}")
        self._next, (context.settings, measured) = None, self._fallback
        if loader is not None:
            loader._measured = measured
            loader._settle(context.settings)
            _tuning_of(loader).give_up(time.perf_counter())

    def _hand_over(self) -> None:
        """Let the second pool load from the next batch on."""
        dispatcher, following = self._producer.dispatcher, self._next
        assert dispatcher is not None
        assert following is not None
        following.start_epoch(self._epoch._replace(num_taken=dispatcher.end_early()))


def _tuning_of(loader: Any) -> WorkerTuning:
    if loader._tuning is None:
        loader._tuning = WorkerTuning()
    tuning: WorkerTuning = loader._tuning
    return tuning
