"""What an iterator over a loader is asked to do, and what all kinds of them share.

They derive from torch's own base iterator, which draws the base seed, holds the sampler's iterator
and warns about wrong lengths exactly as PyTorch does. :mod:`penstock.engine.parent.inline_iterator`
loads in the caller's own thread, :mod:`penstock.engine.parent.worker_iterator` with workers,
:mod:`penstock.engine.parent.auto_workers` begins with the one and goes on with whichever is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils.data import dataloader as torch_loader

from penstock.engine.loading.bad_samples import OnError
from penstock.engine.memory.pinned_ring import Pinner
from penstock.engine.parent.restarts import RestartLimits
from penstock.errors import DeviceFailed
from penstock.order.epoch_state import EpochIndices, EpochState
from penstock.trace.record import now_ns
from penstock.trace.recorder import Recorder

Effect = Callable[[], None]


class Prefetcher(Protocol):
    """Brings batches to where they are used, some of them ahead of time."""

    def next(
        self, take: Callable[[], tuple[Any, list[Effect]]], is_ready: Callable[[], bool]
    ) -> Any:
        """The next batch. ``take`` loads one; ``is_ready``: without waiting.

        What taking a batch changed in the loader's counts comes with it, and is to be done when
        that batch is handed out.
        """

    def reset(self) -> None:
        """Another epoch begins: forget what is under way."""


class GpuWatcher(Protocol):
    """Notes what a device does while batches are handed out."""

    def begin_step(self, batch: int) -> None:
        """A batch is handed out."""

    def end_step(self) -> None:
        """Another one is asked for."""

    def end_pass(self) -> None:
        """The epoch is over."""

    def reset(self) -> None:
        """Another epoch begins."""


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
    epoch_state: EpochState | None = None
    """Epoch, seeds and progress, shared with the loader; None: this iterator counts for itself."""
    turn: Callable[[], None] = lambda: None
    """Turns the course to the next epoch."""
    learn: Callable[[int], None] = lambda batch_bytes: None
    """Told once how much memory a batch needs."""
    obeys_init_seed: bool = True
    """Is a seed that worker_init_fn gives to torch kept, though bits then depend on workers?"""
    pinner: Pinner | None = None
    """Pins the memory of batches; None: they lie in ordinary memory."""
    make_prefetcher: Callable[[Any], Prefetcher] | None = None
    """Makes what brings batches to a device; None: they are handed out as they are."""
    make_watch: Callable[..., GpuWatcher] | None = None
    """Makes what notes when a device copies and computes; None: no device is known here."""
    log: Recorder = field(default_factory=Recorder)
    """Takes notes of what is done when, for the timeline."""
    limits: RestartLimits = field(default_factory=RestartLimits)
    """When a worker that is lost ends the epoch."""
    on_error: OnError = "raise"
    num_indices: int | None = None
    """Where substitutes come from: see
    :class:`penstock.engine.loading.bad_samples.BadSamplePolicy`."""
    poison: dict[Any, Exception] = field(default_factory=dict)
    on_bad: Callable[[list[Any]], None] = lambda found: None
    on_poison: Callable[[Any, Exception], None] = lambda index, error: None
    on_restart: Callable[[], None] = lambda: None
    on_end: Callable[[int], None] = lambda num_batches: None
    """Told at the end of an epoch how many batches were delivered; may raise."""


def max_held_bytes() -> int:
    """How much of the machine's free memory batches that the user keeps may occupy in the ring."""
    return int(psutil.virtual_memory().available) // 4


