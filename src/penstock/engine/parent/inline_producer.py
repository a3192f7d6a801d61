"""Loads batches without workers, in the caller's thread, on request.

Tested by ``tests/integration/test_loader.py``.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset, TensorDataset

from penstock.engine.loading.default_collate import default_collate, is_default_collate
from penstock.engine.loading.fetch import (
    EmptyBatch,
    EndOfStream,
    Stream,
    as_indices,
    async_one_getter,
    call_user,
    fetch_map,
    getter,
    one_getter,
    takes_batches,
)
from penstock.engine.parent.context import EpochPass, LoadContext
from penstock.errors import NoStopIteration, NoSubstitute
from penstock.order.global_generators import preserved_generators, watching_state_reads
from penstock.order.sample_randomness import SampleRandomness, make_randomness
from penstock.trace.record import now_ns
from penstock.user_objects import offers

if TYPE_CHECKING:
    from penstock.engine.loading.async_samples import AsyncSamples
    from penstock.engine.loading.bad_samples import BadSamplePolicy, PoisonRows
    from penstock.engine.loading.gather import Gatherer
    from penstock.engine.memory.ring import Ring

_rings: weakref.WeakKeyDictionary[Any, tuple[int, Ring]] = weakref.WeakKeyDictionary()
"""Unused rings by loader. Their pages are already allocated. Allocating new pages takes a fifth of
the time of a short epoch (two slots of 3 MB, 78 batches)."""


def _make_ring(context: LoadContext) -> Ring:
    from penstock.engine.memory.shared_file import PrivateFile

    return context.make_ring(PrivateFile())


def _borrow_ring(producer: Any, context: LoadContext) -> Ring:
    """Borrow the loader's ring for exclusive use. It is returned when the producer is deleted."""
    owner, ring = _rings.pop(context.loader(), (0, None))
    if ring is None or owner != os.getpid():
        ring = _make_ring(context)
    end = weakref.finalize(producer, _return_ring, context.loader, ring, os.getpid())
    end.atexit = False
    return ring


def _return_ring(loader_ref: Any, ring: Ring, owner: int) -> None:
    loader = loader_ref()
    if loader is not None:
        _rings[loader] = owner, ring


def _make_flight(context: LoadContext) -> AsyncSamples:
    from penstock.engine.loading.async_samples import AsyncSamples
    from penstock.order.async_randomness import AsyncRandomness

    assert context.settings.in_flight is not None
    randomness = None
    if context.settings.per_sample:
        randomness = AsyncRandomness(context.base_seed, context.dataset)
    return AsyncSamples(
        context.settings.in_flight,
        randomness=randomness,
        is_shared=True,
        timeout_s=context.parts.faults.sample_timeout_s,
    )


def _find_gatherer(dataset: Any) -> Gatherer | None:
    if not isinstance(dataset, (Subset, TensorDataset)) and not offers(dataset, "read_rows"):
        return None  # so most datasets do not need the module
    from penstock.engine.loading.gather import find_gatherer

    return find_gatherer(dataset)


def _find_channels_last_getter(dataset: Any) -> Callable[[Any], Any] | None:
    if not isinstance(dataset, Subset) and not offers(dataset, "keeps_channels_last"):
        return None
    from penstock.engine.loading.in_place import find_channels_last_getter

    return find_channels_last_getter(dataset)


