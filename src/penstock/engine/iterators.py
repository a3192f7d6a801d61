"""The two iterators behind a loader: with workers (processes or threads), and inline.

Both derive from torch's own base iterator, which draws the base seed, holds the sampler's iterator
and warns about wrong lengths exactly as PyTorch does.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader

from penstock.engine.batch import collate
from penstock.engine.batch.fetch import (
    Exhausted,
    Stream,
    call_user,
    fetch_map,
    getter,
    takes_batches,
)
from penstock.engine.batch.gather import Gatherer, find_gatherer
from penstock.engine.batch.layout import OddSample
from penstock.engine.delivery import Delivery
from penstock.engine.memory import PrivateFile, SharedFile
from penstock.engine.messages import Task
from penstock.engine.pools import Pool, ProcessPool, ThreadPool, control_cells
from penstock.engine.slots import Ring
from penstock.engine.start.launcher import Launcher
from penstock.engine.travel.parcel import Serialised
from penstock.errors import StartFailed
from penstock.order.course import Course, Walk
from penstock.order.foreign import OwnGenerators
from penstock.order.generators import preserved_generators
from penstock.order.randomness import COLLATE_STREAM, SampleRandomness
from penstock.order.reads import watching_reads


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the loader asks of the engine, as plain values."""

    pool: str
    start_method: str | None
    num_workers: int
    depth: int | None
    per_sample: bool
    in_order: bool
    tell: Callable[[str], None] = lambda note: None
    """Takes notes about what was done where something is not as usual, for the user's plan."""
    course: Course | None = None
    """Epoch, seeds and progress, shared with the loader; None: this iterator counts for itself."""
    turn: Callable[[], None] = lambda: None
    """Turns the course to the next epoch."""
    learn: Callable[[int], None] = lambda batch_bytes: None
    """Told once how much memory a batch needs."""


def _max_held_bytes() -> int:
    """How much of the machine's free memory batches that the user keeps may occupy in the ring."""
    return int(psutil.virtual_memory().available) // 4


class _Iterator(torch_loader._BaseDataLoaderIter):
    """What both kinds share: pinning, and PyTorch's face."""

    _pin_memory: bool
    _base_seed: int
    _index_sampler: Any

    def _enter(self, setup: Setup) -> None:
        """Take over what the loader asks, after torch's own beginning."""
        self._setup = setup
        self._course = setup.course or Course(None)
        self._base_seed = self._course.settle_base(self._base_seed)
        self._turn_number = self._course.num_turns

    def _position_of(self) -> Callable[[int], int] | None:
        walk = self._index_sampler
        return walk.positions() if isinstance(walk, Walk) else None

    def __next__(self) -> Any:
        # torch's own __next__ marks the batch for its profiler and warns about
        # wrong lengths; both only where somebody can see it.
        try:
            if (
                getattr(self, "_IterableDataset_len_called", None) is not None
                or _profiler_enabled()
            ):
                batch: Any = super().__next__()
            else:
                batch = self._next_batch()
                self._num_yielded += 1
        except StopIteration:
            if self._course.num_turns == self._turn_number:
                self._course.is_over = True
            raise
        if self._course.num_turns == self._turn_number:
            self._course.num_batches += 1
        return batch

    def _next_data(self) -> Any:
        return self._next_batch()

    def _next_batch(self) -> Any:
        raise AssertionError("each kind of iterator has its own")

    def _finished(self, batch: Any) -> Any:
        if self._pin_memory:
            from torch.utils.data._utils.pin_memory import pin_memory

            return pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return batch


