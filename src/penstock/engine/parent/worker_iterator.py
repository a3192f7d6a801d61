"""With workers, processes or threads: they load ahead, this side keeps the order."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader

from penstock.engine.loading import collate
from penstock.engine.loading.fetch import takes_batches
from penstock.engine.memory.messages import WorkerTask
from penstock.engine.memory.pinned_ring import make_ring
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent.dispatch import Dispatcher
from penstock.engine.parent.forgiving import weakly
from penstock.engine.parent.inline_iterator import InlineIterator
from penstock.engine.parent.iterator import LoaderIterator, Setup, max_held_bytes
from penstock.engine.parent.launcher import Launcher
from penstock.engine.parent.pools import Pool, ProcessPool, ThreadPool, control_cells
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import StartFailed
from penstock.trace.record import now_ns


class PooledIterator(LoaderIterator):
    """Workers load ahead; this side puts batches together and keeps the order."""

    def __init__(self, loader: Any, setup: Setup) -> None:
        super().__init__(loader)
        self._enter(setup)
        self._prepare()
        self._start(loader)
        self._reset(loader, first_iter=True)

    @classmethod
    def continuing(
        cls, begun: InlineIterator, loader: Any, setup: Setup, pickled: PickledObjects | None
    ) -> PooledIterator:
        """Workers for the rest of an epoch begun inline: same seed, order and positions."""
        self = cls.__new__(cls)
        vars(self).update(vars(begun))
        self._setup = setup
        self._prepare()
        self._start(loader, pickled)
        assert self._dispatcher is not None
        self._dispatcher.start_epoch(
            self._epoch_state.key_epoch,
            self._sampler_iter,
            place=begun._place,
            position_of=self._position_of(),
        )
        return self

    def _prepare(self) -> None:
        self._dispatcher: Dispatcher | None = None
        self._turn = threading.Lock()
        self._owner = os.getpid()
        self._workers: list[Any] = []
        self._has_learnt = False

    def _start(self, loader: Any, pickled: PickledObjects | None = None) -> None:
        """Start the workers and what delivers their batches."""
        setup = self._setup
        is_iterable = self._dataset_kind == torch_loader._DatasetKind.Iterable
        per_sample = setup.per_sample and not is_iterable
        base_seed = self._base_seed
        start_ns = now_ns()
        memory = SharedFile.create()
        if memory.note:
            setup.tell(memory.note)
        cells, ring_bytes = control_cells(memory, setup.num_workers, setup.log.ring_bytes)
        task = WorkerTask(
            is_iterable=is_iterable,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            per_sample=per_sample,
            base_seed=base_seed if per_sample else self._epoch_state.worker_seed(base_seed),
            shared_seed=self._shared_seed,
            has_limit=setup.limits.sample_timeout_s is not None,
            num_indices=setup.num_indices,
            obeys_init_seed=setup.obeys_init_seed,
            ring_bytes=ring_bytes,
            traces_samples=setup.log.traces_samples,
            traces_steps=setup.log.traces_steps,
        )
        pool = self._make_pool(travellers(self, loader), task, memory, cells, pickled)
        self._dispatcher = Dispatcher(
            pool=pool,
            ring=make_ring(memory, setup, max_held_bytes()),
            cells=cells,
            task=task,
            setup=setup,
            can_split=self._can_split(task),
            timeout_s=self._timeout,
            on_state=weakly(self._note_stream),  # or we would hold each other
        )
        self._workers = pool.processes
        setup.log.launched(start_ns, setup.num_workers)

    def _can_split(self, task: WorkerTask) -> bool:
        return (
            task.per_sample
            and task.auto_collation
            and collate.is_default_collate(self._collate_fn)
            and not takes_batches(self._dataset)
        )

    def _make_pool(
        self,
        objects: dict[str, Any],
        task: WorkerTask,
        memory: SharedFile,
        cells: memoryview,
        pickled: PickledObjects | None,
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
            pickled=pickled,
        )
        for note in launcher.notes:
            setup.tell(note)
        return ProcessPool(launcher, setup.num_workers, cells)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._setup.turn()
            self._turn_number = self._epoch_state.num_turns
        super()._reset(loader, first_iter)
        if self._dispatcher is None or self._dispatcher.is_closed:
            self._start(loader)  # persistent workers after a failure: a new crew
        assert self._dispatcher is not None
        self._dispatcher.start_epoch(
            self._epoch_state.key_epoch,
            self._sampler_iter,
            shared_seed=self._shared_seed,
            first_worker=self._epoch_state.next_worker,
            position_of=self._position_of(),
        )

    def _next_batch(self) -> Any:
        assert self._dispatcher is not None
        if os.getpid() != self._owner:
            raise StartFailed(
                f"this iterator belongs to process {self._owner}, which forked us (pid "
                f"{os.getpid()}): its workers answer to that process alone",
                remedy="iter(loader) in the forked process",
            )
        with self._turn:  # several threads may share one iterator
            try:
                batch = self._dispatcher.next()
                is_pinned = self._dispatcher.ring.has_lent_pinned
                if not self._has_learnt:
                    self._has_learnt = True
                    self._setup.learn(self._dispatcher.ring.needed_bytes)
            except StopIteration:
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise
            finally:
                if self._dispatcher.num_empty:
                    self._count_empty(self._dispatcher.num_empty)
                    self._dispatcher.num_empty = 0
        return self._finished(batch, is_pinned=is_pinned)

    def _is_ready(self) -> bool:
        with self._turn:
            return self._dispatcher is not None and self._dispatcher.is_ready()

    def _shutdown_workers(self) -> None:
        """Stop the workers now. Others (Ultralytics among them) call this by name."""
        if self._dispatcher is not None:
            self._dispatcher.close()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # By then the exit handlers have stopped the workers, and of this module nothing may be left
        # but what is bound here.
        if not is_ending():
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
        "on_error": iterator._setup.on_error,
        "collators": collate.custom_collators(),
        "streams": dict(iterator._epoch_state.streams),
    }
