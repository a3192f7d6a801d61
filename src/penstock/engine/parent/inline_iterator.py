"""Without workers: the caller's own thread loads each batch when it is asked for."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import dataloader as torch_loader

from penstock.engine.loading import collate
from penstock.engine.loading.bad_samples import BadSamplePolicy, Poison, poison_among
from penstock.engine.loading.fetch import (
    EmptyBatch,
    EndOfStream,
    Stream,
    call_user,
    fetch_map,
    getter,
    one_getter,
    takes_batches,
)
from penstock.engine.loading.gather import Gatherer, find_gatherer
from penstock.engine.memory.batch_layout import LayoutError
from penstock.engine.memory.pinned_ring import make_ring
from penstock.engine.memory.ring import Ring
from penstock.engine.memory.shared_file import PrivateFile
from penstock.engine.parent.iterator import LoaderIterator, Setup, max_held_bytes
from penstock.errors import NoSubstitute
from penstock.order.dataset_generators import DatasetGenerators
from penstock.order.global_generators import counting_state_reads, preserved_generators
from penstock.order.keys import COLLATE_STREAM
from penstock.order.sample_randomness import SampleRandomness
from penstock.trace.record import now_ns

_rings: weakref.WeakKeyDictionary[Any, tuple[int, Ring]] = weakref.WeakKeyDictionary()
"""Rings that no iterator uses now, by loader: their pages are there, and fresh ones cost a short
epoch a fifth of its time (two slots of 3 MB, 78 batches)."""


def _borrow_ring(iterator: Any, loader: Any) -> Ring:
    """The loader's ring for one iterator alone; it goes back when that one is gone."""
    owner, ring = _rings.pop(loader, (0, None))
    if ring is None or owner != os.getpid():
        ring = Ring(PrivateFile(), max_held_bytes=max_held_bytes())
    end = weakref.finalize(iterator, _return_ring, weakref.ref(loader), ring, os.getpid())
    end.atexit = False
    return ring


def _return_ring(loader_ref: Any, ring: Ring, owner: int) -> None:
    loader = loader_ref()
    if loader is not None:
        _rings[loader] = owner, ring


