"""The epoch of a loader: where it begins, how far it has come, and the indices it takes.

    EpochState    epoch, start and what was drawn for it; turned once per epoch by the loader
    EpochIndices  what an iterator draws its batches of indices from: the loader's index sampler,
                  from the position where the epoch starts

An order of ours (:class:`penstock.order.samplers.Order`) begins anywhere at no cost. Any other
sampler is asked for its indices from the first one on, and those before the start are dropped: no
sample is loaded for them.
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import NoStopIteration
from penstock.order.keys import WORKER_STREAM, make_key
from penstock.order.samplers import Order
from penstock.user_objects import probe

Effect = Callable[[], None]


class EpochState:
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
        self.num_begun = 0
        """Tells iterators apart: only the last one begun counts what it delivers."""
        self.base_seed: int | None = seed
        self.base_epoch = 0
        self.shuffle_seed: int | None = None
        self.generator_state: str | None = None
        """Of the user's generator, before the sampler drew the epoch's order from it."""
        self.own_state: Any = None
        """What the sampler said of itself when the epoch was begun."""
        self.streams: dict[int, Any] = {}
        """What an iterable dataset said of itself after the last delivered batch, by worker."""
        self.next_worker = 0
        self._next_epoch = 0
        self._resumed: EpochPosition | None = None

    @property
    def key_epoch(self) -> int:
        """The epoch as randomness counts it: from where the base seed was drawn."""
        return self.epoch - self.base_epoch

    def set_epoch(self, epoch: int) -> None:
        """The next epoch to begin is this one: from its start, unless it was to be resumed."""
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self._next_epoch, self.is_over = epoch, True

    def resume(self, mark: EpochPosition) -> None:
        """The next epoch to begin is that of ``mark``, in the middle."""
        self._next_epoch, self._resumed, self.is_over = mark.epoch, mark, True

    def start_at(self, position: int) -> None:
        """The next epoch to begin starts here, wherever it was to be resumed."""
        self.resume(replace(self.upcoming(), position=position))

    def upcoming(self) -> EpochPosition:
        """Where the next epoch begins: at its start, or where it is resumed."""
        return self._resumed or EpochPosition(epoch=self._next_epoch, position=0)

    def begin_next(self, order: Order | None, sampler: Any) -> None:
        """Begin the next epoch. Called once before each is iterated.

        Args:
            order: Ours, if the indices come from one; else ``sampler`` may have a state of its own.
        """
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        self.num_begun += 1
        mark, self._resumed = self._resumed, None
        self.start, self.num_batches, self.is_over = 0, 0, False
        self.shuffle_seed = self.generator_state = None
        self.streams, self.next_worker = {}, 0
        if mark is not None:
            self.start, self.shuffle_seed = mark.position, mark.shuffle_seed
            self.generator_state = mark.generator_state
            self.streams, self.next_worker = dict(mark.streams), mark.next_worker
            if self.seed is None:
                self.base_seed, self.base_epoch = mark.base_seed, mark.base_epoch
        elif self.seed is None:
            self.base_seed = None
        if order is not None:
            order.set_epoch(self.epoch)
        elif mark is not None and mark.own_state is not None:
            sampler.load_state_dict(copy.deepcopy(mark.own_state))
        self.own_state = own_state_of(sampler) if order is None else None

    def settle_base(self, drawn: int) -> int:
        """The base seed of a new iterator: ``drawn`` by torch just now, unless it is known."""
        if self.base_seed is None:
            self.base_seed, self.base_epoch = drawn, self.epoch
        return self.base_seed

    def keep_base(self, base_seed: int) -> None:
        """The iterator goes on with persistent workers, and with the base seed that they have."""
        if self.base_seed is None:
            self.base_seed = base_seed

    def worker_seed(self, base_seed: int) -> int:
        """The base seed of workers whose generators run on: with a seed, another in each epoch.

        Where randomness belongs to the sample, the epoch is in its key instead.
        """
        if self.seed is None:  # drawn anew for each iterator
            return base_seed
        return make_key(WORKER_STREAM, self.seed, self.epoch)

    def note_stream(self, worker: int, state: Any, next_worker: int) -> None:
        """A batch of an iterable dataset was delivered, which then said this of itself."""
        self.streams[worker], self.next_worker = state, next_worker

    def mark(self, global_batch: int | None, end: int | None) -> EpochPosition:
        """Where the loader stands now: in the present epoch, or at the start of the next.

        Args:
            end: The position at which the epoch is over, where that is known.
        """
        position = self.start + self.num_batches * (global_batch or 1)
        if self.is_over or (end is not None and position >= end):
            return self.upcoming()
        return EpochPosition(
            epoch=self.epoch,
            position=position,
            base_seed=None if self.seed is not None else self.base_seed,
            base_epoch=0 if self.seed is not None else self.base_epoch,
            shuffle_seed=self.shuffle_seed,
            generator_state=self.generator_state,
            own_state=self.own_state,
            streams=dict(self.streams),
            next_worker=self.next_worker,
        )


class Progress:
    """Counts what was delivered of an epoch.

    Where batches are copied to a device ahead of time, a change waits until the batch that it
    belongs to is handed out.
    """

    def __init__(self, epoch_state: EpochState, *, is_deferred: bool) -> None:
        self._epoch_state = epoch_state
        self._is_deferred = is_deferred
        self._pending: list[Effect] = []
        self._num_failed = 0
        self.begin()

    def begin(self) -> None:
        """The loader has begun another epoch."""
        self._epoch_number = self._epoch_state.num_begun
        self._num_failed = 0
        self._pending.clear()

    @property
    def is_current(self) -> bool:
        """Is this still the epoch that the loader began last?"""
        return self._epoch_state.num_begun == self._epoch_number

    def count(self, num_batches: int) -> None:
        """Batches were handed out. Those that failed before them are over, too."""
        if self.is_current:
            self._epoch_state.num_batches += num_batches + self._num_failed
            self._num_failed = 0

    def count_failed(self) -> None:
        """A batch raised. A loop that ends there loads it again when it is resumed."""
        self._num_failed += 1

    def count_empty(self, num_batches: int = 1) -> None:
        """Batches of which nothing is left take their place in the epoch all the same."""
        state, number = self._epoch_state, self._epoch_number

        def count() -> None:
            if state.num_begun == number:
                state.num_batches += num_batches

        self._when_delivered(count)

    def note_stream(self, worker: int, state: Any, next_worker: int) -> None:
        """An iterable dataset told its state with the batch that is being taken."""
        note = self._epoch_state.note_stream
        self._when_delivered(lambda: note(worker, state, next_worker))

    def take_pending(self) -> list[Effect]:
        """The changes that belong to the batch that was taken last."""
        pending = self._pending.copy()
        self._pending.clear()
        return pending

    def _when_delivered(self, effect: Effect) -> None:
        if self._is_deferred:
            self._pending.append(effect)
        else:
            effect()


def own_state_of(owner: Any) -> Any:
    """The state that a sampler or dataset of the user's offers, as it is now; None: it has none."""
    if isinstance(owner, Order) or not has_own_state(owner):
        return None
    return copy.deepcopy(owner.state_dict())


