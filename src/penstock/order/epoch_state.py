"""The epoch of a loader: its start, its progress, and its batches of indices.

    EpochState    epoch, start and the seeds drawn for it; advanced once per epoch by the loader
    EpochIndices  the batches of indices of an iterator: the loader's index sampler, from the
                  position where the epoch starts

A Penstock order (:class:`penstock.order.base_order.Order`) can start anywhere at no cost. Any other
sampler is iterated from its first index, and the indices before the start are dropped. No sample is
loaded for them.
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import NoStopIteration
from penstock.named_tuple import NamedTuple
from penstock.order.base_order import Order, ShardedOrder
from penstock.order.keys import WORKER_STREAM, make_key
from penstock.user_objects import probe

Effect = Callable[[], None]


class EpochState:
    """The epochs of one loader, and the progress of the current one.

    Args:
        seed: The loader's seed. None: drawn for each iterator, where torch draws its base seed.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.epoch = -1
        self.start = 0
        """Number of positions skipped at the start of the epoch, counted over all ranks."""
        self.num_batches = 0
        """Number of batches delivered since the start."""
        self.is_over = True
        self.num_begun = 0
        """Identifies iterators. Only the most recent one counts its deliveries."""
        self.base_seed: int | None = seed
        self.base_epoch = 0
        self.shuffle_seed: int | None = None
        self.generator_state: str | None = None
        """State of the user's generator before the sampler drew the epoch's order from it."""
        self.own_state: Any = None
        """The sampler's ``state_dict()`` at the beginning of the epoch."""
        self.streams: dict[int, Any] = {}
        """State of an iterable dataset after the last delivered batch, by worker."""
        self.next_worker = 0
        self.ended: set[int] = set()
        """Workers whose part of an iterable dataset has ended."""
        self.has_loaded_state = False
        """True if a state was loaded into the iterable dataset in this process."""
        self.has_compared = False
        """True if the first samples of an iterable dataset were compared between processes."""
        self.request_batch: Callable[[Any], None] | None = None
        """Called with each batch of indices before it is loaded, to have its data fetched."""
        self._next_epoch = 0
        self._resumed: EpochPosition | None = None

    @property
    def key_epoch(self) -> int:
        """The epoch number used for randomness, counted from the epoch of the base seed."""
        return self.epoch - self.base_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It begins at position 0, unless a position in it is to be resumed."""
        if self._resumed is not None and self._resumed.epoch != epoch:
            self._resumed = None
        self._next_epoch, self.is_over = epoch, True

    def resume(self, mark: EpochPosition) -> None:
        """Make the next epoch begin at ``mark``, a position in the middle of an epoch."""
        self._next_epoch, self._resumed, self.is_over = mark.epoch, mark, True

    def start_at(self, position: int) -> None:
        """Make the next epoch start at ``position``. Overrides the position of a resume."""
        self.resume(self.upcoming()._replace(position=position))

    def upcoming(self) -> EpochPosition:
        """Return where the next epoch begins: at position 0, or at the position to resume from."""
        return self._resumed or EpochPosition(epoch=self._next_epoch, position=0)

    def begin_next(self, order: Order | None, sampler: Any) -> None:
        """Begin the next epoch. Called once before each epoch is iterated.

        Args:
            order: The Penstock order that the indices come from. If None, ``sampler`` can have its
                own state.
        """
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        self.num_begun += 1
        mark, self._resumed = self._resumed, None
        self.start, self.num_batches, self.is_over = 0, 0, False
        self.shuffle_seed = self.generator_state = None
        self.streams, self.next_worker, self.ended = {}, 0, set()
        if mark is not None:
            self.start, self.shuffle_seed = mark.position, mark.shuffle_seed
            self.generator_state = mark.generator_state
            self.streams, self.next_worker = dict(mark.streams or {}), mark.next_worker
            self.ended = set(mark.ended)
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
        """Return the base seed of a new iterator: ``drawn`` by torch, unless already set."""
        if self.base_seed is None:
            self.base_seed, self.base_epoch = drawn, self.epoch
        return self.base_seed

    def keep_base(self, base_seed: int) -> None:
        """Record that persistent workers continue with their base seed."""
        if self.base_seed is None:
            self.base_seed = base_seed

    def worker_seed(self, base_seed: int) -> int:
        """Return the base seed of workers with ``randomness="worker"``.

        With a seed, it differs in each epoch. Where randomness belongs to the sample, the epoch is
        in the sample's key instead.
        """
        if self.seed is None:  # drawn for each iterator
            return base_seed
        return make_key(WORKER_STREAM, self.seed, self.epoch)

    def note_stream(self, worker: int, state: Any, next_worker: int) -> None:
        """Record the state of an iterable dataset after a delivered batch."""
        self.streams[worker], self.next_worker = state, next_worker

    def note_end(self, worker: int) -> None:
        """Record that a worker's part of an iterable dataset has ended."""
        self.ended.add(worker)

    def mark(self, global_batch: int | None, end: int | None) -> EpochPosition:
        """Return the loader's position: in the current epoch, or at the start of the next.

        Args:
            end: The position at which the epoch ends, if known.
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
            ended=tuple(sorted(self.ended)),
        )


class Progress:
    """Counts the delivered batches of an epoch.

    Where batches are copied to a device ahead of time, a change is deferred until its batch is
    delivered.
    """

    def __init__(self, epoch_state: EpochState, *, is_deferred: bool) -> None:
        self._epoch_state = epoch_state
        self._is_deferred = is_deferred
        self._pending: list[Effect] = []
        self._num_failed = 0
        self.begin()

    def begin(self) -> None:
        """Reset at the beginning of an epoch."""
        self._epoch_number = self._epoch_state.num_begun
        self._num_failed = 0
        self._pending.clear()

    @property
    def is_current(self) -> bool:
        """True if the loader has not begun a later epoch."""
        return self._epoch_state.num_begun == self._epoch_number

    def count(self, num_batches: int) -> None:
        """Count delivered batches, and the failed batches before them."""
        state = self._epoch_state
        if state.num_begun == self._epoch_number:
            state.num_batches += num_batches + self._num_failed
            self._num_failed = 0

    def count_failed(self) -> None:
        """Count a batch that raised. If the loop ends there, a resumed run loads it again."""
        self._num_failed += 1

    def count_empty(self, num_batches: int = 1) -> None:
        """Count batches without samples. They keep their place in the epoch."""
        state, number = self._epoch_state, self._epoch_number

        def count() -> None:
            if state.num_begun == number:
                state.num_batches += num_batches

        self._when_delivered(count)

    def note_stream(self, worker: int, state: Any, next_worker: int) -> None:
        """Record the state of an iterable dataset that arrived with the current batch."""
        note = self._epoch_state.note_stream
        self._when_delivered(lambda: note(worker, state, next_worker))

    def note_end(self, worker: int) -> None:
        """Record that a worker's part of an iterable dataset ended with the current batch."""
        note = self._epoch_state.note_end
        self._when_delivered(lambda: note(worker))

    def take_pending(self) -> list[Effect]:
        """Return and clear the changes that belong to the most recent batch."""
        pending = self._pending.copy()
        self._pending.clear()
        return pending

    def _when_delivered(self, effect: Effect) -> None:
        if self._is_deferred:
            self._pending.append(effect)
        else:
            effect()


