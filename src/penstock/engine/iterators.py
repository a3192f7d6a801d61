"""What an iterator over a loader is asked to do, and what all kinds of them share.

They derive from torch's own base iterator, which draws the base seed, holds the sampler's iterator
and warns about wrong lengths exactly as PyTorch does. :mod:`penstock.engine.inline` loads in the
caller's own thread, :mod:`penstock.engine.pooled` with workers, :mod:`penstock.engine.audition`
begins with the one and goes on with whichever is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils.data import dataloader as torch_loader

from penstock.engine.recovery import Limits
from penstock.engine.tolerance import OnError
from penstock.order.course import Course, Walk


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
    obeys_init_seed: bool = True
    """Is a seed that worker_init_fn gives to torch kept, though bits then depend on workers?"""
    limits: Limits = field(default_factory=Limits)
    """When a worker that is lost ends the epoch."""
    on_error: OnError = "raise"
    num_indices: int | None = None
    """Where substitutes come from: see :class:`penstock.engine.tolerance.Careful`."""
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
            self._setup.on_end(self._num_yielded)
            raise
        if self._course.num_turns == self._turn_number:
            self._course.num_batches += 1
        return batch

    def _next_data(self) -> Any:
        return self._next_batch()

    def _next_batch(self) -> Any:
        raise AssertionError("each kind of iterator has its own")

    def _count_empty(self, num_batches: int = 1) -> None:
        """Batches of which nothing is left take their place in the epoch all the same."""
        if self._course.num_turns == self._turn_number:
            self._course.num_batches += num_batches

    def _finished(self, batch: Any) -> Any:
        if self._pin_memory:
            from torch.utils.data._utils.pin_memory import pin_memory

            return pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return batch