def has_own_state(owner: Any) -> bool:
    """Can a sampler or dataset of the user's save its state and restore it?"""
    return all(callable(probe(owner, name)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, kw_only=True)
class EpochPosition:
    """A place to go on from; the seeds are those that were drawn where none was given.

    Args:
        own_state: What the sampler said of itself when the epoch was begun.
        streams: What an iterable dataset said of itself after its last batch, by worker.
        next_worker: Whose batch of it comes next.
    """

    epoch: int
    position: int
    base_seed: int | None = None
    base_epoch: int = 0
    shuffle_seed: int | None = None
    generator_state: str | None = None
    own_state: Any = None
    streams: dict[int, Any] = field(default_factory=dict)
    next_worker: int = 0


class _Noted:
    """What was drawn for one epoch; kept by the epoch's state while that epoch is current."""

    def __init__(self, epoch_state: EpochState) -> None:
        self._epoch_state = epoch_state
        self._num_begun = epoch_state.num_begun
        self.shuffle_seed = epoch_state.shuffle_seed
        self.generator_state = epoch_state.generator_state

    def keep(self, name: str, value: Any) -> None:
        if self._epoch_state.num_begun == self._num_begun:
            setattr(self._epoch_state, name, value)


SAMPLING = "the sampler or dataset.__len__"
"""Whose StopIteration it may be while indices are drawn."""


class EpochIndices:
    """The batches of indices of an epoch, from where the epoch starts.

    Args:
        indices: The loader's index sampler: a batch sampler, or a sampler without batching.
        rows: Samples of one rank in a batch; None without batching or where it varies.
        is_batched: Is what the indices give a batch of them, and not one?
        is_endless: The indices of an iterable dataset say nothing; there is none to drop.
    """

    def __init__(
        self,
        indices: Any,
        epoch_state: EpochState,
        rows: int | None,
        *,
        is_batched: bool,
        is_endless: bool = False,
    ) -> None:
        self._indices = indices
        self._epoch_state = epoch_state
        self._rows = rows
        self._is_batched = is_batched
        self._is_endless = is_endless
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

    @property
    def drawing(self) -> Any:
        """torch's RandomSampler, if the indices come from one: what it draws is noted."""
        from torch.utils.data import RandomSampler

        sampler = getattr(self._indices, "sampler", self._indices)
        return sampler if type(sampler) is RandomSampler else None

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        # Read now: by the first batch another iterator may have begun an epoch.
        start, order = self._epoch_state.start, self.order
        if self._is_endless:
            return iter(self._indices)
        if order is None:
            return self._without(self._drawn(), start // (self._rows or 1))
        rest = order.starting_at(start)
        if order is self._indices:
            return iter(rest)
        return iter(type(self._indices)(rest, self._indices.batch_size, self._indices.drop_last))

    def _without(self, batches: Iterator[Any], num_over: int) -> Iterator[Any]:
        """What is left after ``num_over``, whose samples are counted: a batch may be short."""
        self._num_dropped = 0
        try:
            for batch in itertools.islice(batches, num_over):
                self._num_dropped += len(list(batch)) if self._is_batched else 1
            yield from batches
        except RuntimeError as error:
            if not isinstance(error.__cause__, StopIteration):
                raise
            # Python's own message names neither: "generator raised StopIteration".
            raise NoStopIteration.error_for(SAMPLING) from error.__cause__

    def _drawn(self) -> Iterator[Any]:
        """The user's own sampler; what torch's RandomSampler draws for itself is noted."""
        sampler = self.drawing
        if sampler is None:
            return iter(self._indices)
        noted = _Noted(self._epoch_state)
        if sampler.generator is None:
            return self._shuffled(sampler, noted)
        return self._shuffled_by(sampler.generator, noted)

    def _shuffled_by(self, generator: Any, noted: _Noted) -> Iterator[Any]:
        noted.keep("generator_state", _set_or_note(generator, noted.generator_state))
        yield from self._indices

    def _shuffled(self, sampler: Any, noted: _Noted) -> Iterator[Any]:
        import torch

        seed = noted.shuffle_seed
        if seed is None:  # exactly as RandomSampler does it
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        noted.keep("shuffle_seed", seed)
        generator = torch.Generator()
        generator.manual_seed(seed)
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
        start, order = self._epoch_state.start, self.order
        if order is None:
            return lambda place: self._num_dropped + place
        if order.world_size == 1:
            return lambda place: start + place
        return order.starting_at(start).global_position


def fits_generator(generator: Any, known: Any) -> bool:
    """Is ``known`` what a generator of this kind says of itself, and not cut off?"""
    try:
        num_bytes = len(base64.b64decode(known, validate=True))
        return bool(num_bytes == generator.get_state().numel())
    except (TypeError, ValueError):
        return False


def _set_or_note(generator: Any, known: str | None) -> str:
    """Put the user's generator into a state that is known, or tell the one it is in."""
    import torch

    if known is None:
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(known)), dtype=torch.uint8))
    return known
