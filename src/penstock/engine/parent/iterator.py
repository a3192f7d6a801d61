"""The iterator that ``iter(loader)`` returns, in the training process.

It derives from torch's base iterator, which draws the base seed, holds the sampler's iterator and
warns about wrong lengths exactly as PyTorch does. Batches come from a producer:
:mod:`~penstock.engine.parent.inline_producer` loads in the caller's thread,
:mod:`~penstock.engine.parent.worker_producer` loads with workers, and
:mod:`~penstock.engine.parent.auto_workers` starts inline and may switch to workers.

Tested by ``tests/integration/engine/memory/test_lifetimes.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.utils.data import dataloader as torch_loader

from penstock.engine.parent.context import (
    BatchProducer,
    EngineSettings,
    EpochPass,
    LoadContext,
    LoaderParts,
)
from penstock.engine.parent.inline_producer import InlineProducer
from penstock.errors import DeviceFailed, NoStopIteration
from penstock.importing import importing
from penstock.order.epoch_state import SAMPLING, Effect, EpochIndices, Progress
from penstock.trace.record import now_ns


class LoaderIterator(torch_loader._BaseDataLoaderIter):
    """Yields the batches of one loader. Reused for each epoch if workers are persistent.

    Args:
        loader: A Penstock loader, possibly the one behind a patched torch loader.
        is_auto: Load inline first, and let the loader decide whether workers pay off.
    """

    _pin_memory: bool
    _base_seed: int
    _index_sampler: Any

    def __init__(
        self, loader: Any, settings: EngineSettings, parts: LoaderParts, *, is_auto: bool = False
    ) -> None:
        super().__init__(loader)
        self._loader = weakref.ref(loader)
        self._parts = parts
        self._base_seed = parts.epoch_state.settle_base(self._base_seed)
        recorder, device_setup = parts.recorder, parts.device_setup
        self._watch = device_setup.make_watch(recorder)
        self._prefetcher = device_setup.make_prefetcher(self._watch)
        self._returned_ns = 0
        self._lost: DeviceFailed | None = None
        self._progress = Progress(parts.epoch_state, is_deferred=self._prefetcher is not None)
        self._context = LoadContext(
            loader=self._loader,
            settings=settings,
            parts=parts,
            progress=self._progress,
            pinner=device_setup.pinner,
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            worker_init_fn=loader.worker_init_fn,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            is_persistent=self._persistent_workers,
            is_iterable=self._dataset_kind == torch_loader._DatasetKind.Iterable,
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
            timeout_s=self._timeout,
            ranks=(self._world_size, self._rank),
        )
        self._producer = self._make_producer(loader, is_auto)
        if not is_auto and settings.pool != "inline":
            super()._reset(loader, True)  # as torch's iterator does
        self._start_epoch()

    def _make_producer(self, loader: Any, is_auto: bool) -> BatchProducer:
        # Imported on first use, because a program without workers needs a third of the engine.
        if is_auto:
            from penstock.engine.parent.auto_workers import AutoProducer

            return AutoProducer(self._context, loader)
        settings = self._context.settings
        if settings.pool == "inline" and not settings.remote_workers:
            return InlineProducer(self._context)
        with importing():
            from penstock.engine.parent.worker_producer import WorkerProducer, refuse_remote

        if settings.pool == "inline":
            if loader._is_auto:  # no workers are needed
                return InlineProducer(self._context)
            raise refuse_remote(settings)
        if loader._chooses_workers():
            from penstock.engine.parent.resizing import make_worker_producer

            return make_worker_producer(self._context)
        return WorkerProducer(self._context)

    @property
    def _settings(self) -> EngineSettings:
        return self._context.settings

    @property
    def _workers(self) -> list[Any]:
        return self._producer.workers

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Start the next epoch. Called by torch's DataLoader for persistent workers."""
        if self._prefetcher is not None:
            self._prefetcher.reset()
            self._lost = None
        if self._watch is not None:
            self._watch.reset()
        self._returned_ns = 0
        ours = self._loader()
        if ours is not None:
            ours._begin_epoch()
        self._parts.epoch_state.keep_base(self._base_seed)
        with NoStopIteration(SAMPLING):
            super()._reset(loader, first_iter)
        self._progress.begin()
        self._context.dataset, self._context.shared_seed = self._dataset, self._shared_seed
        self._start_epoch()
        if ours is not None:
            ours._skip_delivered(self)

    def _start_epoch(self) -> None:
        self._num_failed, self._is_over = 0, False
        indices = self._index_sampler
        position_of = indices.positions() if isinstance(indices, EpochIndices) else None
        request, taken = self._parts.epoch_state.request_batch, self._sampler_iter
        if request is not None:
            taken = _request_each(taken, request)
        self._producer.start_epoch(EpochPass(taken, position_of))

    def __next__(self) -> Any:
        recorder, watch = self._parts.recorder, self._watch
        start_ns = recorder.record_request()
        if watch is not None:
            watch.end_step()
        # torch's __next__ marks the batch for its profiler and warns about wrong lengths.
        # Called only if one of the two has a visible effect.
        try:
            if (
                getattr(self, "_IterableDataset_len_called", None) is not None
                or _profiler_enabled()
            ):
                batch: Any = super().__next__()
            else:
                batch = self._next_batch() if self._prefetcher is None else self._next_data()
                self._num_yielded += 1
        except StopIteration:
            if self._progress.is_current:
                self._parts.epoch_state.is_over = True
            if watch is not None:
                watch.end_pass()
            recorder.end_epoch()
            if not self._is_over:  # later calls raise StopIteration
                self._is_over = True
                self._parts.faults.end_epoch(self._num_yielded + self._num_failed)
            raise
        except Exception:
            self._num_failed += 1
            if not self._context.is_iterable:
                self._progress.count_failed()
            raise
        self._progress.count(1)
        self._returned_ns = recorder.record_batch(
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
            return self._prefetcher.next(self._take, self._producer.is_ready)
        except DeviceFailed as error:
            self._lost = error  # otherwise the next call would look like the end of the epoch
            self._shutdown_workers()
            raise
        except Exception:  # all batches taken before it have been delivered
            for effect in self._progress.take_pending():  # effects after the last batch
                effect()
            raise

    def _take(self) -> tuple[Any, list[Effect]]:
        start_ns = now_ns()
        batch = self._next_batch()
        self._parts.recorder.add_prefetch(start_ns)
        return batch, self._progress.take_pending()

    def _next_batch(self) -> Any:
        batch, is_pinned = self._producer.next_batch()
        if not is_pinned and (self._pin_memory or self._context.pinner is not None):
            from torch.utils.data._utils.pin_memory import pin_memory

            return pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return batch

    def _shutdown_workers(self) -> None:
        """Stop the workers now. Other libraries, including Ultralytics, call this by name."""
        self._producer.stop()


def _request_each(indices: Iterator[Any], request: Callable[[Any], None]) -> Iterator[Any]:
    for index in indices:
        request(index)
        yield index
