"""Are workers worth it? The first batches are loaded here, timed, and delivered like any other.

    batch 0, 1, ... inline (timed) -- decide(measured) --> rest of the epoch: workers, or inline

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
from types import SimpleNamespace
from typing import Any

from penstock.engine.loading.fetch import call_user, getter, takes_batches
from penstock.engine.parent import fork_server as fork_servers
from penstock.engine.parent.dataset_changes import DatasetChanges
from penstock.engine.parent.inline_iterator import InlineIterator
from penstock.engine.parent.iterator import LoaderIterator, Setup
from penstock.engine.parent.worker_iterator import PooledIterator, travellers
from penstock.engine.pickling.environment import import_path
from penstock.engine.pickling.pickler import PickledObjects, pickle_objects
from penstock.errors import CannotTravel
from penstock.machine.host import queued_s

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


Decide = Callable[[Measured], Setup]
"""What to do from here on, given what was measured."""


class AuditionIterator(LoaderIterator):
    """Loads inline until it is known whether workers pay, then hands the epoch over.

    Args:
        setup: How to load inline.
        traces: Notes what loading here leaves in the dataset.
        decide: Called with what was measured so far; the engine does what it answers.
        settle: Called once with the last answer, when the question is closed.
    """

    def __init__(
        self,
        loader: Any,
        setup: Setup,
        traces: DatasetChanges,
        decide: Decide,
        settle: Callable[[Setup], None],
    ) -> None:
        # Not the loader itself: a persistent one holds us, and both would wait for the collector.
        self._like_loader = SimpleNamespace(worker_init_fn=loader.worker_init_fn)
        self._traces = traces
        self._decide: Decide | None = decide
        self._settle: Callable[[Setup], None] | None = settle
        self._pooled: PooledIterator | None = None
        self._is_settled = False
        self._fork_server: fork_servers.ForkServer | None = None
        self._inline = _TimedInline(loader, setup, self._glance)
        vars(self).update({**vars(self._inline), **vars(self)})
        vars(self).pop("_glance_once")  # it is the inline part's, and would hold us
        self._serialised = self._pickle()
        self._returned: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []
        self._quickest = Measured(sample_s=float("inf"))
        self._num_batches = self._num_questions = 0
        self._next_question = 1
        self._spent_s = 0.0
        self._answer: Setup = setup

    @property
    def _workers(self) -> list[Any]:
        return self._pooled._workers if self._pooled is not None else []

    def _pickle(self) -> PickledObjects | None:
        try:
            return pickle_objects(travellers(self._inline, self._like_loader))
        except CannotTravel as error:
            self._close(self._ask(Measured(stays_because=error)))
            return None

    def _next_batch(self) -> Any:
        if self._pooled is None and not self._is_settled:
            self._consider()
        if self._pooled is not None:
            return self._pooled._next_batch()
        self._inline._num_yielded = self._num_yielded  # the batch's number in the timeline
        if self._is_settled:
            return self._inline._next_batch()
        is_close = self._num_batches < CLOSE_LOOKS
        with self._traces.watching() if is_close else nullcontext():
            return self._next_timed(is_close)

    def _is_ready(self) -> bool:
        if self._pooled is not None:
            return self._pooled._is_ready()
        return self._is_settled and self._inline._is_ready()  # till then steps are timed

    def _next_timed(self, is_close: bool) -> Any:
        busy_s = _busy_s() if is_close else 0.0
        start_s, place = time.perf_counter(), self._inline._place
        try:
            batch = self._inline._next_batch()
        except StopIteration:
            self._conclude()
            raise
        end_s = time.perf_counter()
        num_samples = max(1, self._inline._place - place)
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
        return batch

    def _measured(self) -> Measured:
        """The quickest batch, and the quickest step after the first: first ones set things up."""
        step_s, step_busy_s = min(self._steps[1:], default=(None, 0.0))
        return replace(self._quickest, step_s=step_s, step_busy_s=step_busy_s)

    def _glance(self, sample_s: float) -> None:
        """Called from: the middle of the first batch, with the pace so far."""
        if sample_s >= CLEARLY_SLOW_S and not self._is_settled:
            self._warm_up(self._ask(Measured(sample_s=sample_s)))

    def _warm_up(self, setup: Setup) -> None:
        if self._fork_server is None and setup.start_method == "forkserver":
            assert self._serialised is not None
            self._fork_server = fork_servers.current_fork_server()
            self._fork_server.prepare(self._serialised.modules, import_path())

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
                self._close(self._answer)
        elif self._fork_server is None or self._fork_server.is_warm():
            self._close(self._answer)
            self._traces.undo()
            self._pooled = PooledIterator.continuing(
                self._inline, self._like_loader, self._answer, self._serialised
            )

    def _conclude(self) -> None:
        """The epoch ended before the question was closed: if the answer is no, it is final."""
        if self._num_batches:
            answer = self._ask(self._measured())
            if not answer.num_workers:
                self._close(answer)

    def _close(self, setup: Setup) -> None:
        assert self._settle is not None
        self._is_settled = True
        self._settle(setup)
        self._decide = self._settle = None

    def _ask(self, measured: Measured) -> Setup:
        assert self._decide is not None
        return self._decide(measured)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._num_yielded = 0
        self._returned = None
        self._returned_ns = 0
        (self._pooled or self._inline)._reset(loader, first_iter)
        self._turn_number = self._epoch_state.num_turns

    def _shutdown_workers(self) -> None:
        if self._pooled is not None:
            self._pooled._shutdown_workers()


class _TimedInline(InlineIterator):
    """Inline, with a word after the first samples of the first batch."""

    def __init__(self, loader: Any, setup: Setup, glance: Callable[[float], None]) -> None:
        super().__init__(loader, setup)
        self._glance_once: Callable[[float], None] | None = glance

    def _fetch(self, index: Any) -> Any:
        glance, self._glance_once = self._glance_once, None
        if glance is None or not self._auto_collation or takes_batches(self._dataset):
            return super()._fetch(index)
        position, start_s, samples = self._advance(len(index)), 0.0, []
        get = getter(self._dataset)
        for place, one in enumerate(index, position):
            samples.append(call_user(get, one, place, self._randomness))
            if len(samples) == GLANCE_FROM:
                start_s = time.perf_counter()
            elif len(samples) == GLANCE_AT:
                glance((time.perf_counter() - start_s) / (GLANCE_AT - GLANCE_FROM))
        return samples


def _busy_s() -> float:
    """Time spent computing, or ready to while others held the cores: not waiting for data."""
    return time.process_time() + queued_s()


def _num_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch."""
    nbytes = getattr(batch, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(_num_bytes(item) for item in batch)
    return 0
