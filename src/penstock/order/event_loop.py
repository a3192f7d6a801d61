"""The event loop of a thread, for async samples.

The loop is kept, because a dataset may keep a connection that belongs to it. It runs only while
Penstock waits for a sample. The loader has many samples in flight, see
:mod:`penstock.engine.loading.async_samples`. Everything else, for example ``penstock.pack``, loads
one at a time with :func:`sample_getter`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from penstock.errors import warn_user
from penstock.order.rng import OUTSIDE, active, of_task
from penstock.user_objects import probe

CANCEL_LIMIT_S = 5.0
"""After Ctrl-C, a sample may take this long to end. Then its thread is left behind."""
SLOW_S = 60.0
"""Inside a running event loop, a sample that takes longer is named in a warning, and
again after twice as long each time."""


def sample_getter(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that loads one sample, also of an async dataset. It can be pickled."""
    if inspect.iscoroutinefunction(probe(dataset, "__getitems__")):
        return partial(_load_by_batch, dataset)
    return partial(load_sample, dataset)


def load_sample(dataset: Any, index: Any) -> Any:
    """Return ``dataset[index]``, also of an async dataset.

    Example:
        >>> class Pages:
        ...     async def __getitem__(self, index):
        ...         return 2 * index
        >>> load_sample(Pages(), 4), load_sample([7, 8], 1)
        (8, 8)
    """
    sample = dataset[index]
    return wait_for(sample, index) if inspect.iscoroutine(sample) else sample


def _load_by_batch(dataset: Any, index: Any) -> Any:
    return wait_for(dataset.__getitems__([index]), index)[0]


def wait_for(coroutine: Any, index: Any = None) -> Any:
    """Run the coroutine of sample ``index`` to its end in the event loop of this thread."""
    loop, context = loop_of_thread(), contextvars.copy_context()
    if active.rng is not None and active.rng.position != OUTSIDE:
        context.run(of_task.set, active.rng)  # the loop may run in a different thread
    task = context.run(loop.create_task, coroutine)
    run_loop(loop, task, lambda: f"async sample {index!r}")
    return task.result()


class _ThreadLoop(threading.local):
    held: tuple[int, _HeldLoop] | None = None


class _HeldLoop:
    """Closes an event loop when its thread or the process ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, _close_loop, self.loop)


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        loop.close()


_thread_loop = _ThreadLoop()


def loop_of_thread() -> asyncio.AbstractEventLoop:
    """Return the event loop for async samples in this thread.

    It is kept for the next epoch and for other loaders, because a dataset may keep a connection
    that belongs to it. A forked process gets a new one.
    """
    held = _thread_loop.held
    if held is None or held[0] != os.getpid() or held[1].loop.is_closed():
        held = _thread_loop.held = os.getpid(), _HeldLoop()
    return held[1].loop


def run_loop(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], describe: Callable[[], str]
) -> None:
    """Run a loop until ``future`` is done, also in a thread that already runs one (a notebook).

    Args:
        describe: Returns what is loaded, for a warning inside a running loop. After Ctrl-C, it is a
            note of the error.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with _noting(describe):
            loop.run_until_complete(future)
        return
    failed: list[BaseException] = []
    has_ended = threading.Event()  # after Ctrl-C, Thread.join may say so too early (Python 3.11)

    def run() -> None:
        try:
            loop.run_until_complete(future)
        except BaseException as error:
            failed.append(error)
        has_ended.set()

    thread = threading.Thread(target=run, name="penstock-async-samples", daemon=True)
    thread.start()
    with _noting(describe):
        try:
            limit_s = SLOW_S
            while not has_ended.wait(limit_s):
                warn_user(
                    f"waiting for {limit_s:g} s for {describe()}\nDataLoader(..., "
                    "sample_timeout_s=...) cancels such a sample and loads it again."
                )
                limit_s *= 2
        except BaseException:  # Ctrl-C
            loop.call_soon_threadsafe(future.cancel)
            if not has_ended.wait(CANCEL_LIMIT_S):
                _thread_loop.held = None  # the next sample gets a new loop
            raise
    if failed:
        raise failed[0]


@contextmanager
def _noting(describe: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"while loading {describe()}")
        raise
