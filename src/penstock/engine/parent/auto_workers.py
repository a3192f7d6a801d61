"""Decides for ``num_workers="auto"`` whether workers pay off, by timing the first batches inline.

    batch 0, 1, ... inline (timed) -- loader._decide(measured) --> rest of the epoch: workers, or
                                                                   inline

The timed batches are delivered as usual. Nothing is loaded twice and the batches do not change:
positions and seeds continue where the inline part stopped. The dataset is pickled before the first
sample, so handles that it opens on first use are never sent. Later epochs do not send them either,
see :mod:`penstock.engine.parent.dataset_changes`. Inline loading continues while a cold fork server
warms up. If no workers pay off, a few batches are timed again later and in each epoch, because
samples that were in a cache at first may wait for a server now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.loading.fetch import call_user, getter, takes_batches
from penstock.engine.parent import fork_server
from penstock.engine.parent.context import BatchProducer, EngineSettings, EpochPass, LoadContext
from penstock.engine.parent.dataset_changes import DatasetChanges
from penstock.engine.parent.inline_producer import InlineProducer
from penstock.engine.parent.resizing import make_worker_producer
from penstock.engine.pickling.environment import import_path
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import CannotTravel
from penstock.machine.host import queued_s
from penstock.user_objects import probe

GLANCE_FROM, GLANCE_AT, CLEARLY_SLOW_S = 1, 3, 1e-3
"""If the second and third samples are clearly slow, the fork server is started before the first
batch is complete. The first call is slower than the rest, so it is not counted."""
SURE_FROM_S = 0.02
"""The first decision comes after this much inline loading. A shorter time may only reflect
the cost of first calls. Each further decision comes after twice as many batches."""
CLOSE_LOOKS = 32
"""Batches measured in detail. This costs 20 microseconds each, too much for tiny batches."""
MAX_QUESTIONS = 4
"""Number of decisions after which inline loading stays, until it is measured again."""
AGAIN_FROM, AGAIN_S, MAX_AGAIN_S = 4, 2.0, 16.0
"""Batches that are timed again at least, and when: after 2 s, 4 s and so on."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of the inline batches, as plain values.

    Args:
        busy_share: Fraction of the time spent computing. The rest was spent waiting.
        step_s: The shortest time between two batches. None before two steps were measured.
        step_busy_s: CPU time of this process during that step, summed over all cores.
        stays_because: The reason the dataset cannot be sent to a process.
    """

    sample_s: float = 0.0
    busy_share: float = 1.0
    sample_bytes: int = 0
    step_s: float | None = None
    step_busy_s: float = 0.0
    stays_because: CannotTravel | None = None


class AutoProducer:
    """Loads inline until it is clear whether workers pay off, then may switch to workers.

    Args:
        loader: Makes the decisions (``_decide``, ``_settle``). A persistent loader holds this
            producer, so only a weak reference to it is kept.
    """

    def __init__(self, context: LoadContext, loader: Any) -> None:
        self._context = context
        self._kept_alive = None if context.is_persistent else loader  # only its iterator may be
        if loader._changes is None:
            loader._changes = DatasetChanges(loader.dataset)
        self._changes = loader._changes
        is_first = "sample_s" not in loader._measured
        see = self._see_first_samples if is_first else None
        self._inline = _TimedInlineProducer(context, see)
        self._worker_producer: BatchProducer | None = None
        self._is_settled = False
        self._again_s = AGAIN_S
        self._fork_server: fork_server.ForkServer | None = None
        self._returned: tuple[float, float] | None = None
        self._answer: EngineSettings = context.settings
        self._begin_measuring(is_first=is_first)
        self._pickled = self._pickle() if is_first else None

    def _begin_measuring(self, *, is_first: bool) -> None:
        self._is_settled = False
        self._steps: list[tuple[float, float]] = []
        self._quickest = Measured(sample_s=float("inf"))
        self._num_batches, self._spent_s = 0, 0.0
        self._num_questions = 0 if is_first else MAX_QUESTIONS - 1
        self._next_question = 1 if is_first else AGAIN_FROM

    @property
    def _producer(self) -> BatchProducer:
        return self._worker_producer or self._inline

    @property
    def workers(self) -> list[Any]:
        return self._producer.workers

    def _pickle(self) -> PickledObjects | None:
        try:
            return PickledObjects(self._context.worker_objects())
        except CannotTravel as error:
            self._settle(self._ask(Measured(stays_because=error)))
            self._again_at_s = float("inf")
            return None

    def start_epoch(self, epoch: EpochPass) -> None:
        self._returned = None
        self._epoch = epoch
        self._producer.start_epoch(epoch)

    def next_batch(self) -> tuple[Any, bool]:
        if self._worker_producer is None:
            if self._is_settled and time.perf_counter() >= self._again_at_s:
                self._begin_measuring(is_first=False)
            if not self._is_settled:
                self._consider()
        if self._worker_producer is not None or self._is_settled:
            return self._producer.next_batch()
        is_close = self._num_batches < CLOSE_LOOKS
        with self._changes.watching() if is_close else nullcontext():
            return self._next_timed(is_close)

    def is_ready(self) -> bool:
        # Steps are timed until the decision is final.
        is_known = self._worker_producer is not None or self._is_settled
        return is_known and self._producer.is_ready()

    def _next_timed(self, is_close: bool) -> tuple[Any, bool]:
        busy_s = _busy_s() if is_close else 0.0
        start_s, num_before = time.perf_counter(), self._inline.num_taken
        try:
            batch, is_pinned = self._inline.next_batch()
        except StopIteration:
            self._conclude()
            raise
        end_s = time.perf_counter()
        num_samples = max(1, self._inline.num_taken - num_before)
        wall_s = max(end_s - start_s, 1e-9)
        self._num_batches += 1
        self._spent_s += wall_s
        if is_close and wall_s / num_samples < self._quickest.sample_s:
            self._quickest = Measured(
                sample_s=wall_s / num_samples,
                busy_share=min(1.0, (_busy_s() - busy_s) / wall_s),
                sample_bytes=_num_bytes(batch) // num_samples,
            )
        self._returned = time.perf_counter(), time.process_time()
        return batch, is_pinned

    def _measured(self) -> Measured:
        """Return the fastest batch, and the fastest step except the first, which does setup."""
        step_s, step_busy_s = min(self._steps[1:], default=(None, 0.0))
        return replace(self._quickest, step_s=step_s, step_busy_s=step_busy_s)

    def _see_first_samples(self, sample_s: float) -> None:
        """Receive the time per sample so far. Called in the middle of the first batch."""
        if sample_s >= CLEARLY_SLOW_S and not self._is_settled:
            self._warm_up(self._ask(Measured(sample_s=sample_s)))

    def _warm_up(self, settings: EngineSettings) -> None:
        if self._fork_server is None and settings.start_method == "forkserver":
            assert self._pickled is not None
            self._fork_server = fork_server.current_fork_server()
            self._fork_server.prepare(self._pickled.modules, import_path())

    def _consider(self) -> None:
        if self._returned is not None:
            step_s = time.perf_counter() - self._returned[0]
            self._steps.append((step_s, time.process_time() - self._returned[1]))
        if self._spent_s >= SURE_FROM_S and self._num_batches >= self._next_question:
            self._num_questions += 1
            self._next_question = 2 * self._num_batches
            self._answer = self._ask(self._measured())
            if self._answer.num_workers and self._pickled is None:  # not the first epoch
                self._changes.undo()
                self._pickled = self._pickle()
                if self._pickled is None:
                    return
            self._warm_up(self._answer)
        if not self._answer.num_workers:
            if self._num_questions == MAX_QUESTIONS:
                self._settle(self._answer)
        elif self._fork_server is None or self._fork_server.is_warm():
            self._settle(self._answer)
            self._changes.undo()
            self._context.settings = self._answer
            self._worker_producer = make_worker_producer(self._context, self._pickled)
            self._worker_producer.start_epoch(
                self._epoch._replace(num_taken=self._inline.num_taken)
            )

    def _conclude(self) -> None:
        """Decide at the end of an epoch. An answer of no workers stays until the next one."""
        if self._num_batches:
            answer = self._ask(self._measured())
            if not answer.num_workers:
                self._settle(answer)

    def _ask(self, measured: Measured) -> EngineSettings:
        loader = self._context.loader()
        if loader is None:
            return self._answer
        settings: EngineSettings = loader._decide(measured)
        return settings

    def _settle(self, settings: EngineSettings) -> None:
        self._is_settled = True
        self._again_at_s = time.perf_counter() + self._again_s
        self._again_s = min(MAX_AGAIN_S, 2 * self._again_s)
        loader = self._context.loader()
        if loader is not None:
            loader._settle(settings)

    def stop(self) -> None:
        self._producer.stop()


class _TimedInlineProducer(InlineProducer):
    """An inline producer that reports the time of the first samples of the first batch."""

    def __init__(
        self, context: LoadContext, see_first_samples: Callable[[float], None] | None
    ) -> None:
        super().__init__(context)
        self._see_once = see_first_samples

    def _fetch(self, index: Any) -> Any:
        see, self._see_once = self._see_once, None
        if see is None or not self._auto_collation or takes_batches(self._dataset):
            return super()._fetch(index)
        position, start_s, samples = self._advance(len(index)), 0.0, []
        get = getter(self._dataset)
        for at, one in enumerate(index, position):
            samples.append(call_user(get, one, at, self._randomness))
            if len(samples) == GLANCE_FROM:
                start_s = time.perf_counter()
            elif len(samples) == GLANCE_AT:
                see((time.perf_counter() - start_s) / (GLANCE_AT - GLANCE_FROM))
        return samples


def _busy_s() -> float:
    """Return the time spent computing or waiting for a core, but not waiting for data."""
    return time.process_time() + queued_s()


def _num_bytes(batch: Any) -> int:
    """Return the number of bytes of the tensors and arrays in a batch."""
    nbytes = probe(batch, "nbytes")
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(_num_bytes(item) for item in batch)
    return 0