class InlineIterator(_Iterator):
    """No workers: the caller's own thread loads each batch when it is asked for."""

    def __init__(self, loader: Any, setup: Setup) -> None:
        super().__init__(loader)
        self._enter(setup)
        self._randomness: SampleRandomness | None = None
        self._collate_randomness: SampleRandomness | None = None
        if setup.per_sample:
            own = OwnGenerators(self._dataset)
            self._randomness = SampleRandomness(self._base_seed, also_set=own.set if own else None)
            for one in own.found:
                if not one.can_be_set:
                    setup.tell(f"{one}: its draws depend on who loads the sample")
            self._collate_randomness = SampleRandomness(self._base_seed ^ COLLATE_STREAM)
        self._collates_by_default = collate.is_default_collate(self._collate_fn)
        self._gatherer: Gatherer | None = None
        if self._auto_collation and self._collates_by_default:
            self._gatherer = find_gatherer(self._dataset)
        can_batch = takes_batches(self._dataset)
        self._is_plain = self._collates_by_default and self._auto_collation and not can_batch
        self._ring: Ring | None = None
        if self._gatherer is not None:
            self._ring = Ring(PrivateFile(), max_held_bytes=_max_held_bytes())
        self._begin()

    def _begin(self) -> None:
        self._place = 0
        self._position_at = self._position_of()
        if self._randomness is not None:
            assert self._collate_randomness is not None
            self._randomness.begin(self._course.key_epoch)
            self._collate_randomness.begin(self._course.key_epoch)
        self._stream: Stream | None = None
        if self._dataset_kind == torch_loader._DatasetKind.Iterable:
            if 0 in self._course.streams:  # resumed: it goes on by itself
                dataset: Any = self._dataset
                dataset.load_state_dict(self._course.streams[0])
            self._stream = Stream(
                self._dataset, auto_collation=self._auto_collation, drop_last=self._drop_last
            )

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._setup.turn()
        self._turn_number = self._course.num_turns
        super()._reset(loader, first_iter)
        self._begin()

    def _advance(self, num_samples: int) -> int:
        """The position of the next samples, which are taken now."""
        place, self._place = self._place, self._place + num_samples
        self._position = place if self._position_at is None else self._position_at(place)
        return self._position

    def _shutdown_workers(self) -> None:
        """There are none; others call this by name."""

    def _next_batch(self) -> Any:
        index = next(self._sampler_iter)
        if self._gatherer is not None and self._ring is not None:
            with suppress(OddSample):  # slices as indices, say: the usual way
                return self._finished(self._gatherer.gather(index, self._ring))
        if self._stream is not None:
            try:
                samples = self._stream.fetch(index)
            except Exhausted:
                raise StopIteration from None
        elif self._randomness is not None and self._randomness.is_silent and self._is_plain:
            position = self._advance(len(index))
            samples = self._randomness.run_apart(getter(self._dataset), index, position)
        elif self._randomness is not None:
            with preserved_generators(), watching_reads():
                samples = self._fetch(index)
                if not self._collates_by_default:
                    return self._finished(self._collate(samples))
        else:
            samples = self._fetch(index)
        if self._collates_by_default and self._auto_collation:
            indices = [] if self._stream is not None else list(index)
            return self._finished(collate.default_collate(samples, indices))
        return self._finished(self._collate_fn(samples))

    def _collate(self, samples: Any) -> Any:
        if self._collate_randomness is not None and self._randomness is not None:
            self._collate_randomness.look(is_used=self._randomness.has_drawn)
        return call_user(self._collate_fn, samples, self._position, self._collate_randomness)

    def _fetch(self, index: Any) -> Any:
        if not self._auto_collation:
            position = self._advance(1)
            if self._randomness is not None:
                self._randomness.look()
            return call_user(getter(self._dataset), index, position, self._randomness)
        return fetch_map(self._dataset, index, self._advance(len(index)), self._randomness)