class InlineProducer:
    """Loads each batch in the caller's thread when it is requested."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self._dataset, self._collate_fn = context.dataset, context.collate_fn
        self._auto_collation = context.auto_collation
        self._epoch_state, self._faults = context.parts.epoch_state, context.parts.faults
        self._collates_by_default = is_default_collate(self._collate_fn)
        self._randomness: SampleRandomness | None = None
        self._collate_randomness: SampleRandomness | None = None
        if context.settings.per_sample:
            self._randomness, self._collate_randomness = make_randomness(
                context.base_seed,
                self._dataset,
                None if self._collates_by_default else self._collate_fn,
                checks_repeats=True,
                waits_for_numpy=True,
            )
        both = self._randomness, self._collate_randomness
        self._randomnesses = [one for one in both if one is not None]
        self._gatherer: Gatherer | None = None
        if self._auto_collation and self._collates_by_default:
            self._gatherer = _find_gatherer(self._dataset)
        can_batch = takes_batches(self._dataset)
        self._is_plain = self._collates_by_default and self._auto_collation and not can_batch
        self._bad_policy: BadSamplePolicy | None = None
        if self._faults.is_tolerant:
            from penstock.engine.loading.bad_samples import BadSamplePolicy

            self._bad_policy = BadSamplePolicy(
                self._faults.on_error,
                self._dataset,
                seed=context.base_seed,
                num_indices=self._faults.num_indices,
                none_is_bad=self._collates_by_default,
            )
        self._is_async = context.settings.in_flight is not None
        self._flight: AsyncSamples | None = None
        self._ring: Ring | None = None
        if self._gatherer is not None:
            is_pinned = context.pinner is not None
            self._ring = _make_ring(context) if is_pinned else _borrow_ring(self, context)

    @property
    def workers(self) -> list[Any]:
        return []

    def stop(self) -> None:
        """Do nothing, because there are no workers."""

    def start_epoch(self, epoch: EpochPass) -> None:
        self._dataset = self._context.dataset
        get_last = _find_channels_last_getter(self._dataset) if self._is_plain else None
        self._keeps_channels_last = get_last is not None
        self._get = getter(self._dataset) if get_last is None else get_last
        self._one = one_getter(self._dataset) if get_last is None else get_last
        if self._is_async:
            self._one = async_one_getter(self._dataset)
        self._indices, self._position_at = epoch.indices, epoch.position_of
        self.num_taken = epoch.num_taken
        """Number of samples of the epoch loaded so far."""
        self._num_batches = 0
        self._context.parts.recorder.begin_pass(None, 0)
        if self._randomness is not None:
            assert self._collate_randomness is not None
            self._randomness.begin(self._epoch_state.key_epoch)
            self._collate_randomness.begin(self._epoch_state.key_epoch)
        self._stream: Stream | None = None
        if self._context.is_iterable:
            self._resume_dataset()
            self._stream = Stream(
                self._dataset,
                auto_collation=self._auto_collation,
                drop_last=self._context.drop_last,
                take_next=self._bad_policy.next_of if self._bad_policy is not None else None,
                has_ended=0 in self._epoch_state.ended,
            )

    def _resume_dataset(self) -> None:
        """Restore the position of an iterable dataset after a resume."""
        from penstock.order.stream_state import forget_stream_state, load_stream_state

        state = self._epoch_state
        if state.has_loaded_state:
            forget_stream_state(self._dataset)
        state.has_loaded_state = 0 in state.streams
        if state.has_loaded_state:
            load_stream_state(self._dataset, state.streams[0])

    def _advance(self, num_samples: int) -> int:
        """Take the next samples. Returns the position of the first."""
        first, self.num_taken = self.num_taken, self.num_taken + num_samples
        self._position = first if self._position_at is None else self._position_at(first)
        return self._position

    def is_ready(self) -> bool:
        # Without per-sample randomness, loading ahead would draw before the user's code does. A
        # stream must not run ahead either, because its state is read at its current position.
        return self._context.settings.per_sample and self._stream is None

    def next_batch(self) -> tuple[Any, bool]:
        while True:
            index = next(self._indices)
            if self._auto_collation and type(index) is not list:
                index = as_indices(index)
            if self._ring is not None:
                self._ring.has_lent_pinned = False
            start_ns, cpu_ns, num_before = now_ns(), time.thread_time_ns(), self.num_taken
            try:
                if self._bad_policy is None:
                    batch = self._load(index)
                else:
                    batch = self._load_tolerantly(index, self._bad_policy)
            except EndOfStream:
                raise StopIteration from None
            except EmptyBatch:
                self._context.progress.count_empty()
                self._record_bad()
                continue
            except StopIteration as error:  # from user code, so not the end of the epoch
                raise NoStopIteration.error_for("dataset[i]") from error
            except NoSubstitute:
                self._record_bad()
                raise
            except Exception as error:
                from penstock.engine.loading.sample_path import note_sample

                note_sample(error, self._dataset)
                raise
            num_loaded, number = self.num_taken - num_before, self._num_batches
            self._num_batches += 1
            self._context.parts.recorder.record_inline_load(start_ns, cpu_ns, num_loaded, number)
            if self._bad_policy is not None:
                self._record_bad()
            for randomness in self._randomnesses:
                if randomness.warnings or randomness.notes:
                    self._tell_user(randomness)
            if self._stream is not None and self._stream.has_ended:
                self._context.progress.note_end(0)
            return batch, self._ring is not None and self._ring.has_lent_pinned

    def _tell_user(self, randomness: SampleRandomness) -> None:
        """Show the user messages about the randomness of samples."""
        warnings, notes = randomness.take_messages()
        for text in warnings:
            self._context.warn(text)
        for text in notes:
            self._context.note(text)

    def _load_tolerantly(self, index: Any, bad_policy: BadSamplePolicy) -> Any:
        """Load a batch as usual, or one sample at a time if a sample is bad or poison."""
        num_before = self.num_taken
        if self._stream is not None:
            return self._load(index)
        from penstock.engine.loading.bad_samples import poison_among

        poison_rows = poison_among(self._faults.poison, index if self._auto_collation else [index])
        if not poison_rows:
            try:
                return self._load(index)
            except Exception:
                self.num_taken = num_before
        return self._load_carefully(index, bad_policy, poison_rows)

    def _record_bad(self) -> None:
        if self._bad_policy is not None and self._bad_policy.found:
            found, self._bad_policy.found = self._bad_policy.found, []
            self._faults.record(found)

    def _load(self, index: Any) -> Any:
        if self._gatherer is not None and self._ring is not None:
            from penstock.engine.memory.batch_layout import LayoutError

            with suppress(LayoutError):  # for example slices as indices, which load as usual
                batch = self._gatherer.gather(index, self._ring)
                self.num_taken += len(index)
                return batch
        if self._stream is not None:
            samples = self._stream.fetch(index, self.num_taken)
            if not self._epoch_state.has_compared:
                self._compare_ranks(samples)
            self.num_taken += len(index) if self._auto_collation else 1
        elif self._is_async:
            samples = self._fetch_async(index)
            if self._randomness is not None and not self._collates_by_default:
                with self._randomness.preserved():
                    return self._collate(samples)
        elif self._randomness is not None and self._randomness.is_unseeded and self._is_plain:
            position = self._advance(len(index))
            samples = self._randomness.call_many_preserved(self._get, index, position)
        elif self._randomness is not None:
            with self._randomness.preserved():
                samples = self._fetch(index)
                if not self._collates_by_default:
                    return self._collate(samples)
        else:
            samples = self._fetch(index)
        return self._put_together(samples, index)

    def _compare_ranks(self, samples: Any) -> None:
        """Compare the first samples of an iterable dataset with those of other ranks."""
        self._epoch_state.has_compared = True
        if "torch.distributed" not in sys.modules:
            return
        from penstock.engine.loading.first_samples import digest_samples
        from penstock.engine.parent.stream_checks import compare_ranks

        digest = digest_samples(samples, is_random=True)
        compare_ranks(self._dataset, digest, self._context.warn)

    def _put_together(self, samples: Any, index: Any) -> Any:
        if self._collates_by_default and self._auto_collation:
            indices = [] if self._stream is not None else list(index)
            indices = indices if len(indices) == len(samples) else []  # samples were skipped
            is_last = self._keeps_channels_last
            return default_collate(samples, indices, keeps_channels_last=is_last)
        return call_user(self._collate_fn, samples, 0, None, "collate_fn")

    def _load_carefully(
        self, index: Any, bad_policy: BadSamplePolicy, poison_rows: PoisonRows
    ) -> Any:
        """Load one sample at a time and apply the bad-sample policy."""
        get, epoch = self._one, self._epoch_state.key_epoch
        indices = list(index) if self._auto_collation else [index]
        placed = list(enumerate(indices, self._advance(len(indices))))
        poison = {self._position + row for row, _ in poison_rows}
        with (
            self._preserved(),
            self._in_flight(one for one in placed if one[0] not in poison) as flight,
        ):
            if self._randomness is not None:
                self._randomness.snapshot()

            def call(function: Callable[[Any], Any], one: Any, position: int) -> Any:
                if flight is not None and function is get:
                    return flight.fetch(None, get, one, position, epoch)
                return call_user(function, one, position, self._randomness)

            samples = bad_policy.samples(call, get, iter(placed), epoch, indices, poison_rows)
            if not samples:
                raise EmptyBatch
            whole = samples if self._auto_collation else samples[0]
            if self._randomness is not None and not self._collates_by_default:
                return self._collate(whole)
        return self._put_together(whole, index)

    def _preserved(self) -> Any:
        if self._randomness is not None:
            return self._randomness.preserved()
        return preserved_generators()

    def _collate(self, samples: Any) -> Any:
        if self._collate_randomness is not None and self._randomness is not None:
            self._collate_randomness.snapshot(is_used=self._randomness.needs_seeding)
            with self._collate_randomness.preserved_own():
                position, randomness = self._position, self._collate_randomness
                return call_user(self._collate_fn, samples, position, randomness, "collate_fn")
        return call_user(self._collate_fn, samples, 0, None, "collate_fn")

    def _fetch_async(self, index: Any) -> Any:
        """Load the samples of one batch, several in flight. None is loaded ahead."""
        if self._auto_collation and takes_batches(self._dataset):
            get, position = self._dataset.__getitems__, self._advance(len(index))
            with self._in_flight() as flight:
                assert flight is not None
                flight.start_batch(None, get, index, position, self._epoch_state.key_epoch)
                return next(flight.results(None))
        indices = index if self._auto_collation else [index]
        with self._in_flight(enumerate(indices, self._advance(len(indices)))) as flight:
            assert flight is not None
            samples = list(flight.results(None))
            return samples if self._auto_collation else samples[0]

    @contextmanager
    def _in_flight(self, placed: Iterable[tuple[int, Any]] = ()) -> Iterator[AsyncSamples | None]:
        """Load async samples in the block. At its end, none is left in flight."""
        if not self._is_async:
            yield None
            return
        if self._flight is None:  # in the thread that loads
            self._flight = _make_flight(self._context)
        flight = self._flight
        flight.start(None, self._one, placed, self._epoch_state.key_epoch)
        try:
            with watching_state_reads():
                yield flight
        finally:
            flight.drop(None)
            flight.settle()
            for note in flight.take_notes():
                self._context.note(note)

    def _fetch(self, index: Any) -> Any:
        if not self._auto_collation:
            position = self._advance(1)
            if self._randomness is not None:
                self._randomness.snapshot()
            return call_user(self._get, index, position, self._randomness)
        position = self._advance(len(index))
        return fetch_map(self._dataset, index, position, self._randomness, self._get)
