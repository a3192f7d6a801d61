"""Samples of an async dataset: several in flight in one event loop, taken in order.

    start(key, ...) -> waiting -> in flight, a task each -> loaded -> results(key), in order

The event loop belongs to the thread and is kept, because a dataset may keep a connection that
belongs to it. It runs only while this code waits: for a sample, or in a worker for the next lease.
User code that is not async (collate_fn, on_error) therefore never runs at the same time as a
sample. Each turn of a sample, from one ``await`` to the next, is watched: which sample it is, for
crash reports, and whether it drew from a generator that it shares with others.

Used by workers (:mod:`penstock.engine.worker.async_loop`) and by the training process.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any

from penstock.engine.loading.async_limit import AsyncLimit
from penstock.errors import BadArgument, SampleTimeout, SharedDraw
from penstock.order.async_randomness import AsyncRandomness, describe_draw, describe_order
from penstock.order.event_loop import loop_of_thread, run_loop
from penstock.order.rng import SampleRng, of_task

NUM_TRIES = 2
"""A sample that exceeds the time limit is loaded again once, as in a worker that is replaced."""
NUM_DRAWS = 3
"""In the training process, other threads may draw too. Only a sample that draws this many times in
a row is at fault."""
CANCEL_S = 0.25
"""How long cancelled samples may take to close their connections."""

_TIMED_OUT_NOTE = "samples exceeded sample_timeout_s; they were cancelled and loaded again"


class AsyncSample:
    """One sample, or with ``__getitems__`` one batch: waiting, in flight, or loaded."""

    def __init__(self, get: Callable[[Any], Any], index: Any, position: int, epoch: int) -> None:
        self.get, self.index, self.position, self.epoch = get, index, position, epoch
        self.num_rows = 1
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.num_tries = self.num_draws = 0
        self.paused_s = 0.0
        self.is_over = self.is_taken = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.draw: SharedDraw | None = None
        """A draw in one of its tasks. The code that awaits that task may suppress the error."""
        self.rng: SampleRng | None = None
        self.num_tasks = self.num_turns = 0
        self.late_drawers: list[_WatchedCoroutine] = []
        """Its tasks that drew from ``penstock.rng()`` after an ``await``."""
        self.waiter: asyncio.Future[None] | None = None
        self.owner: AsyncSamples | None = None


_current: contextvars.ContextVar[AsyncSample | None] = contextvars.ContextVar(
    "penstock_sample", default=None
)


class AsyncSamples:
    """The async samples that one thread loads.

    Args:
        in_flight: Samples in flight at once, or ``"auto"``.
        randomness: None if draws are the user's concern (``randomness="worker"``).
        is_shared: True in the training process, where other threads may draw.
        timeout_s: The time limit of a sample. Time in which it could not continue does not count:
            the loop did not run, or another sample computed.
        on_turn: Called with a sample before each of its turns, and with None after it.

    Attributes:
        awaited: The sample that is waited for now.
        notes: For the user.
    """

    def __init__(
        self,
        in_flight: int | str,
        *,
        randomness: AsyncRandomness | None,
        is_shared: bool,
        timeout_s: float | None = None,
        on_turn: Callable[[AsyncSample | None], None] = lambda sample: None,
    ) -> None:
        self.loop = loop_of_thread()
        self.loop.set_task_factory(_make_task)
        self.randomness = randomness
        self._limit = AsyncLimit(in_flight)
        self._is_shared, self._timeout_s, self._on_turn = is_shared, timeout_s, on_turn
        self._context = contextvars.copy_context()
        self._groups: dict[Any, dict[int, AsyncSample]] = {}
        self._waiting: deque[AsyncSample] = deque()
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._num_in_flight = 0
        self._paused_s, self._stopped_s = 0.0, time.monotonic()
        self.awaited: AsyncSample | None = None
        self.notes: list[str] = []

    # -- starting and taking ---------------------------------------------------------------------

    def start(self, key: Any, get: Any, placed: Iterable[tuple[int, Any]], epoch: int) -> None:
        """Let samples (position and index of each) load, as soon as others leave room for them."""
        self._add(key, [AsyncSample(get, index, position, epoch) for position, index in placed])

    def start_batch(self, key: Any, get: Any, indices: Any, position: int, epoch: int) -> None:
        """Let one call of ``__getitems__`` load all ``indices``."""
        sample = AsyncSample(get, indices, position, epoch)
        sample.num_rows = len(indices)
        self._limit.fit(sample.num_rows)
        self._add(key, [sample])

    def _add(self, key: Any, samples: list[AsyncSample]) -> None:
        self._groups[key] = {sample.position: sample for sample in samples}
        for sample in samples:
            sample.owner = self
        self._waiting += samples
        self._fill()

    def has_started(self, key: Any) -> bool:
        return key in self._groups

    def results(self, key: Any) -> Iterator[Any]:
        """Yield the samples that were started with ``key``, in order."""
        for sample in list(self._groups[key].values()):
            yield self._take(sample)

    def fetch(self, key: Any, get: Any, index: Any, position: int, epoch: int) -> Any:
        """Return one sample: the one started with ``key``, or a new one if it was taken before."""
        group = self._groups.setdefault(key, {})
        sample = group.get(position)
        if sample is None or sample.get is not get or sample.is_taken:
            sample = group[position] = AsyncSample(get, index, position, epoch)
            sample.owner = self
            self._begin(sample)
        sample.is_taken = True
        return self._take(sample)

    def _take(self, sample: AsyncSample) -> Any:
        if not sample.is_over:
            self.awaited, sample.waiter = sample, self.loop.create_future()
            self._on_turn(None)
            try:
                self.run(sample.waiter)
            finally:
                self.awaited = None
        if sample.error is not None:
            self._on_turn(sample)  # the error names it
            raise sample.error
        return sample.result

    def drop(self, key: Any, error: BaseException | None = None) -> None:
        """Forget the samples of ``key``. Those in flight are cancelled.

        Args:
            error: Raised where one of them is waited for.
        """
        for sample in self._groups.pop(key, {}).values():
            self._drop(sample, error)
        self._fill()

    def _drop(self, sample: AsyncSample, error: BaseException | None) -> None:
        if sample.is_over:
            return
        if sample.task is not None:
            self._cancel(sample.task)
        self._finish(sample, error=error)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)
        task.cancel()

    def run(self, future: asyncio.Future[Any]) -> None:
        """Run the event loop until ``future`` is done."""
        self._paused_s += time.monotonic() - self._stopped_s
        try:
            run_loop(self.loop, future, self._describe_awaited)
        finally:
            self._stopped_s = time.monotonic()

    def _describe_awaited(self) -> str:
        """Return the sample that computes, or else the one that is waited for."""
        groups = list(self._groups.values())  # copies: the loop may run in a different thread
        started = [sample for group in groups for sample in list(group.values())]
        coroutines: dict[AsyncSample, Any] = {
            s: s.task.get_coro() for s in started if s.task is not None and not s.is_over
        }
        running = [sample for sample, made in coroutines.items() if made.cr_running]
        sample = running[0] if running else self.awaited
        if sample is None:
            return "async samples"
        stack = stack_of(coroutines.get(sample))
        return f"async sample {sample.index!r}" + (f", which waits here:\n{stack}" if stack else "")

    def settle(self) -> None:
        """Let cancelled samples end: their ``finally`` blocks close connections."""
        if self._cancelled:
            with suppress(RuntimeError):  # the interpreter is ending
                waiting = asyncio.wait(list(self._cancelled), timeout=CANCEL_S)
                self.run(self.loop.create_task(waiting))

    def started_keys(self) -> list[Any]:
        return list(self._groups)

    @property
    def found_in_flight(self) -> int:
        """The number of samples in flight that ``"auto"`` has found. 0 if it was given."""
        return self._limit.value if self._limit.is_auto else 0

    def take_notes(self) -> list[str]:
        """Return the notes for the user since the last call."""
        notes, self.notes = self.notes, []
        if self._limit.reason is not None:
            notes.append(self._limit.reason)
            self._limit.reason = None
        return notes

    # -- tasks -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._waiting and (
            not self._num_in_flight
            or self._num_in_flight + self._waiting[0].num_rows <= self._limit.value
        ):
            sample = self._waiting.popleft()
            if not sample.is_over:
                self._begin(sample)

    def _begin(self, sample: AsyncSample) -> None:
        if sample.task is None:
            self._num_in_flight += sample.num_rows
        context = self._context.copy()
        context.run(_current.set, sample)
        if self.randomness is not None:
            sample.rng = self.randomness.rng_at(sample.epoch, sample.position)
            context.run(of_task.set, sample.rng)
        sample.paused_s, sample.draw = self._paused_s, None
        sample.num_tasks, sample.late_drawers = 0, []
        sample.task = context.run(self.loop.create_task, _load(sample.get, sample.index))
        sample.task.add_done_callback(functools.partial(self._end, sample))
        if self._timeout_s is not None:
            sample.timer = self.loop.call_later(self._timeout_s, self._expire, sample)

    def _end(self, sample: AsyncSample, task: asyncio.Task[Any]) -> None:
        is_cancelled = task.cancelled()
        error = None if is_cancelled else task.exception()  # also marks it as retrieved
        error = sample.draw or error
        if sample.is_over or sample.task is not task:
            return
        if sample.timer is not None:
            sample.timer.cancel()
        if isinstance(error, SharedDraw) and self._is_shared and sample.num_draws < NUM_DRAWS - 1:
            sample.num_draws += 1
            self._begin(sample)
            return
        if is_cancelled and error is None:
            error = RuntimeError(f"dataset[{sample.index!r}] cancelled its own task")
        self._finish(sample, None if error is not None else task.result(), error)
        self._limit.note_done(self.loop.time(), sample.num_rows, is_full=bool(self._waiting))
        self._fill()

    def _finish(
        self, sample: AsyncSample, result: Any = None, error: BaseException | None = None
    ) -> None:
        if sample.task is not None:
            self._num_in_flight -= sample.num_rows
        if sample.timer is not None:
            sample.timer.cancel()
        sample.is_over, sample.result, sample.error = True, result, error
        if sample.waiter is not None and not sample.waiter.done():
            sample.waiter.set_result(None)

    def _expire(self, sample: AsyncSample) -> None:
        """Cancel a sample that is over the time limit. Loads it again once."""
        assert sample.task is not None
        assert self._timeout_s is not None
        paused_s, sample.paused_s = self._paused_s - sample.paused_s, self._paused_s
        if paused_s > 0.01:
            sample.timer = self.loop.call_later(paused_s, self._expire, sample)
            return
        stack = stack_of(sample.task.get_coro())
        self._cancel(sample.task)
        sample.num_tries += 1
        if sample.num_tries < NUM_TRIES:
            self.notes.append(_TIMED_OUT_NOTE)
            self._begin(sample)
            return
        self._finish(sample, error=_describe_timeout(sample, self._timeout_s, stack))
        self._fill()

    # -- turns -----------------------------------------------------------------------------------

    def turn(self, task: _WatchedCoroutine, go: Callable[..., Any], *value: Any) -> Any:
        """Run a task of a sample up to its next ``await``. Called by :class:`_WatchedCoroutine`.

        Raises:
            SharedDraw: It drew from a generator that other samples also use, or from that of its
                sample at the same time as another task.
        """
        randomness, start_s, sample = self.randomness, time.monotonic(), task.sample
        self._on_turn(sample)
        rng = sample.rng if task.is_late and sample.num_tasks > 2 else None
        drawn = rng.mark() if rng is not None else None
        mark = randomness.mark() if randomness is not None else None
        try:
            return go(*value)
        finally:
            self._on_turn(None)
            self._paused_s += time.monotonic() - start_s  # no other sample could continue
            if randomness is not None and mark is not None:
                moved = randomness.moved_since(mark)
                if moved and not sample.is_over:  # not a task of a library that outlives it
                    sample.draw = describe_draw(moved, sample.index)
                    raise sample.draw
                if rng is not None and rng.mark() != drawn and task.draws_beside_others():
                    sample.draw = describe_order(sample.index)
                    raise sample.draw


async def _load(get: Callable[[Any], Any], index: Any) -> Any:
    made = get(index)
    if not inspect.isawaitable(made):
        raise BadArgument(
            f"in_flight= was given, but dataset[{index!r}] returned an object of type "
            f"{type(made).__name__}, which cannot be awaited",
            remedy="async def __getitem__(self, index) in the dataset, or no in_flight=",
        )
    return await made


def _describe_timeout(sample: AsyncSample, timeout_s: float, stack: str) -> SampleTimeout:
    many = isinstance(sample.index, list)
    what = "one of the samples" if many else "sample"
    call = f"__getitems__({sample.index!r})" if many else f"__getitem__({sample.index!r})"
    return SampleTimeout(
        f"{what} {sample.index!r} did not finish within {timeout_s:g} s (sample_timeout_s), "
        f"{NUM_TRIES} times. It was cancelled here:\n{stack}",
        likely="a server that does not answer.",
        remedy=f"asyncio.run(dataset.{call}) in this process; or "
        'DataLoader(..., on_error="skip") to skip samples like this',
        sample_index=sample.index,
        seconds=timeout_s,
        stack=stack,
    )


class _WatchedCoroutine(Coroutine[Any, Any, Any]):
    """The coroutine of a sample's task, or of a task that a sample started."""

    def __init__(self, inner: Any, sample: AsyncSample, owner: AsyncSamples) -> None:
        self._inner, self.sample, self._owner = inner, sample, owner
        self._is_first = not sample.num_tasks  # awaits the others
        sample.num_tasks += 1
        self._num_turns = 0
        self._start, self._end = sample.num_turns, math.inf

    @property
    def is_late(self) -> bool:
        """True if another task of the sample may have continued in the meantime."""
        return self._num_turns > 1 and not self._is_first

    def draws_beside_others(self) -> bool:
        """Record a draw after an ``await``. Returns True if another task drew at the same time."""
        others = [task for task in self.sample.late_drawers if task is not self]
        self.sample.late_drawers = [*others, self]
        return any(self._start < task._end and task._start < self._end for task in others)

    def send(self, value: Any) -> Any:
        return self._turn(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._turn(self._inner.throw, *error)

    def _turn(self, go: Callable[..., Any], *value: Any) -> Any:
        self._num_turns += 1
        self.sample.num_turns += 1
        try:
            return self._owner.turn(self, go, *value)
        except BaseException as error:  # also its end
            self._end = self.sample.num_turns
            if isinstance(error, SharedDraw):
                with suppress(RuntimeError):
                    self._inner.close()
            raise

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # cr_frame, cr_await, ... for asyncio's own reports


def stack_of(coroutine: Any) -> str:
    """Return where a suspended coroutine waits, as the lines of a traceback."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and frame.f_code is not _load.__code__:
            frames.append((frame, frame.f_lineno))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return "".join(traceback.StackSummary.extract(frames).format()).rstrip()


def _make_task(loop: Any, coroutine: Any, **options: Any) -> Any:
    sample = _current.get()
    if sample is not None and sample.owner is not None:
        coroutine = _WatchedCoroutine(coroutine, sample, sample.owner)
    return asyncio.Task(coroutine, loop=loop, **options)
