"""The worker loop for async datasets: samples of all leases at hand are in flight together.

    pipe -> LeaseReader (a thread) -> the event loop starts the samples of each lease
                                   -> AsyncWorkerLoop.run(): serves the leases in order

Leases are answered one after the other, as in :mod:`penstock.engine.worker.loop`. While one waits
for its samples, those of the leases behind it load too. They are cancelled when their pass is over.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.engine.loading.async_samples import AsyncSample, AsyncSamples
from penstock.engine.loading.fetch import PassOver, async_one_getter
from penstock.engine.memory.messages import Lease, ParentMessage, Reply
from penstock.engine.worker.loop import WorkerLoop
from penstock.engine.worker.parent_link import Connection
from penstock.order.async_randomness import AsyncRandomness


class AsyncWorkerLoop(WorkerLoop):
    """One worker that loads an async dataset. Takes the arguments of :class:`WorkerLoop`."""

    def __init__(self, *, is_thread: bool = False, **given: Any) -> None:
        super().__init__(is_thread=is_thread, **given)
        task, objects = self._task, given["objects"]
        assert task.in_flight is not None
        randomness = None
        if task.per_sample:
            randomness = AsyncRandomness(
                task.base_seed,
                self._dataset,
                with_torch=not self._keeps_init_seed,
                is_worker=not is_thread,
                states=objects.get("generator_states"),
                names=objects.get("generator_names"),
            )
        self._gatherer = self._in_place = None
        self._is_thread = is_thread
        self._given = task.in_flight, randomness
        self._upcoming: deque[ParentMessage] = deque()
        """Messages whose samples have not been started."""

    def run(self) -> None:
        """Serve leases until the parent requests a stop or is gone."""
        in_flight, randomness = self._given
        self._flight = AsyncSamples(
            in_flight,
            randomness=randomness,
            is_shared=self._is_thread,
            timeout_s=self._task.sample_timeout_s,
            on_turn=self._show_turn,
        )
        self._connection = LeaseReader(self._connection, self._flight, self._expect)
        try:
            super().run()
        finally:
            self._cancel(lambda key: True)
            self._flight.settle()

    def _set_dataset(self, dataset: Any) -> None:
        super()._set_dataset(dataset)
        self._one = async_one_getter(dataset)

    # -- the leases at hand ----------------------------------------------------------------------

    def _expect(self, messages: list[ParentMessage] | None) -> None:
        """Start the samples of new leases. Called in the event loop when they arrive."""
        self._cancel(self._is_over)
        self._upcoming += messages or ()
        self._start_upcoming()

    def _is_over(self, key: tuple[int, int, int]) -> bool:
        try:
            self._status.check_pass(key[0])
        except PassOver:
            return True
        return False

    def _cancel(self, is_over: Callable[[Any], bool]) -> None:
        for key in self._flight.started_keys():
            if is_over(key):
                self._flight.drop(key, PassOver())

    def _start_upcoming(self) -> None:
        """Start samples, up to a trial, which must be over before the leases behind it."""
        while self._upcoming and self._init_error is None:
            message = self._upcoming[0]
            if isinstance(message, Lease) and message.trial is not None:
                return
            self._upcoming.popleft()
            if not isinstance(message, Lease):
                continue
            has_bad = bool(message.poison_rows) or message.is_suspect
            if not (has_bad or self._is_over(message.key) or self._flight.has_started(message.key)):
                self._start(message)

    def _start(self, lease: Lease) -> None:
        flight, epoch = self._flight, lease.key_epoch
        if not self._task.auto_collation:
            get = self._get if self._takes_batches else self._one
            flight.start(lease.key, get, [(lease.position, lease.index)], epoch)
        elif self._takes_batches:
            get = self._dataset.__getitems__
            flight.start_batch(lease.key, get, lease.index, lease.position, epoch)
        else:
            flight.start(lease.key, self._one, enumerate(lease.index, lease.position), epoch)

    def _serve(self, lease: Lease) -> Reply:
        try:
            return super()._serve(lease)._replace(in_flight=self._flight.found_in_flight)
        finally:
            self._flight.drop(lease.key)
            if self._upcoming and self._upcoming[0] is lease:  # a trial, or after a failed init_fn
                self._upcoming.popleft()
            self._start_upcoming()
            for note in self._flight.take_notes():
                self._connection.put(("note", note))

    # -- loading ---------------------------------------------------------------------------------

    def _samples(self, lease: Lease) -> Any:
        self._begin_randomness(lease)
        if not self._flight.has_started(lease.key):
            self._start(lease)
        results = self._flight.results(lease.key)
        if self._task.auto_collation and not self._takes_batches:
            return self._recorder.watch(results)
        return next(results)

    def _one_getter(self) -> Callable[[Any], Any]:
        return self._one

    def _call_one(
        self, lease: Lease, function: Callable[[Any], Any], index: Any, position: int
    ) -> Any:
        if function is not self._one:  # on_error, which is not async
            return super()._call_one(lease, function, index, position)
        return self._flight.fetch(lease.key, function, index, position, lease.key_epoch)

    def _show_turn(self, sample: AsyncSample | None) -> None:
        if sample is not None:
            self._status.show(sample.position, sample.index, sample.num_rows)
            return
        awaited = self._flight.awaited
        if awaited is None:
            self._status.show_no_sample()
            self._status.show_waiting(True)
        else:
            self._status.show_awaited(awaited.position, awaited.index, awaited.num_rows)


class LeaseReader:
    """Reads leases in a thread, so that samples can start before the lease's turn comes.

    Args:
        expect: Called in the event loop with each list of messages, and with None at the end.
    """

    def __init__(
        self,
        connection: Connection,
        flight: AsyncSamples,
        expect: Callable[[list[ParentMessage] | None], None],
    ) -> None:
        self._connection, self._flight, self._expect = connection, flight, expect
        self._arrived: deque[list[ParentMessage] | None] = deque()
        self._news: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        threading.Thread(target=self._read, name="penstock-lease-reader", daemon=True).start()

    def _read(self) -> None:
        messages: list[ParentMessage] | None = []
        while messages is not None:
            try:
                messages = self._connection.get()
            except BaseException as error:  # for example an index that cannot be unpickled
                self._failure, messages = error, None
            with suppress(RuntimeError):  # the loop is closed: the worker is ending
                self._flight.loop.call_soon_threadsafe(self._note, messages)

    def _note(self, messages: list[ParentMessage] | None) -> None:
        self._expect(messages)
        self._arrived.append(messages)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def get(self) -> list[ParentMessage] | None:
        """Return the next messages. The event loop runs while there are none."""
        while not self._arrived:
            self._news = self._flight.loop.create_future()
            self._flight.run(self._news)
        messages = self._arrived.popleft()
        if messages is None and self._failure is not None:
            raise self._failure
        return messages

    def put(self, reply: Reply | tuple[str, str]) -> None:
        self._connection.put(reply)

    def segment(self, place: tuple[int, int]) -> mmap.mmap:
        return self._connection.segment(place)