class PooledIterator(_Iterator):
    """Workers load ahead; this side puts batches together and keeps the order."""

    def __init__(self, loader: Any, setup: Setup) -> None:
        super().__init__(loader)
        self._enter(setup)
        self._prepare()
        self._start(loader)
        self._reset(loader, first_iter=True)

    @classmethod
    def continuing(
        cls, begun: InlineIterator, loader: Any, setup: Setup, serialised: Serialised | None
    ) -> PooledIterator:
        """Workers for the rest of an epoch begun inline: same seed, order and positions."""
        self = cls.__new__(cls)
        vars(self).update(vars(begun))
        self._setup = setup
        self._prepare()
        self._start(loader, serialised)
        assert self._delivery is not None
        self._delivery.start_epoch(
            self._course.key_epoch,
            self._sampler_iter,
            place=begun._place,
            position_of=self._position_of(),
        )
        return self

    def _prepare(self) -> None:
        self._delivery: Delivery | None = None
        self._turn = threading.Lock()
        self._owner = os.getpid()
        self._workers: list[Any] = []
        self._has_learnt = False

    def _start(self, loader: Any, serialised: Serialised | None = None) -> None:
        """Start the workers and what delivers their batches."""
        setup = self._setup
        is_iterable = self._dataset_kind == torch_loader._DatasetKind.Iterable
        task = Task(
            is_iterable=is_iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            per_sample=setup.per_sample and not is_iterable,
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
        )
        memory = SharedFile.create()
        if memory.note:
            setup.tell(memory.note)
        cells = control_cells(memory)
        pool = self._make_pool(travellers(self, loader), task, memory, cells, serialised)
        self._delivery = Delivery(
            pool=pool,
            ring=Ring(memory, max_held_bytes=_max_held_bytes(), tell=setup.tell),
            cells=cells,
            task=task,
            depth=setup.depth,
            can_split=self._can_split(task),
            splits_first=setup.start_method != "spawn",
            in_turn=not task.per_sample,
            in_order=setup.in_order,
            timeout_s=self._timeout,
            tell=setup.tell,
            on_state=self._course.note_stream,
        )
        self._workers = pool.processes

    def _can_split(self, task: Task) -> bool:
        return (
            task.per_sample
            and task.auto_collation
            and collate.is_default_collate(self._collate_fn)
            and not takes_batches(self._dataset)
        )

    def _make_pool(
        self,
        objects: dict[str, Any],
        task: Task,
        memory: SharedFile,
        cells: memoryview,
        serialised: Serialised | None,
    ) -> Pool:
        setup = self._setup
        if setup.pool == "thread":
            return ThreadPool(
                num_workers=setup.num_workers,
                task=task,
                objects=objects,
                memory=memory,
                cells=cells,
            )
        assert setup.start_method is not None
        launcher = Launcher(
            method=setup.start_method,
            task=task,
            num_workers=setup.num_workers,
            objects=objects,
            memory=memory,
            serialised=serialised,
        )
        for note in launcher.notes:
            setup.tell(note)
        return ProcessPool(launcher, setup.num_workers, cells)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._setup.turn()
            self._turn_number = self._course.num_turns
        super()._reset(loader, first_iter)
        if self._delivery is None or self._delivery.is_closed:
            self._start(loader)  # persistent workers after a failure: a new crew
        assert self._delivery is not None
        self._delivery.start_epoch(
            self._course.key_epoch,
            self._sampler_iter,
            shared_seed=self._shared_seed,
            first_worker=self._course.next_worker,
            position_of=self._position_of(),
        )

    def _next_batch(self) -> Any:
        assert self._delivery is not None
        if os.getpid() != self._owner:
            raise StartFailed(
                f"this iterator belongs to process {self._owner}, which forked us (pid "
                f"{os.getpid()}): its workers answer to that process alone",
                remedy="iter(loader) in the forked process",
            )
        with self._turn:  # several threads may share one iterator
            try:
                batch = self._delivery.next()
                if not self._has_learnt:
                    self._has_learnt = True
                    self._setup.learn(self._delivery.batch_bytes)
            except StopIteration:
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise
        return self._finished(batch)

    def _shutdown_workers(self) -> None:
        """Stop the workers now. Others (Ultralytics among them) call this by name."""
        if self._delivery is not None:
            self._delivery.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the exit handlers have stopped the workers by then
            self._shutdown_workers()


def travellers(iterator: Any, loader: Any) -> dict[str, Any]:
    """What workers need of the user's, by the names that error messages use."""
    init_fn = loader.worker_init_fn
    if isinstance(iterator._dataset, (IterDataPipe, MapDataPipe)):
        init_fn = functools.partial(
            torch_loader._sharding_worker_init_fn, init_fn, iterator._world_size, iterator._rank
        )
    return {
        "dataset": iterator._dataset,
        "collate_fn": iterator._collate_fn,
        "worker_init_fn": init_fn,
        "collators": collate.custom_collators(),
        "streams": dict(iterator._course.streams),
    }
