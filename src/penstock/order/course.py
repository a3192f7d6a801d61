"""Where does an epoch begin, and how far has it come? The course that a loader's indices take.

    Course   epoch, start and what was drawn for it; turned once per epoch by the loader
    Walk     what an iterator draws its batches of indices from: the loader's own index sampler,
             begun at the course's start

An order of ours (:class:`penstock.order.sampling.Order`) begins anywhere at no cost. Any other
sampler is asked for its indices from the first one on, and those before the start are dropped: no
sample is loaded for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.order.sampling import Order


class Course:
    """Epochs of one loader, one after the other, and how far the present one has come.

    Args:
        seed: The loader's; None: drawn anew for each iterator, where torch draws its base seed.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.epoch = -1
        self.start = 0
        """Positions of the epoch that were over when it was begun, counted over all ranks."""
        self.num_batches = 0
        """Batches that were delivered since."""
        self.is_over = True
        self.base_seed: int | None = seed
        self.base_epoch = 0
        self.shuffle_seed: int | None = None
        self._next_epoch = 0
        self._resumed: Mark | None = None

    @property
    def key_epoch(self) -> int:
        """The epoch as randomness counts it: from where the base seed was drawn."""
        return self.epoch - self.base_epoch

    def set_epoch(self, epoch: int) -> None:
        """The next epoch to begin is this one: from its start, unless it was to be resumed."""
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self._next_epoch, self.is_over = epoch, True

    def resume(self, mark: Mark) -> None:
        """The next epoch to begin is that of ``mark``, in the middle."""
        self._next_epoch, self._resumed, self.is_over = mark.epoch, mark, True

    def turn(self, order: Order | None) -> None:
        """Begin the next epoch. Called once before each is iterated."""
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        mark, self._resumed = self._resumed, None
        self.start, self.num_batches, self.is_over = 0, 0, False
        self.shuffle_seed = None
        if mark is not None:
            self.start, self.shuffle_seed = mark.position, mark.shuffle_seed
            if self.seed is None:
                self.base_seed, self.base_epoch = mark.base_seed, mark.base_epoch
        elif self.seed is None:
            self.base_seed = None
        if order is not None:
            order.set_epoch(self.epoch)

    def settle_base(self, drawn: int) -> int:
        """The base seed of a new iterator: ``drawn`` by torch just now, unless it is known."""
        if self.base_seed is None:
            self.base_seed, self.base_epoch = drawn, self.epoch
        return self.base_seed

    def mark(self, global_batch: int | None, end: int | None) -> Mark:
        """Where the loader stands now: in the present epoch, or at the start of the next.

        Args:
            end: The position at which the epoch is over, where that is known.
        """
        position = self.start + self.num_batches * (global_batch or 1)
        if self.is_over or (end is not None and position >= end):
            return self._resumed or Mark(epoch=self._next_epoch, position=0)
        return Mark(
            epoch=self.epoch,
            position=position,
            base_seed=None if self.seed is not None else self.base_seed,
            base_epoch=0 if self.seed is not None else self.base_epoch,
            shuffle_seed=self.shuffle_seed,
        )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place to go on from; the seeds are those that were drawn where none was given."""

    epoch: int
    position: int
    base_seed: int | None = None
    base_epoch: int = 0
    shuffle_seed: int | None = None


class Walk:
    """The batches of indices of an epoch, from the course's start on.

    Args:
        indices: The loader's index sampler: a batch sampler, or a sampler without batching.
        rows: Samples of one rank in a batch; None without batching or where it varies.
        is_batched: Is what the indices give a batch of them, and not one?
    """

    def __init__(self, indices: Any, course: Course, rows: int | None, *, is_batched: bool) -> None:
        self._indices = indices
        self._course = course
        self._rows = rows
        self._is_batched = is_batched
        self._num_dropped = 0

    @property
    def order(self) -> Order | None:
        """The order of ours that the indices come from, if it is one.

        A batch sampler of the user's own may do anything with it, so that one is replayed.
        """
        from torch.utils.data import BatchSampler

        is_plain = type(self._indices) is BatchSampler
        sampler = self._indices.sampler if is_plain else self._indices
        return sampler if isinstance(sampler, Order) else None

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        # The course is read now: another iterator may turn it before this one is first asked.
        start, order = self._course.start, self.order
        if order is None:
            drawn = self._drawn(self._course.shuffle_seed)
            return self._without(drawn, start // (self._rows or 1))
        rest = order.starting_at(start)
        if order is self._indices:
            return iter(rest)
        return iter(type(self._indices)(rest, self._indices.batch_size, self._indices.drop_last))

    def _without(self, batches: Iterator[Any], num_over: int) -> Iterator[Any]:
        """What is left after ``num_over``, whose samples are counted: a batch may be short."""
        self._num_dropped = 0
        for batch in itertools.islice(batches, num_over):
            self._num_dropped += len(list(batch)) if self._is_batched else 1
        yield from batches

    def _drawn(self, shuffle_seed: int | None) -> Iterator[Any]:
        """The user's own sampler; what torch's RandomSampler draws for itself is noted."""
        import torch
        from torch.utils.data import RandomSampler

        sampler = getattr(self._indices, "sampler", self._indices)
        if type(sampler) is not RandomSampler or sampler.generator is not None:
            yield from self._indices
            return
        if shuffle_seed is None:  # exactly as RandomSampler does it
            shuffle_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self._course.shuffle_seed = shuffle_seed
        generator = torch.Generator()
        generator.manual_seed(shuffle_seed)
        sampler.generator = generator
        try:
            batches = iter(self._indices)
            first = next(batches, None)  # it takes the generator when it is first asked
        finally:
            sampler.generator = None
        if first is not None:
            yield first
            yield from batches

    def positions(self) -> Callable[[int], int]:
        """From a rank's place in what is walked to the position in the epoch.

        Called with places that were walked already, so that what was dropped is known.
        """
        start, order = self._course.start, self.order
        if order is None:
            return lambda place: self._num_dropped + place
        if order.world_size == 1:
            return lambda place: start + place
        return order.starting_at(start).global_position
