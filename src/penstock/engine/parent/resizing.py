"""Changes the number of workers of ``num_workers="auto"`` while an epoch runs.

    every WINDOW_S: the time of a sample in the workers, the part of it spent computing, the step
        -> the same model as for the first choice -> another number, twice in a row
        -> a second pool loads from the next batch on; the first one is drained, then stopped

The batches do not change: each pool loads the samples of its positions. A larger number that does
not make samples arrive faster is taken back, because the server or the disk is the limit. It is
tried again later. The reason is in the plan, and each pool is in the timeline.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from penstock.engine.parent.context import BatchProducer, EpochPass, LoadContext
from penstock.engine.parent.worker_producer import WorkerProducer
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import PenstockError
from penstock.machine.collect import quick_facts
from penstock.machine.host import busy_s_of
from penstock.planning.worker_count import choose_num_workers
from penstock.trace.record import span

WINDOW_S = 1.0
MIN_BATCHES = 8
"""A window has at least this many batches."""
RAISE, LOWER = 1.25, 0.5
"""The number changes if the model's is at least RAISE times as large, or LOWER times."""
NUM_AGREEING = 2
"""Windows in a row that must ask for it."""
FASTER = 1.1
"""A larger number must raise the rate by this factor."""
WAITED_SHARE = 0.05
"""If the training loop waits for less than this fraction of the time, no worker is added."""
RETRY_S = 60.0


def make_worker_producer(
    context: LoadContext, pickled: PickledObjects | None = None
) -> BatchProducer:
    """Return the producer of ``num_workers="auto"``. Its number of workers can change.

    Not if that would change the samples (``randomness="worker"``), if workers take seconds to start
    (spawn), or if each has many samples in flight already (async).
    """
    settings = context.settings
    is_async = settings.in_flight is not None
    can_change = settings.per_sample and not (context.is_iterable or is_async)
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
        self._pickled = pickled or PickledObjects(context.worker_objects())
        self._lock = threading.Lock()
        """Several threads can share one iterator."""
        self._producer = WorkerProducer(context, self._pickled)
        self._next: WorkerProducer | None = None
        self._num_asked = 0
        self._trial: tuple[int, float] | None = None
        """The number of workers before the last raise, and the rate."""
        self._tried_s = 0.0
        self._is_fresh = True
        self._begin_window()

    @property
    def workers(self) -> list[Any]:
        return self._producer.workers + (self._next.workers if self._next is not None else [])

    def start_epoch(self, epoch: EpochPass) -> None:
        self._epoch = epoch
        if self._next is not None:
            self._switch(self._next)
        self._producer.start_epoch(epoch)
        self._is_fresh = True
        self._begin_window()

    def next_batch(self) -> tuple[Any, bool]:
        with self._lock:
            start_s = time.perf_counter()
            batch = self._take()
            now_s = time.perf_counter()
            self._waited_s += now_s - start_s
            self._num_batches += 1
            if now_s - self._start_s >= WINDOW_S and self._num_batches >= MIN_BATCHES:
                self._end_window(now_s)
            return batch

    def _take(self) -> tuple[Any, bool]:
        try:
            return self._producer.next_batch()
        except StopIteration:
            if self._next is None:
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

    def _begin_window(self) -> None:
        self._start_s, self._own_s = time.perf_counter(), time.process_time()
        self._waited_s, self._num_batches = 0.0, 0
        dispatcher = self._producer.dispatcher
        assert dispatcher is not None
        self._before = dispatcher.busy_ns, dispatcher.num_loaded, self._busy_s()

    def _busy_s(self) -> dict[int, float]:
        """Return how long each worker has computed or waited for a core, by pid."""
        found = {worker.pid: busy_s_of(worker.pid or 0) for worker in self._producer.workers}
        return {pid: busy_s for pid, busy_s in found.items() if busy_s}

    def _end_window(self, now_s: float) -> None:
        """Ask the model for the number of workers that the last window calls for."""
        loader, dispatcher = self._context.loader(), self._producer.dispatcher
        assert dispatcher is not None
        wall_s = now_s - self._start_s
        busy_ns, num_loaded, before = self._before
        leased_s = (dispatcher.busy_ns - busy_ns) * 1e-9
        num_loaded = dispatcher.num_loaded - num_loaded
        busy = [s - before[pid] for pid, s in self._busy_s().items() if pid in before]
        is_known = num_loaded > 0 and leased_s > 0 and len(busy) == len(self._producer.workers)
        was_fresh, self._is_fresh = self._is_fresh, False  # workers were starting
        if is_known and not was_fresh and self._next is None and loader is not None:
            measured = {
                "sample_s": leased_s / num_loaded,
                "busy_share": min(1.0, sum(busy) / leased_s),
                "step_s": (wall_s - self._waited_s) / self._num_batches,
                "step_busy_s": (time.process_time() - self._own_s) / self._num_batches,
            }
            is_waiting = self._waited_s > WAITED_SHARE * wall_s
            if loader._chooses_workers():
                self._consider(loader, measured, num_loaded / wall_s, is_waiting, now_s)
        self._begin_window()

    def _consider(
        self, loader: Any, measured: dict[str, Any], rate: float, is_waiting: bool, now_s: float
    ) -> None:
        settings = self._context.settings
        known = {**loader._measured, **measured}
        if self._trial is not None:
            (num_before, rate_before), self._trial = self._trial, None
            if is_waiting and rate < FASTER * rate_before:
                known["most_useful"], self._tried_s = num_before, now_s
                self._resize(loader, known, num_before)
                return
        if "most_useful" in known and now_s - self._tried_s > RETRY_S:
            known["most_useful"] = None
        work = loader._workload()._replace(**known)
        method = settings.start_method or ""
        wanted = choose_num_workers(quick_facts(), loader._request(), work, method).value
        num_workers = settings.num_workers
        is_more = wanted >= RAISE * num_workers and is_waiting
        if not is_more and wanted > LOWER * num_workers:
            self._num_asked = 0
            return
        direction = 1 if is_more else -1
        same = self._num_asked * direction > 0
        self._num_asked = self._num_asked + direction if same else direction
        if abs(self._num_asked) >= NUM_AGREEING and max(1, wanted) != num_workers:
            self._trial = (num_workers, rate) if is_more else None
            self._resize(loader, known, max(1, wanted))

    def _resize(self, loader: Any, known: dict[str, Any], num_workers: int) -> None:
        context, dispatcher = self._context, self._producer.dispatcher
        assert dispatcher is not None
        self._num_asked = 0
        if not dispatcher.has_more:
            return  # the epoch is nearly over
        before, measured_before = context.settings, loader._measured
        loader._measured = known
        context.settings = loader._settings(loader.plan)._replace(num_workers=num_workers)
        waits = f"samples wait {1 - known['busy_share']:.0%}"  # of the time; names are short
        try:
            with span(f"auto: {before.num_workers} to {num_workers} workers, {waits}"):
                following = WorkerProducer(context, self._pickled)
        except (PenstockError, OSError) as error:
            context.settings, loader._measured, self._trial = before, measured_before, None
            context.note(f"{num_workers} workers could not be started: {error}")
            return
        loader._settle(context.settings)
        self._next = following
        following.start_epoch(self._epoch._replace(num_taken=dispatcher.end_early()))
