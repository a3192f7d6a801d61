"""The worker loop: receives leases, loads samples, fills slots, sends replies.

    Connection (source of leases and destination of replies: a pipe, or a queue between threads)
      -> WorkerLoop.run(): for each lease, dataset[i] per row -> slot -> Reply

A batch is written into its slot in one of five ways:

    layout        default collate: each sample is copied into its row (BatchWriter)
    gather        the dataset is in memory: one call for the whole part (find_gatherer)
    in place      the dataset writes directly into its row (find_in_place_fetcher)
    slot_collate  default_collate inside the user's collate_fn stacks in the slot (collating_into)
    payload       everything else, including batches that do not fit a layout: pickled
                  (payload.write)

Worker processes and worker threads run the same class. Only the connection differs.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.loading import collate
from penstock.engine.loading.default_collate import default_collate, is_default_collate
from penstock.engine.loading.fetch import (
    EmptyBatch,
    EndOfStream,
    PassOver,
    Stream,
    call_user,
    getter,
    one_getter,
    seed_pipes,
    takes_batches,
)
from penstock.engine.loading.gather import find_gatherer
from penstock.engine.loading.generator_lock import GeneratorLock
from penstock.engine.loading.in_place import find_channels_last_getter, find_in_place_fetcher
from penstock.engine.loading.slot_collate import SlotAllocator, collating_into
from penstock.engine.memory import payload
from penstock.engine.memory.batch_layout import Layout, LayoutError
from penstock.engine.memory.messages import (
    NOTHING,
    Lease,
    NewPass,
    Reply,
    ResumeStream,
    WorkerTask,
    on_node,
    trace_buffers,
)
from penstock.engine.pickling.exceptions import ErrorReport, describe
from penstock.engine.worker.parent_link import Connection, WorkerStatus
from penstock.errors import BadState, NoStopIteration
from penstock.order.sample_randomness import (
    SampleRandomness,
    UnexpectedDraw,
    make_randomness,
)
from penstock.order.stream_state import forget_stream_state, load_stream_state, stream_state_of
from penstock.trace.record import now_ns
from penstock.trace.worker_recorder import WorkerRecorder

if TYPE_CHECKING:
    from penstock.engine.loading.bad_samples import BadSamplePolicy

Loaded = tuple[str, Any, int, bool]
"""Kind and content of a reply, the bytes the batch needs, and whether the slot must be dropped."""

_ALONE_NOTE = (
    "samples draw from the global generators, which threads share, so they are loaded one at a "
    "time. Use penstock.rng() or pool='process' to load them in parallel"
)
_SEED_NOTE = (
    "worker_init_fn set torch's seed, and Penstock keeps it. What the dataset draws from torch "
    "therefore depends on the number of workers. Remove torch.manual_seed from worker_init_fn to "
    "get the same numbers with any number of workers."
)


class WorkerLoop:
    """One worker. ``generator_lock`` is held while user code runs if threads share generators."""

    def __init__(
        self,
        *,
        number: int,
        task: WorkerTask,
        objects: dict[str, Any],
        connection: Connection,
        cells: memoryview,
        generator_lock: GeneratorLock | None = None,
        is_thread: bool = False,
    ) -> None:
        self._number = number
        self._task = task
        self._collate = objects["collate_fn"]
        self._writes_slots = task.auto_collation and is_default_collate(self._collate)
        self._set_dataset(objects["dataset"])
        self._connection = connection
        self._status = WorkerStatus(cells, number, has_limit=task.has_limit)
        buffers = trace_buffers(cells, number + 1, task.trace_bytes)
        self._recorder = WorkerRecorder(
            buffers[number] if buffers else None,
            traces_samples=task.traces_samples,
            traces_steps=task.traces_steps,
            is_thread=is_thread,
        )
        self._generator_lock = generator_lock
        self._guard: Callable[[], Any] = nullcontext if generator_lock is None else self._alone
        # sys.exit ends a worker process, which the parent detects. A thread must report it.
        self._caught: type[BaseException] = BaseException if is_thread else Exception
        kind = "thread" if is_thread else "process"
        self._where = f"in DataLoader worker {kind} {number}{on_node(task.node)}"
        self._own_state: Any = None
        self._has_loaded_state = False
        self._num_again = 0
        self._checks_first = task.is_iterable
        self._first_samples: Any = None
        self._stream: Stream | None = None
        self._stream_pass = NOTHING
        self._layouts: dict[Any, int] = {}
        self._init_error: BaseException | None = objects.get("init_error")
        self._keeps_init_seed = bool(objects.get("keeps_init_seed"))
        self._randomness: SampleRandomness | None = None
        self._collate_randomness: SampleRandomness | None = None
        self._randomness_pass = NOTHING
        if task.per_sample:
            states = objects.get("generator_states")
            self._randomness, self._collate_randomness = make_randomness(
                task.base_seed,
                self._dataset,
                None if is_default_collate(self._collate) else self._collate,
                with_torch=not self._keeps_init_seed,
                is_worker=not is_thread,
                checks_repeats=number == 0,
                states=states,
                names=objects.get("generator_names"),
                init_states=objects.get("init_states"),
                waits_for_numpy=not is_thread and objects["waits_for_numpy"],
            )
        on_error = objects.get("on_error", "raise")
        self._bad_policy: BadSamplePolicy | None = None
        if on_error != "raise":
            from penstock.engine.loading.bad_samples import BadSamplePolicy

            self._bad_policy = BadSamplePolicy(
                on_error,
                self._dataset,
                seed=task.substitute_seed,
                num_indices=task.num_indices,
                none_is_bad=is_default_collate(self._collate),
            )
        self._gatherer = find_gatherer(self._dataset) if self._writes_slots else None
        # Threads load a run of samples before they write any of them.
        is_direct = self._writes_slots and not is_thread
        self._in_place = find_in_place_fetcher(self._dataset) if is_direct else None

    def _set_dataset(self, dataset: Any) -> None:
        self._dataset, self._takes_batches = dataset, takes_batches(dataset)
        get_last = find_channels_last_getter(dataset) if self._writes_slots else None
        self._keeps_channels_last = get_last is not None
        self._get = getter(dataset) if get_last is None else get_last

    def run(self) -> None:
        """Serve leases until the parent requests a stop or is gone."""
        self._recorder.enter()
        if self._keeps_init_seed and self._task.per_sample and self._number == 0:
            self._connection.put(("warning", _SEED_NOTE))
        while True:
            self._status.show_idle(True)
            leases = self._connection.get()
            self._status.show_idle(False)
            if leases is None:
                return
            for lease in leases:
                if isinstance(lease, NewPass):
                    self._set_dataset(seed_pipes(self._dataset, lease.shared_seed))
                elif isinstance(lease, ResumeStream):
                    self._own_state, self._num_again = lease.state, lease.num_batches
                else:
                    reply = self._serve(lease)
                    self._tell_user()
                    self._connection.put(reply)

    def _tell_user(self) -> None:
        """Send messages about the randomness of samples to the parent."""
        for randomness in (self._randomness, self._collate_randomness):
            if randomness is not None and (randomness.warnings or randomness.notes):
                warnings, notes = randomness.take_messages()
                for text in warnings:
                    self._connection.put(("warning", text))
                for text in notes:
                    self._connection.put(("note", text))

    def _serve(self, lease: Lease) -> Reply:
        self._recorder.begin(lease)
        needed_bytes, is_slot_lost = 0, False
        try:
            if self._init_error is not None and lease.trial is None:
                error, self._init_error = self._init_error, None
                raise error
            if self._bad_policy is not None:
                self._bad_policy.found = []
            if lease.trial is None:
                kind, content, needed_bytes, is_slot_lost = self._load(lease)
            else:
                kind, content = self._load_alone(lease, *lease.trial), None
        except PassOver:
            kind, content = "dropped", None
        except EmptyBatch:
            kind, content = "empty", None
        except EndOfStream:
            kind, content = "end", None
        except self._caught as error:
            kind, content = "error", self._describe(error)
        self._status.show_done()
        is_loaded = kind not in ("dropped", "empty", "end", "error", "tried")
        busy_ns = self._recorder.end(is_loaded=is_loaded)
        state, has_ended = None, False
        if self._task.is_iterable and kind != "error":
            try:
                state = stream_state_of(self._dataset)
            except BadState as error:
                kind, content = "error", self._describe(error)
            has_ended = self._stream is not None and self._stream.has_ended
        bad_samples = tuple(self._bad_policy.found) if self._bad_policy is not None else ()
        return Reply(
            *lease[:3],
            kind,
            content,
            needed_bytes,
            busy_ns,
            is_slot_lost,
            state,
            bad_samples,
            has_ended,
            self._take_first_samples(),
        )

    def _take_first_samples(self) -> Any:
        first, self._first_samples = self._first_samples, None
        return first

    def _describe(self, error: BaseException) -> ErrorReport:
        if isinstance(error, StopIteration):  # from user code, so not the end of the epoch
            made = NoStopIteration.error_for("user code")
            made.__cause__, error = error, made
        from penstock.engine.loading.sample_path import find_path

        index = self._status.index
        path = None if index is None else find_path(self._dataset, index, error)
        return describe(error, worker=self._number, where=self._where, index=index, path=path)

    def _load(self, lease: Lease) -> Loaded:
        if (lease.poison_rows or lease.is_suspect) and self._bad_policy is not None:
            return self._load_carefully(lease, self._bad_policy)
        try:
            try:
                return self._load_once(lease)
            except UnexpectedDraw:
                return self._load_once(lease)
        except (PassOver, EndOfStream, EmptyBatch):
            raise
        except Exception:
            if self._bad_policy is None or self._task.is_iterable:
                raise
        # Outside the handler, so that the error does not become the context of later errors.
        return self._load_carefully(lease, self._bad_policy)

    def _load_carefully(self, lease: Lease, bad_policy: BadSamplePolicy) -> Loaded:
        """Load one sample at a time and apply the bad-sample policy."""
        if bad_policy.needs_whole_batch and not lease.is_whole:
            return "odd", None, 0, False
        samples = self._samples_carefully(lease, bad_policy, lease.index)
        if not samples:
            if not lease.is_whole:
                return "odd", None, 0, False
            raise EmptyBatch
        if self._writes_slots:
            return self._fill(lease, samples)
        return self._collate_freely(lease, samples if self._task.auto_collation else samples[0])

    def _samples_carefully(
        self, lease: Lease, bad_policy: BadSamplePolicy, batch: Any
    ) -> list[Any]:
        """Load the lease's samples. ``batch`` holds all indices that substitutes may come from."""
        self._status.check_pass(lease.pass_number)
        self._begin_randomness(lease)
        call, get = functools.partial(self._call_one, lease), self._one_getter()
        indices = list(batch) if self._task.auto_collation else [batch]
        placed = self._walk(lease)
        return bad_policy.samples(call, get, placed, lease.key_epoch, indices, lease.poison_rows)

    def _one_getter(self) -> Callable[[Any], Any]:
        return self._get if self._keeps_channels_last else one_getter(self._dataset)

    def _call_one(
        self, lease: Lease, function: Callable[[Any], Any], index: Any, position: int
    ) -> Any:
        """Call user code for one sample of a lease: the dataset, or on_error."""
        with self._guard():
            if self._randomness is not None:
                self._randomness.snapshot()
            return call_user(function, index, position, self._randomness)

    def _load_alone(self, lease: Lease, first: int, count: int) -> str:
        """Load a few rows of a lease into unused memory, to test whether this worker survives it.

        Exceptions are ignored here, because the lease itself is loaded next.
        """
        index = lease.index
        if self._task.auto_collation:
            index = list(index)[first : first + count]
        rows = range(first, first + count)
        alone = lease._replace(
            index=index,
            position=lease.position + first,
            poison_rows=tuple(
                (row - first, error) for row, error in lease.poison_rows if row in rows
            ),
        )
        with suppress(Exception):
            self._status.check_pass(lease.pass_number)
            if self._bad_policy is not None and (lease.poison_rows or lease.is_suspect):
                samples: Any = self._samples_carefully(alone, self._bad_policy, lease.index)
            else:
                samples = self._samples(alone)
            if self._writes_slots:
                writer = collate.BatchWriter(np.empty(lease.slot_bytes, dtype=np.uint8), count, 0)
                writer.take(iter(samples))
            elif self._task.auto_collation:
                deque(samples, maxlen=0)
        return "tried"

    def _load_once(self, lease: Lease) -> Loaded:
        self._status.check_pass(lease.pass_number)
        if self._gatherer is not None:
            slot = self._slot(lease)
            _, num_bytes = self._gatherer.layout.offsets(lease.rows)
            if num_bytes <= slot.nbytes:
                with suppress(LayoutError):  # for example slices as indices, which load as usual
                    self._gatherer.fill(lease.index, slot, lease.rows, lease.first_row)
                    return self._filled(self._gatherer.layout, len(lease.index), [], lease)
        samples = self._samples(lease)
        # __getitems__ may return any object. collate_fn receives it unchanged, as in torch.
        is_from_getitems = self._takes_batches and self._task.auto_collation
        is_sequence = not is_from_getitems or isinstance(samples, (list, tuple))
        if self._writes_slots and is_sequence:
            return self._fill(lease, samples)
        if self._task.auto_collation and not (self._task.is_iterable or is_from_getitems):
            samples = list(samples)
        return self._collate_freely(lease, samples)

    # -- loading ---------------------------------------------------------------------------------

    def _samples(self, lease: Lease) -> Any:
        """Return an iterator over samples, or the one sample without batching."""
        task = self._task
        if task.is_iterable:
            if self._checks_first:
                from penstock.engine.loading.first_samples import generator_states

                before = generator_states()
            if self._stream_pass != lease.pass_number or self._stream is None:
                with self._guard():
                    if self._has_loaded_state:
                        forget_stream_state(self._dataset)
                        self._has_loaded_state = False
                    if self._own_state is not None:  # resumed: the dataset restores its position
                        load_stream_state(self._dataset, self._own_state)
                        self._own_state, self._has_loaded_state = None, True
                    self._stream = Stream(
                        self._dataset,
                        auto_collation=task.auto_collation,
                        drop_last=task.drop_last,
                        take_next=self._bad_policy.next_of
                        if self._bad_policy is not None
                        else None,
                    )
                    self._stream_pass = lease.pass_number
                    self._take_again(self._stream, lease.index)
            self._status.show_no_sample(runs_user_code=True)
            with self._guard():
                samples = self._stream.fetch(lease.index, lease.position)
            if self._checks_first:
                self._note_first(samples, is_random=generator_states() != before)
            return samples
        self._begin_randomness(lease)
        if not task.auto_collation:
            self._status.show(lease.position, lease.index)
            with self._guard():
                return call_user(self._get, lease.index, lease.position, self._randomness)
        if self._takes_batches:
            self._status.show(lease.position, list(lease.index), len(lease.index))
            with self._guard():
                get, name = self._dataset.__getitems__, "dataset.__getitems__"
                return call_user(get, lease.index, lease.position, self._randomness, name)
        return self._recorder.watch(self._one_by_one(lease))

    def _note_first(self, samples: Any, *, is_random: bool) -> None:
        """Keep a digest of the first samples for the next reply."""
        from penstock.engine.loading.first_samples import (
            FirstSamples,
            ObservedWorkerInfo,
            digest_samples,
        )

        self._checks_first = False
        digest = digest_samples(samples, is_random=is_random)
        self._first_samples = FirstSamples(ObservedWorkerInfo.has_asked, digest)

    def _take_again(self, stream: Stream, index: Any) -> None:
        """Read and drop the batches that the previous worker has answered for, good or bad."""
        for _ in range(self._num_again):
            with suppress(Exception):
                stream.fetch(index)
        self._num_again = 0
        if self._bad_policy is not None:
            self._bad_policy.found = []  # they were reported before

    def _begin_randomness(self, lease: Lease) -> None:
        if self._randomness is None or self._collate_randomness is None:
            return
        if self._randomness_pass != lease.pass_number:
            self._randomness.begin(lease.key_epoch)
            self._collate_randomness.begin(lease.key_epoch)
            self._randomness_pass = lease.pass_number
        # Threads share the generators, so another thread may draw. GeneratorLock.exclusive
        # restores them.
        is_used = self._generator_lock is None and self._collate_randomness.needs_seeding
        self._randomness.snapshot(is_used=is_used)

    def _one_by_one(self, lease: Lease) -> Iterator[Any]:
        get = self._get if self._in_place is None else self._in_place.get
        randomness, generator_lock = self._randomness, self._generator_lock
        if generator_lock is not None and randomness is not None and randomness.is_unseeded:
            self._status.show_waiting(True)
            with generator_lock.shared():
                samples = list(self._load_unseeded(lease, get, randomness))
            yield from samples
        elif generator_lock is not None:
            self._note_exclusive()
            for position, index in self._walk(lease):
                with self._alone():
                    if randomness is not None:
                        randomness.snapshot()
                    sample = call_user(get, index, position, randomness)
                yield sample
        elif randomness is not None and randomness.is_unseeded:
            yield from self._load_unseeded(lease, get, randomness)
        else:
            for position, index in self._walk(lease):
                yield call_user(get, index, position, randomness)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run user code in a thread while no other thread runs any."""
        assert self._generator_lock is not None
        self._status.show_waiting(True)
        with self._generator_lock.exclusive(), self._own_preserved():
            self._status.show_waiting(False)
            yield

    @contextmanager
    def _own_preserved(self) -> Iterator[None]:
        """Restore the generators of dataset and collate_fn, which a thread shares with the user."""
        with ExitStack() as stack:
            for randomness in (self._randomness, self._collate_randomness):
                if randomness is not None:
                    stack.enter_context(randomness.preserved_own())
            yield

    def _note_exclusive(self) -> None:
        if self._randomness is not None and self._randomness.has_drawn:
            self._connection.put(("note", _ALONE_NOTE))

    def _walk(self, lease: Lease) -> Iterator[tuple[int, Any]]:
        """Yield positions and indices of a lease, and record each in the worker's status."""
        indices = lease.index if self._task.auto_collation else [lease.index]
        return self._status.walk(indices, lease.position, lease.pass_number)

    def _load_unseeded(self, lease: Lease, get: Any, randomness: SampleRandomness) -> Iterator[Any]:
        randomness.begin_unseeded(is_shared=self._generator_lock is not None)
        try:
            yield from randomness.unseeded_samples(get, self._walk(lease))
        except PassOver:
            raise
        except Exception:
            randomness.end_unseeded()  # the error may differ with the sample's own randomness
            raise
        randomness.end_unseeded()

    # -- filling ---------------------------------------------------------------------------------

    def _fill(self, lease: Lease, samples: Any) -> Loaded:
        """Run default_collate directly into the slot. Samples without a layout become a payload."""
        buffer = self._slot(lease)
        is_last = self._keeps_channels_last
        writer = collate.BatchWriter(
            buffer, lease.rows, lease.first_row, keeps_channels_last=is_last
        )
        if self._in_place is not None:
            self._in_place.begin(writer)
        iterator, needed_bytes = iter(samples), 0
        try:
            writer.take(iterator)
            self._status.show_no_sample()
            if writer.layout is not None:
                objects = writer.finish()
                return self._filled(writer.layout, writer.num_filled, objects, lease)
            odd: list[Any] = []
        except LayoutError:
            odd = writer.recover() + writer.refused
        except collate.TooSmall as error:
            needed_bytes, odd = error.num_bytes, writer.refused
        if not lease.is_whole:
            return "odd", None, needed_bytes, False
        odd.extend(iterator)
        self._status.show_no_sample()
        indices = [] if self._task.is_iterable else list(lease.index)
        indices = indices if len(indices) == len(odd) else []  # samples were skipped
        with self._guard():
            batch = default_collate(odd, indices, keeps_channels_last=is_last)
        written = payload.write(batch, buffer)
        return "payload", written, max(needed_bytes, written.num_bytes), False

    def _slot(self, lease: Lease) -> np.ndarray:
        mapping = self._connection.segment(lease.segment)
        return np.frombuffer(mapping, dtype=np.uint8, count=lease.slot_bytes, offset=lease.start)

    def _filled(
        self, layout: Layout, num_filled: int, objects: list[list[Any]], lease: Lease
    ) -> Loaded:
        number = self._layouts.get(layout)
        is_new = number is None
        if number is None:
            number = self._layouts[layout] = len(self._layouts)
        _, num_bytes = layout.offsets(lease.rows)
        content = (number, layout if is_new else None, num_filled, objects)
        return "fixed", content, num_bytes, False

    def _collate_freely(self, lease: Lease, samples: Any) -> Loaded:
        """Run the user's collate_fn on all samples. Its default_collate writes into the slot."""
        self._status.show_no_sample(runs_user_code=True)
        root = self._slot(lease)
        allocator = SlotAllocator(root)
        start_ns = now_ns()
        with collating_into(allocator), self._guard():
            position, randomness = lease.position, self._collate_randomness
            if randomness is not None and self._randomness is not None:
                randomness.snapshot(is_used=self._randomness.needs_seeding)
            batch = call_user(self._collate, samples, position, randomness, "collate_fn")
        self._recorder.collated(start_ns)
        written = payload.write(batch, root, allocator.used)
        alive = weakref.ref(root)
        allocator.buffer = None
        del batch, root, allocator, samples
        # If code in this worker kept a tensor in the slot, the slot must not be reused.
        return "payload", written, written.num_bytes, alive() is not None
