"""Decides whether workers pay: loads the first batches inline, timed, and delivers them.

    batch 0, 1, ... inline (timed) -- loader._decide(measured) --> rest of the epoch: workers, or
                                                                   inline

Nothing is loaded twice and nothing changes in the batches: positions and seeds go on where the
inline part stopped. The dataset is pickled before the first sample, so that handles which it
opens on first use are never sent; nor are they in later epochs, see
:mod:`penstock.engine.parent.dataset_changes`. While a cold fork server warms up, inline loading
goes on.
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
from penstock.engine.parent.inline_producer import InlineProducer
from penstock.engine.parent.worker_producer import WorkerProducer
from penstock.engine.pickling.environment import import_path
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import CannotTravel
from penstock.machine.host import queued_s
from penstock.user_objects import probe

GLANCE_FROM, GLANCE_AT, CLEARLY_SLOW_S = 1, 3, 1e-3
"""If the second and third sample are clearly slow, a fork server may be started already, while the
first batch goes on. The very first call of anything is slower than the rest, and tells nothing."""
SURE_FROM_S = 0.02
"""The question is first asked when inline loading has taken this long: shorter may be a first
call's. Then after twice as many batches, and twice as many again."""
CLOSE_LOOKS = 32
"""Batches that are looked at closely; that costs 20 microseconds each, too much for tiny ones."""
MAX_QUESTIONS = 4
"""The last answer stands."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the inline batches showed, as plain values.

    Args:
        busy_share: Part of the time that was computing; the rest was waiting.
        step_s: The quickest time between two batches; None before two steps were seen.
        step_busy_s: What was computed here during that step, on all cores together.
        stays_because: Why the dataset cannot be sent to a process.
    """

    sample_s: float = 0.0
    busy_share: float = 1.0
    sample_bytes: int = 0
    step_s: float | None = None
    step_busy_s: float = 0.0
    stays_because: CannotTravel | None = None


class AutoProducer:
    """Loads inline until it is known whether workers pay, then hands the epoch over.

    Args:
        loader: Asked what to do (``_decide``) and told the last answer (``_settle``). Held only
            until then: a persistent loader holds us.
    """

    def __init__(self, context: LoadContext, loader: Any) -> None:
        self._context = context
        self._loader: Any = loader
        self._changes = loader._changes
        self._inline = _TimedInlineProducer(context, self._see_first_samples)
        self._worker_producer: WorkerProducer | None = None
        self._is_settled = False
        self._fork_server: fork_server.ForkServer | None = None
        self._returned: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []
        self._quickest = Measured(sample_s=float("inf"))
        self._num_batches = self._num_questions = 0
        self._next_question = 1
        self._spent_s = 0.0
        self._answer: EngineSettings = context.settings
        self._pickled = self._pickle()

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
            return None

    def start_epoch(self, epoch: EpochPass) -> None:
        self._returned = None
        self._epoch = epoch
        self._producer.start_epoch(epoch)

    def next_batch(self) -> tuple[Any, bool]:
        if self._worker_producer is None and not self._is_settled:
            self._consider()
        if self._worker_producer is not None or self._is_settled:
            return self._producer.next_batch()
        is_close = self._num_batches < CLOSE_LOOKS
        with self._changes.watching() if is_close else nullcontext():
            return self._next_timed(is_close)

    def is_ready(self) -> bool:
        # Until it is settled, steps are timed.
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
        """The quickest batch, and the quickest step after the first: first ones set things up."""
        step_s, step_busy_s = min(self._steps[1:], default=(None, 0.0))
        return replace(self._quickest, step_s=step_s, step_busy_s=step_busy_s)

    def _see_first_samples(self, sample_s: float) -> None:
        """Called from: the middle of the first batch, with the time for one sample so far."""
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
            self._warm_up(self._answer)
        if not self._answer.num_workers:
            if self._num_questions == MAX_QUESTIONS:
                self._settle(self._answer)
        elif self._fork_server is None or self._fork_server.is_warm():
            self._settle(self._answer)
            self._changes.undo()
            self._context.settings = self._answer
            self._worker_producer = WorkerProducer(self._context, self._pickled)
            self._worker_producer.start_epoch(
                self._epoch._replace(num_taken=self._inline.num_taken)
            )

    def _conclude(self) -> None:
        """The epoch ended before the question was settled: if the answer is no, it is final."""
        if self._num_batches:
            answer = self._ask(self._measured())
            if not answer.num_workers:
                self._settle(answer)

    def _ask(self, measured: Measured) -> EngineSettings:
        settings: EngineSettings = self._loader._decide(measured)
        return settings

    def _settle(self, settings: EngineSettings) -> None:
        self._is_settled = True
        self._loader._settle(settings)
        self._loader = None

    def stop(self) -> None:
        self._producer.stop()


class _TimedInlineProducer(InlineProducer):
    """Inline, with a word after the first samples of the first batch."""

    def __init__(self, context: LoadContext, see_first_samples: Callable[[float], None]) -> None:
        super().__init__(context)
        self._see_once: Callable[[float], None] | None = see_first_samples

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
    """Time spent computing, or ready to while others held the cores: not waiting for data."""
    return time.process_time() + queued_s()


def _num_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch."""
    nbytes = probe(batch, "nbytes")
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(_num_bytes(item) for item in batch)
    return 0