class LoaderIterator(torch_loader._BaseDataLoaderIter):
    """What both kinds share: pinning, and PyTorch's face."""

    _pin_memory: bool
    _base_seed: int
    _index_sampler: Any

    def _enter(self, setup: Setup) -> None:
        """Take over what the loader asks, after torch's own beginning."""
        self._setup = setup
        self._epoch_state = setup.epoch_state or EpochState(None)
        self._base_seed = self._epoch_state.settle_base(self._base_seed)
        self._turn_number = self._epoch_state.num_turns
        self._watch: GpuWatcher | None = None
        if setup.make_watch is not None and setup.log.ring is not None:
            self._watch = setup.make_watch(setup.log.on_device, is_asked=setup.log.keeps_all)
        self._prefetcher = (
            None if setup.make_prefetcher is None else setup.make_prefetcher(self._watch)
        )
        self._returned_ns = 0
        self._effects: list[Effect] = []
        """Of the batch that is being taken. One list, shared by those that take over from each
        other."""
        self._lost: DeviceFailed | None = None

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        prefetcher: Prefetcher | None = getattr(
            self, "_prefetcher", None
        )  # torch resets before we enter
        if prefetcher is not None:
            prefetcher.reset()
            self._effects.clear()
            self._lost = None
        watch: GpuWatcher | None = getattr(self, "_watch", None)
        if watch is not None:
            watch.reset()
        self._returned_ns = 0
        super()._reset(loader, first_iter)

    def _position_of(self) -> Callable[[int], int] | None:
        walk = self._index_sampler
        return walk.positions() if isinstance(walk, EpochIndices) else None

    def __next__(self) -> Any:
        log, watch = self._setup.log, self._watch
        start_ns = log.begin_batch()
        if watch is not None:
            watch.end_step()
        # torch's own __next__ marks the batch for its profiler and warns about
        # wrong lengths; both only where somebody can see it.
        try:
            if (
                getattr(self, "_IterableDataset_len_called", None) is not None
                or _profiler_enabled()
            ):
                batch: Any = super().__next__()
            else:
                batch = self._next_data()
                self._num_yielded += 1
        except StopIteration:
            if self._epoch_state.num_turns == self._turn_number:
                self._epoch_state.is_over = True
            if watch is not None:
                watch.end_pass()
            self._setup.on_end(self._num_yielded)
            log.end_pass()
            raise
        self._count(1)
        self._returned_ns = log.end_batch(
            start_ns,
            self._returned_ns,
            self._num_yielded - 1,
            has_prefetcher=self._prefetcher is not None,
        )
        if watch is not None:
            watch.begin_step(self._num_yielded - 1)
        return batch

    def _next_data(self) -> Any:
        if self._prefetcher is None:
            return self._next_batch()
        if self._lost is not None:
            raise self._lost
        try:
            return self._prefetcher.next(self._take, self._is_ready)
        except DeviceFailed as error:
            self._lost = error  # or the next call would look like the end of the epoch
            self._shutdown_workers()
            raise
        except Exception:  # in its turn: nothing that was taken before it is left
            for effect in self._effects:  # of what came after the last batch
                effect()
            self._effects.clear()
            raise

    def _take(self) -> tuple[Any, list[Effect]]:
        start_ns = now_ns()
        batch = self._next_batch()
        self._setup.log.taken(start_ns)
        effects = self._effects.copy()
        self._effects.clear()
        return batch, effects

    def _next_batch(self) -> Any:
        raise AssertionError("each kind of iterator has its own")

    def _is_ready(self) -> bool:
        """Could another batch be taken now, without keeping the one before it waiting?"""
        return False

    def _shutdown_workers(self) -> None:
        raise AssertionError("each kind of iterator has its own")

    def _when_delivered(self, effect: Effect) -> None:
        """Do this when the batch that is being taken is handed out."""
        if self._prefetcher is None:
            effect()
        else:
            self._effects.append(effect)

    # What is done later holds the course and not us: we hold the courier, which holds it, and
    # workers of an iterator that nobody keeps would wait for the garbage collector.

    def _count_empty(self, num_batches: int = 1) -> None:
        """Batches of which nothing is left take their place in the epoch all the same."""
        epoch_state, turn_number = self._epoch_state, self._turn_number
        self._when_delivered(lambda: _count(epoch_state, turn_number, num_batches))

    def _count(self, num_batches: int) -> None:
        _count(self._epoch_state, self._turn_number, num_batches)

    def _note_stream(self, worker: int, state: Any, next_worker: int) -> None:
        epoch_state = self._epoch_state
        self._when_delivered(lambda: epoch_state.note_stream(worker, state, next_worker))

    def _finished(self, batch: Any, *, is_pinned: bool = False) -> Any:
        if not is_pinned and (self._pin_memory or self._setup.pinner is not None):
            from torch.utils.data._utils.pin_memory import pin_memory

            return pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return batch


def _count(epoch_state: EpochState, turn_number: int, num_batches: int) -> None:
    """Unless another epoch has begun."""
    if epoch_state.num_turns == turn_number:
        epoch_state.num_batches += num_batches
