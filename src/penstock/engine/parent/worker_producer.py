"""Loads batches ahead of the training loop, with worker processes or threads.

Tested by ``tests/integration/engine/worker/test_loop.py``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.engine.loading.default_collate import is_default_collate
from penstock.engine.loading.fetch import takes_batches
from penstock.engine.memory.messages import WorkerTask
from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.parent.context import EngineSettings, EpochPass, LoadContext
from penstock.engine.parent.launcher import Launcher
from penstock.engine.parent.pools import Pool, control_cells
from penstock.engine.parent.process_pool import ProcessPool
from penstock.engine.parent.restart_decision import RestartPolicy
from penstock.engine.pickling.pickler import PickledObjects
from penstock.errors import (
    BadArgument,
    CannotTravel,
    MissingExtra,
    PenstockError,
    StartFailed,
)
from penstock.importing import importing
from penstock.trace.record import now_ns

if TYPE_CHECKING:
    from penstock.engine.parent.dispatch import Dispatcher


def refuse_remote(settings: EngineSettings) -> BadArgument:
    """Return the error for ``remote_workers`` where nothing can join."""
    return BadArgument(
        f"remote_workers={settings.remote_workers!r} needs local worker processes and a dataset "
        f"with an index, but pool={settings.pool!r}, num_workers={settings.num_workers}, and a "
        f"batch belongs to {'any' if settings.per_sample else 'one'} worker",
        likely="the dataset is iterable, randomness='worker' was given, or num_workers is 0.",
        remedy="DataLoader(..., num_workers=1), or DataLoader(..., pool='ray')",
    )


def _make_pool(
    context: LoadContext,
    kind: str,
    num_workers: int,
    task: WorkerTask,
    memory: SharedFile,
    cells: memoryview,
    policy: RestartPolicy,
    pickled: PickledObjects | None,
) -> Pool:
    """Make a pool. It does not hold the producer, so dropping an iterator ends its workers."""
    settings = context.settings
    objects, worker_entry = context.worker_objects(), context.parts.worker_entry
    if kind == "thread":
        from penstock.engine.parent.thread_pool import ThreadPool

        return ThreadPool(
            worker_entry("thread"),
            num_workers=settings.num_workers,
            task=task,
            objects=objects,
            memory=memory,
            cells=cells,
        )
    if kind == "ray":
        pool: Pool = worker_entry("ray")(
            num_workers=num_workers,
            first=0 if settings.pool == "ray" else settings.num_workers,
            task=task,
            objects=objects,
            pickled=pickled,
            memory=memory,
            cells=cells,
            note=context.note,
            warn=context.warn,
        )
        return pool
    assert settings.start_method is not None
    launcher = Launcher(
        method=settings.start_method,
        worker_entry=worker_entry,
        task=task,
        num_workers=num_workers,
        objects=objects,
        memory=memory,
        policy=policy,
        pickled=pickled,
    )
    for note in launcher.notes:
        context.note(note)
    return ProcessPool(launcher, settings.num_workers, cells)


class WorkerProducer:
    """Starts workers and takes batches from the dispatcher.

    Args:
        pickled: The user's objects, if they are already pickled.
        in_background: Start worker processes in a thread. See :meth:`finish_start`.
    """

    def __init__(
        self,
        context: LoadContext,
        pickled: PickledObjects | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        self._context = context
        self._lock = threading.Lock()
        """Several threads can share one iterator."""
        self._owner = os.getpid()
        self._has_told_size = False
        self.stops_at_end = not context.is_persistent
        self.dispatcher: Dispatcher | None = None
        self._prepare(pickled)
        if in_background:
            self._start.begin()
        else:
            self.finish_start()

    @property
    def workers(self) -> list[Any]:
        return [] if self.dispatcher is None else self.dispatcher.pool.processes

    def _prepare(self, pickled: PickledObjects | None = None) -> None:
        context = self._context
        settings, recorder = context.settings, context.parts.recorder
        per_sample = settings.per_sample and not context.is_iterable
        seed = context.base_seed
        start_ns = now_ns()
        memory = SharedFile.create()
        if memory.note:
            context.note(memory.note)
        num_remote = self._num_remote()
        if num_remote:
            pickled = pickled or PickledObjects(context.worker_objects())  # for both pools
            num_remote = self._num_travelling(pickled, num_remote)
        self._num_workers = settings.num_workers + num_remote
        cells, trace_bytes = control_cells(memory, self._num_workers, recorder.trace_bytes)
        task = WorkerTask(
            is_iterable=context.is_iterable,
            auto_collation=context.auto_collation,
            drop_last=context.drop_last,
            per_sample=per_sample,
            substitute_seed=seed,
            base_seed=seed if per_sample else context.parts.epoch_state.worker_seed(seed),
            shared_seed=context.shared_seed,
            sample_timeout_s=context.parts.faults.sample_timeout_s,
            in_flight=settings.in_flight,
            num_indices=context.parts.faults.num_indices,
            keeps_init_seed=settings.keeps_init_seed,
            trace_bytes=trace_bytes,
            traces_samples=recorder.traces_samples,
            traces_steps=recorder.traces_steps,
        )
        policy = RestartPolicy(context.parts.faults.max_restarts)
        rest = (self._num_workers, task, memory, cells, policy, pickled)
        pool = _make_pool(context, settings.pool, *rest)
        if num_remote:
            from penstock.engine.parent.mixed_pool import MixedPool

            _PoolStart(pool).finish()
            pool = MixedPool(
                pool,
                num_remote,
                lambda: _make_pool(context, "ray", *rest),
                is_auto=settings.remote_workers == "auto",
                note=context.note,
            )
        self._pool = pool
        self._prepared = task, memory, cells, policy, start_ns
        self._start = _PoolStart(self._pool)

    @property
    def is_starting(self) -> bool:
        """True while the workers are started in the background."""
        return self._start.is_running

    def finish_start(self) -> None:
        """Wait until all workers are started, and make the dispatcher.

        Raises:
            StartFailed, OSError: A worker does not start.
        """
        with importing():  # while a new fork server gets ready
            from penstock.engine.parent.dispatch import Dispatcher

        self._start.finish()
        context, pool = self._context, self._pool
        task, memory, cells, policy, start_ns = self._prepared
        self.dispatcher = Dispatcher(
            pool=pool,
            ring=context.make_ring(memory),
            cells=cells,
            task=task,
            context=context,
            can_split=self._can_split(task),
            policy=policy,
        )
        context.parts.recorder.record_launch(start_ns, len(pool.processes))

    def _num_remote(self) -> int:
        """Return the number of workers on other machines beside those of this machine.

        Raises:
            BadArgument: There are no worker processes, or a batch belongs to one worker.
            MissingExtra, StartFailed: Ray is missing, or not connected. "auto" adds a note instead.
        """
        context, settings = self._context, self._context.settings
        asked = settings.remote_workers
        if not asked:
            return 0
        if settings.pool != "process" or not settings.per_sample:
            raise refuse_remote(settings)
        try:
            num_cpus: int = context.parts.worker_entry("ray cpus")()
        except (MissingExtra, StartFailed) as error:
            return self._start_none(error)
        return num_cpus if asked == "auto" else int(asked)

    def _num_travelling(self, pickled: PickledObjects, num_remote: int) -> int:
        """Return ``num_remote`` if the dataset can leave this machine."""
        try:
            pickled.for_other_machines()
        except CannotTravel as error:
            return self._start_none(error)
        return num_remote

    def _start_none(self, error: PenstockError) -> int:
        if self._context.settings.remote_workers != "auto":
            raise error
        self._context.note(f"remote_workers='auto' starts none: {error.what}")
        return 0

    def _can_split(self, task: WorkerTask) -> bool:
        """Return True if several workers can fill one batch."""
        return (
            task.per_sample
            # A batch comes back from a node in one piece.
            and self._context.settings.pool != "ray"
            and self._num_workers == self._context.settings.num_workers
            and task.auto_collation
            and is_default_collate(self._context.collate_fn)
            and not takes_batches(self._context.dataset)
        )

    def start_epoch(self, epoch: EpochPass) -> None:
        if self.dispatcher is None or self.dispatcher.is_closed:
            self._prepare()  # persistent workers were stopped by a failure
            self.finish_start()
        assert self.dispatcher is not None
        self.dispatcher.start_epoch(epoch)

    def next_batch(self) -> tuple[Any, bool]:
        dispatcher = self.dispatcher
        assert dispatcher is not None
        if os.getpid() != self._owner:
            raise StartFailed(
                f"this iterator belongs to process {self._owner} and cannot be used in a forked "
                f"child (pid {os.getpid()}), because its workers answer only to their parent",
                remedy="iter(loader) in the forked process",
            )
        with self._lock:
            try:
                batch = dispatcher.next()
                is_pinned = dispatcher.ring.has_lent_pinned
                if not self._has_told_size:
                    self._tell_size(dispatcher.ring.needed_bytes)
            except StopIteration:
                if self.stops_at_end:
                    self.stop()
                raise
            finally:
                if dispatcher.num_empty:
                    self._context.progress.count_empty(dispatcher.num_empty)
                    dispatcher.num_empty = 0
        return batch, is_pinned

    def _tell_size(self, batch_bytes: int) -> None:
        self._has_told_size = True
        loader = self._context.loader()
        if loader is not None:
            loader._learn_batch_bytes(batch_bytes)

    def is_ready(self) -> bool:
        with self._lock:
            return self.dispatcher is not None and self.dispatcher.is_ready()

    def stop(self) -> None:
        if self.dispatcher is not None:
            self.dispatcher.close()
        else:
            self._pool.stop()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit, the exit handlers have already stopped the workers, and only names
        # bound here are sure to exist.
        if not is_ending() and hasattr(self, "_pool"):
            self.stop()


class _PoolStart:
    """The start of a pool, at once or in a thread. Threads and Ray actors start with their pool."""

    def __init__(self, pool: Pool) -> None:
        self._run = pool.start if isinstance(pool, ProcessPool) else lambda: None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> None:
        """Start the workers in a thread: the fork server answers each request after a while."""
        self._thread = threading.Thread(
            target=self._run_in_thread, name="penstock-start-workers", daemon=True
        )
        self._thread.start()

    def _run_in_thread(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Wait until all workers are started. Raises the error of their start."""
        if self._thread is None:
            self._run()
            return
        self._thread.join()  # bounded: each answer of the fork server is
        if self._error is not None:
            raise self._error