def own_state_of(owner: Any) -> Any:
    """Return a copy of the state of the user's sampler or dataset; None if it has none."""
    if isinstance(owner, Order) or not has_own_state(owner):
        return None
    return copy.deepcopy(owner.state_dict())


def has_own_state(owner: Any) -> bool:
    """Return True if the user's sampler or dataset can save and restore its state."""
    return all(callable(probe(owner, name)) for name in ("state_dict", "load_state_dict"))


class EpochPosition(NamedTuple):
    """A position to resume from. Its seeds are those drawn because none was given.

    Args:
        own_state: The sampler's ``state_dict()`` at the beginning of the epoch.
        streams: State of an iterable dataset after its last batch, by worker.
        next_worker: The worker whose batch comes next.
        ended: Workers whose part of an iterable dataset has ended.
    """

    epoch: int
    position: int
    base_seed: int | None = None
    base_epoch: int = 0
    shuffle_seed: int | None = None
    generator_state: str | None = None
    own_state: Any = None
    streams: dict[int, Any] | None = None
    next_worker: int = 0
    ended: tuple[int, ...] = ()


class _Noted:
    """Seeds drawn for one epoch. Written to the epoch state while that epoch is current."""

    def __init__(self, epoch_state: EpochState) -> None:
        self._epoch_state = epoch_state
        self._num_begun = epoch_state.num_begun
        self.shuffle_seed = epoch_state.shuffle_seed
        self.generator_state = epoch_state.generator_state

    def keep(self, name: str, value: Any) -> None:
        if self._epoch_state.num_begun == self._num_begun:
            setattr(self._epoch_state, name, value)