class InlineIterator(LoaderIterator):
    """No workers: the caller's own thread loads each batch when it is asked for."""

    def __init__(self, loader: Any, setup: Setup) -> None:
        super().__init__(loader)
        self._enter(setup)
        self._randomness: SampleRandomness | None = None
        self._collate_randomness: SampleRandomness | None = None
        if setup.per_sample:
            own = DatasetGenerators(self._dataset)
            self._randomness = SampleRandomness(self._base_seed, dataset_generators=own)
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
        self._bad_policy: BadSamplePolicy | None = None
        if setup.on_error != "raise":
            self._bad_policy = BadSamplePolicy(
                setup.on_error,
                self._dataset,
                seed=self._base_seed,
                num_indices=setup.num_indices,
                none_is_bad=self._collates_by_default,
            )
        self._ring: Ring | None = None
        if self._gatherer is not None:
            if setup.pinner is None:
                self._ring = _borrow_ring(self, loader)
            else:
                self._ring = make_ring(PrivateFile(), setup, max_held_bytes())
        self._begin()

    def _begin(self) -> None:
        self._place = 0
        self._setup.log.begin_pass(None, 0)
        self._position_at = self._position_of()
        if self._randomness is not None:
            assert self._collate_randomness is not None
            self._randomness.begin(self._epoch_state.key_epoch)
            self._collate_randomness.begin(self._epoch_state.key_epoch)
        self._stream: Stream | None = None
        if self._dataset_kind == torch_loader._DatasetKind.Iterable:
            if 0 in self._epoch_state.streams:  # resumed: it goes on by itself
                dataset: Any = self._dataset
                dataset.load_state_dict(self._epoch_state.streams[0])
            self._stream = Stream(
                self._dataset,
                auto_collation=self._auto_collation,
                drop_last=self._drop_last,
                take_next=self._bad_policy.next_of if self._bad_policy is not None else None,
            )

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._setup.turn()
        self._turn_number = self._epoch_state.num_turns
        super()._reset(loader, first_iter)
        self._begin()

    def _advance(self, num_samples: int) -> int:
        """The position of the next samples, which are taken now."""
        place, self._place = self._place, self._place + num_samples
        self._position = place if self._position_at is None else self._position_at(place)
        return self._position

    def _shutdown_workers(self) -> None:
        """There are none; others call this by name."""

    def _is_ready(self) -> bool:
        # Else its draws would come before the user's; and a stream's own state is asked for as
        # it stands.
        return self._setup.per_sample and self._stream is None

    def _next_batch(self) -> Any:
        while True:
            index = next(self._sampler_iter)
            if self._ring is not None:
                self._ring.has_lent_pinned = False
            start_ns, cpu_ns, place = now_ns(), time.thread_time_ns(), self._place
            try:
                batch = self._load_somehow(index)
            except EndOfStream:
                raise StopIteration from None
            except EmptyBatch:
                self._count_empty()
                self._tell_bad()
                continue
            except StopIteration as error:  # of the user's code: not the end of the epoch
                raise RuntimeError("dataset[i] raised StopIteration") from error
            except NoSubstitute:
                self._tell_bad()
                raise
            self._setup.log.load_inline(start_ns, cpu_ns, self._place - place, self._num_yielded)
            self._tell_bad()
            is_pinned = self._ring is not None and self._ring.has_lent_pinned
            return self._finished(batch, is_pinned=is_pinned)

    def _load_somehow(self, index: Any) -> Any:
        """As usual; one sample at a time if one of them is bad, or known to be poison."""
        bad_policy, place = self._bad_policy, self._place
        if bad_policy is None or self._stream is not None:
            return self._load(index)
        poison = poison_among(self._setup.poison, index if self._auto_collation else [index])
        if not poison:
            try:
                return self._load(index)
            except Exception:
                self._place = place
        return self._load_carefully(index, bad_policy, poison)

    def _tell_bad(self) -> None:
        if self._bad_policy is not None and self._bad_policy.found:
            found, self._bad_policy.found = self._bad_policy.found, []
            self._setup.on_bad(found)

    def _load(self, index: Any) -> Any:
        if self._gatherer is not None and self._ring is not None:
            with suppress(LayoutError):  # slices as indices, say: the usual way
                batch = self._gatherer.gather(index, self._ring)
                self._place += len(index)
                return batch
        if self._stream is not None:
            samples = self._stream.fetch(index, self._place)
            self._place += len(index) if self._auto_collation else 1
        elif self._randomness is not None and self._randomness.is_unseeded and self._is_plain:
            position = self._advance(len(index))
            samples = self._randomness.call_many_preserved(getter(self._dataset), index, position)
        elif self._randomness is not None:
            with preserved_generators(), counting_state_reads():
                samples = self._fetch(index)
                if not self._collates_by_default:
                    return self._collate(samples)
        else:
            samples = self._fetch(index)
        return self._put_together(samples, index)

    def _put_together(self, samples: Any, index: Any) -> Any:
        if self._collates_by_default and self._auto_collation:
            indices = [] if self._stream is not None else list(index)
            indices = indices if len(indices) == len(samples) else []  # some were left out
            return collate.default_collate(samples, indices)
        return self._collate_fn(samples)

    def _load_carefully(self, index: Any, bad_policy: BadSamplePolicy, poison: Poison) -> Any:
        """One sample at a time, in spite of bad ones."""
        get = one_getter(self._dataset)
        indices = list(index) if self._auto_collation else [index]
        placed = enumerate(indices, self._advance(len(indices)))
        with preserved_generators(), counting_state_reads():
            if self._randomness is not None:
                self._randomness.snapshot()

            def call(function: Callable[[Any], Any], one: Any, position: int) -> Any:
                return call_user(function, one, position, self._randomness)

            samples = bad_policy.samples(
                call, get, placed, self._epoch_state.key_epoch, indices, poison
            )
            if not samples:
                raise EmptyBatch
            whole = samples if self._auto_collation else samples[0]
            if self._randomness is not None and not self._collates_by_default:
                return self._collate(whole)
        return self._put_together(whole, index)

    def _collate(self, samples: Any) -> Any:
        if self._collate_randomness is not None and self._randomness is not None:
            self._collate_randomness.snapshot(is_used=self._randomness.needs_seeding)
        return call_user(self._collate_fn, samples, self._position, self._collate_randomness)

    def _fetch(self, index: Any) -> Any:
        if not self._auto_collation:
            position = self._advance(1)
            if self._randomness is not None:
                self._randomness.snapshot()
            return call_user(getter(self._dataset), index, position, self._randomness)
        return fetch_map(self._dataset, index, self._advance(len(index)), self._randomness)