SAMPLING = "the sampler or dataset.__len__"
"""Names the user code whose StopIteration can surface while indices are drawn."""


class EpochIndices:
    """The batches of indices of an epoch, from the position where the epoch starts.

    Args:
        indices: The loader's index sampler: a batch sampler, or a sampler without batching.
        rows: Samples of one rank in a batch. None without batching, or if it varies.
        is_batched: True if ``indices`` yields batches of indices, False for single indices.
        is_endless: True for an iterable dataset. Its indices carry no information, and none are
            dropped.
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
        """The Penstock order that the indices come from, or None.

        None for the user's own batch sampler, which can use the order in any way. Its indices are
        replayed instead.
        """
        from torch.utils.data import BatchSampler

        is_plain = type(self._indices) is BatchSampler
        sampler = self._indices.sampler if is_plain else self._indices
        return sampler if isinstance(sampler, Order) else None

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """Fingerprint of the Penstock sampler or batch sampler, or None for any other."""
        found = self._indices if self.order is None else self.order
        return found.fingerprint if isinstance(found, ShardedOrder) else None

    def counter(self) -> Callable[[], dict[str, int]] | None:
        """Return a function that counts the delivered samples of each source of a mixture."""
        order = self.order
        return None if order is None else order.counter(self._epoch_state)

    @property
    def drawing(self) -> Any:
        """torch's RandomSampler, if the indices come from one. Its draws are recorded."""
        from torch.utils.data import RandomSampler

        sampler = getattr(self._indices, "sampler", self._indices)
        return sampler if type(sampler) is RandomSampler else None

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        # Read now, because another iterator may begin an epoch before the first batch is drawn.
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
        """Skip ``num_over`` batches and count their samples, because a batch can be short."""
        self._num_dropped = 0
        try:
            for batch in itertools.islice(batches, num_over):
                self._num_dropped += len(list(batch)) if self._is_batched else 1
            yield from batches
        except RuntimeError as error:
            if not isinstance(error.__cause__, StopIteration):
                raise
            # Python's message, "generator raised StopIteration", does not name the user's code.
            raise NoStopIteration.error_for(SAMPLING) from error.__cause__

    def _drawn(self) -> Iterator[Any]:
        """Iterate the user's sampler. Records what torch's RandomSampler draws."""
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
        if seed is None:  # drawn as RandomSampler draws it
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
        noted.keep("shuffle_seed", seed)
        generator = torch.Generator()
        generator.manual_seed(seed)
        sampler.generator = generator
        try:
            batches = iter(self._indices)
            first = next(batches, None)  # the sampler reads the generator on the first call
        finally:
            sampler.generator = None
        if first is not None:
            yield first
            yield from batches

    def positions(self) -> Callable[[int], int]:
        """Return a function from a rank's place in the iterated indices to the epoch position.

        Call it only with places already iterated, because the number of dropped indices is known
        only then.
        """
        start, order = self._epoch_state.start, self.order
        if order is None:
            return lambda place: self._num_dropped + place
        if order.world_size == 1:
            return lambda place: start + place
        return order.starting_at(start).global_position


def fits_generator(generator: Any, known: Any) -> bool:
    """Return True if ``known`` is a complete state of this kind of generator."""
    try:
        num_bytes = len(base64.b64decode(known, validate=True))
        return bool(num_bytes == generator.get_state().numel())
    except (TypeError, ValueError):
        return False


def _set_or_note(generator: Any, known: str | None) -> str:
    """Set the user's generator to ``known``, unless that is None. Returns the state it is in."""
    import torch

    if known is None:
        return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(known)), dtype=torch.uint8))
    return known
