"""The dispatcher: keeps workers supplied with work and delivers their batches in order.

    indices -> PendingBatch -> a Lease per part -> workers ... a Reply per part -> the batch

Batches are delivered in the sampler's order, regardless of the order of arrival. With per-sample
randomness, the choice of worker for a part does not change the batch. With per-worker randomness,
and for iterable datasets, whole batches are assigned to the workers in strict rotation.

Tested by ``tests/integration/test_loader.py``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from penstock.engine.loading.fetch import as_indices, expected_in_flight
from penstock.engine.memory.messages import (
    PASS_CELL,
    Lease,
    NewPass,
    Reply,
    ResumeStream,
    WorkerTask,
    trace_buffers,
)
from penstock.engine.memory.ring import Ring, Slot
from penstock.engine.parent.context import EpochPass, LoadContext
from penstock.engine.parent.crash_report import WorkerFault
from penstock.engine.parent.in_flight import LeaseQueue, PendingBatch
from penstock.engine.parent.pools import Pool, WorkerExit
from penstock.engine.parent.restart_decision import RestartPolicy
from penstock.engine.parent.restarts import WorkerRestarts
from penstock.engine.pickling.exceptions import ErrorReport, rebuild
from penstock.errors import PenstockError, warn_user
from penstock.planning.prefetch_depth import PrefetchDepth


class Dispatcher:
    """Runs the epochs of one loader on one pool.

    Args:
        cells: The control page. See :mod:`penstock.engine.memory.messages`.
        can_split: True if several workers can fill one batch.
        policy: Decides how to handle lost workers of the pool.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        ring: Ring,
        cells: memoryview,
        task: WorkerTask,
        context: LoadContext,
        can_split: bool,
        policy: RestartPolicy,
    ) -> None:
        self.pool = pool
        self.ring = ring
        self._cells = cells
        self._task = task
        self._context = context
        self._epoch_state, self._faults = context.parts.epoch_state, context.parts.faults
        self._recorder, self._notes = context.parts.recorder, context.parts.notes
        self._progress = context.progress
        # Split the first batch so that it arrives early, except while workers are starting up.
        self._splits_first = context.settings.start_method != "spawn"
        self._in_order = context.settings.in_order
        self._timeout_s = context.timeout_s
        self._num_workers = len(pool.processes)
        self._worker_buffers = self._recorder.add_pool(
            trace_buffers(cells, self._num_workers, task.trace_bytes), pool.processes, ring.file
        )
        self._depth = PrefetchDepth(
            context.settings.prefetch_factor,
            self._num_workers,
            expected_in_flight(task.in_flight),
            max_bytes=ring.max_held_bytes,
            can_split=can_split,
        )
        self._layouts: list[dict[int, Any]] = [{} for _ in pool.processes]
        self._lease_queue = LeaseQueue(
            self._num_workers, in_turn=not task.per_sample, ready=pool.ready
        )
        self.busy_ns = self.num_loaded = 0
        """Time that workers took for leases so far, and the samples of these."""
        self.num_empty = 0
        """Empty batches (all samples skipped) since the counter was last reset."""
        self._restarts = WorkerRestarts(
            pool=pool,
            lease_queue=self._lease_queue,
            cells=cells,
            faults=self._faults,
            task=task,
            policy=policy,
        )
        self._comparison: Any = None
        if task.is_iterable:
            from penstock.engine.parent.stream_checks import WorkerComparison, warn_of_shards

            name = type(context.dataset).__name__
            warn_of_shards(context.dataset, self._num_workers, context.warn)
            if not self._epoch_state.has_compared:
                self._comparison = WorkerComparison(name, self._num_workers)
        self._pending: dict[tuple[int, int], PendingBatch] = {}
        self._failure: BaseException | None = None
        self.is_closed = False
        self.pass_number = -1
        self._key_epoch = 0
        self._position_of: Callable[[int], int] | None = None
        self._indices: Iterator[Any] = iter(())
        self._begin()

    def _begin(self) -> None:
        self._sent = self._next = self._num_taken = 0
        self._num_open = 0
        self._has_more = True
        self._sampler_error: BaseException | None = None
        self._lease_queue.begin()

    def start_epoch(self, epoch: EpochPass) -> None:
        """Start loading an epoch. Drops unfinished work of an earlier one.

        The dispatcher counts passes. An epoch that is started again is a new pass. Randomness is
        computed from the loader's epoch.
        """
        self.pass_number += 1
        self._recorder.begin_pass(self._worker_buffers, self.pass_number)
        self._key_epoch, self._position_of = self._epoch_state.key_epoch, epoch.position_of
        self._cells[PASS_CELL] = self.pass_number
        for key in [key for key, pending in self._pending.items() if pending.is_done]:
            self.ring.give_back(self._pending.pop(key).slot)  # loaded, but never delivered
        fresh, shared_seed = None, self._context.shared_seed
        if shared_seed is not None and self.pass_number > 0:
            fresh = NewPass(self.pass_number, shared_seed)
            for worker in range(self._num_workers):
                self.pool.send(worker, [fresh])
        streams = self._epoch_state.streams
        self._restarts.begin(self.pass_number, fresh, streams)
        if self._task.is_iterable and (streams or self.pass_number > 0):
            for worker in range(self._num_workers):
                start = ResumeStream(self.pass_number, streams.get(worker), 0)
                self.pool.send(worker, [start])
        self._indices = epoch.indices
        self._begin()
        self._lease_queue.begin(self._epoch_state.next_worker)
        for worker in self._epoch_state.ended:
            self._lease_queue.retire(worker)
        self._num_taken = epoch.num_taken
        self._lease()

    @property
    def has_more(self) -> bool:
        """True if the sampler has not ended."""
        return self._has_more

    def end_early(self) -> int:
        """Take no more batches from the sampler. Those taken before are still delivered.

        Returns the number of samples taken.
        """
        self._has_more = False
        return self._num_taken

    def next(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: The epoch is complete.
            WorkerDied, WorkerTimeout: See :mod:`penstock.errors`.
        """
        if self._failure is not None:
            raise self._failure
        started = time.monotonic()
        while True:
            pending = self._ready_batch()
            if pending is not None and self._is_comparing():
                self._wait(started)
                continue
            if pending is not None:
                if pending.kind in ("end", "empty"):
                    if pending.kind == "end":
                        self._progress.note_end(pending.worker)
                    self._close_batch(pending)
                    self._lease()
                    self.num_empty += pending.kind == "empty"
                    if pending.bad_samples:
                        self._faults.record(pending.bad_samples)
                    continue
                self._recorder.add_wait(started)
                return self._deliver(pending)
            if not self._num_open:
                if self._sampler_error is not None:
                    error, self._sampler_error = self._sampler_error, None
                    raise error
                if not self._has_more or not self._lease_queue.has_active:
                    raise StopIteration
                self._lease(must=True)  # no slot was free; the user may have released batches since
                continue
            self._wait(started)

    def is_ready(self) -> bool:
        """Return True if :meth:`next` can answer without waiting. Processes what has arrived."""
        if self._ready_batch() is None and self._failure is None and self._num_open:
            try:
                self._hear(0.0)
            except Exception as error:
                self._failure = error  # next() raises it
        pending = self._ready_batch()
        return pending is not None and pending.kind not in ("end", "empty")

    def _is_comparing(self) -> bool:
        """Return True if the first batch waits for the first samples of a second worker."""
        if self._comparison is None:
            return False
        if not self._comparison.is_settled:
            return any(
                self._comparison.is_waiting_for(worker) and self._lease_queue.owed(worker)
                for worker in range(self._num_workers)
            )
        from penstock.engine.parent.stream_checks import compare_ranks

        found, self._comparison = self._comparison, None
        self._epoch_state.has_compared = True
        if found.message is not None:
            self._context.warn(found.message)
        compare_ranks(self._context.dataset, found.digest, self._context.warn)
        return False

    # -- leasing ---------------------------------------------------------------------------------

    def _lease(self, *, must: bool = False) -> None:
        """Lease batches up to the prefetch depth. With ``must``, raise if not even one fits."""
        limit = self._depth.num_batches(self._lease_queue.num_ready)
        if limit - self._num_open < max(1, limit // 4) and self._num_open:
            return  # wait for a few, so that one message carries several leases
        outgoing: dict[int, list[Lease]] = {}
        while self._num_open < limit and self._has_more and self._lease_queue.has_active:
            slot = self.ring.take_if_any()
            if slot is None:
                self._recorder.record_no_slot(self.ring.num_slots)
                if must and not self._num_open:
                    self.ring.take()  # raises an error that says what does not fit
                break  # slots of batches in flight will come back
            try:
                index = next(self._indices)
            except Exception as error:  # raised after the batches before it
                self._has_more = False
                self._sampler_error = None if isinstance(error, StopIteration) else error
                self.ring.give_back(slot)
                break
            pending = self._open_batch(index, slot)
            for worker, lease in self._cut(pending):
                outgoing.setdefault(worker, []).append(lease)
            # Known from the first batch on.
            limit = self._depth.num_batches(self._lease_queue.num_ready)
        for worker, leases in outgoing.items():
            self.pool.send(worker, leases)

    def _open_batch(self, index: Any, slot: Slot) -> PendingBatch:
        index = as_indices(index) if self._task.auto_collation else index
        index = _copy_index(index)
        rows = len(index) if self._task.auto_collation else 1
        position = (
            self._num_taken if self._position_of is None else self._position_of(self._num_taken)
        )
        pending = PendingBatch(self.pass_number, self._sent, index, position, rows, slot)
        self._pending[pending.pass_number, pending.number] = pending
        self._sent += 1
        self._num_open += 1
        self._num_taken += rows
        self._depth.open_batch(rows)
        return pending

    def _cut(self, pending: PendingBatch) -> Iterator[tuple[int, Lease]]:
        is_first = pending.number == 0 and self._splits_first
        num_parts = self._depth.num_parts(pending.rows, is_first=is_first)
        bounds = [pending.rows * part // num_parts for part in range(num_parts + 1)]
        pending.parts = list(itertools.pairwise(bounds))
        for part in range(num_parts):
            yield self._make_lease(pending, part)

    def _make_lease(self, pending: PendingBatch, part: int) -> tuple[int, Lease]:
        first, last = pending.parts[part]
        is_whole = len(pending.parts) == 1
        part_of_it = pending.index if is_whole else pending.index[first:last]
        limit = None if self._in_order else self._depth.depth * self._depth.rows_per_batch
        lease = Lease(
            pending.pass_number,
            pending.number,
            part,
            part_of_it,
            pending.position + first,
            pending.rows,
            first,
            is_whole,
            pending.slot.segment,
            pending.slot.start,
            pending.slot.capacity,
            self._key_epoch,
        )
        if self._faults.poison:
            from penstock.engine.loading.bad_samples import poison_among

            indices = part_of_it if self._task.auto_collation else [part_of_it]
            lease = lease._replace(poison_rows=poison_among(self._faults.poison, indices))
        return self._lease_queue.give(lease, limit), lease

    # -- receiving -------------------------------------------------------------------------------

    def _wait(self, started: float) -> None:
        timeout_s = self._restarts.patience_s
        if self._timeout_s > 0:
            left = self._timeout_s - (time.monotonic() - started)
            if left <= 0:
                raise self._restarts.timed_out(self._timeout_s, self._next)
            timeout_s = min(timeout_s, left)
        nap_s = self._depth.nap_s(self._num_open)
        if nap_s:
            time.sleep(nap_s)
        events = self._hear(timeout_s)
        if not self.is_closed and (not events or self._task.has_limit):
            self._look(started)
            self._recorder.note_waiting(started, self._restarts.current_samples)

    def _hear(self, timeout_s: float) -> list[tuple[int, Any]]:
        """Handle the events that workers have sent."""
        events = self.pool.receive(timeout_s)
        for worker, event in events:
            if isinstance(event, Reply):
                self._take(worker, event)
            elif isinstance(event, WorkerExit):
                self._replace(self._restarts.fault_of(worker, event))
            elif event[0] == "warning":
                if event[1] not in self._notes:  # each worker may send it
                    self._notes[event[1]] = None
                    warn_user(event[1])
            elif event[0] == "note":
                self._notes.setdefault(event[1])
            else:
                report: ErrorReport = event[1]
                self._fail(rebuild(report))
        if events:
            self._restarts.has_news = True
        return events

    def _look(self, started: float) -> None:
        try:
            faults = self._restarts.overdue(started)
        except PenstockError as error:
            self._fail(error)
        else:
            for fault in faults:
                self._replace(fault)

    def _replace(self, fault: WorkerFault) -> None:
        """Replace a lost worker, and send its unanswered leases to the new one."""
        worker = fault.worker
        try:
            messages = self._restarts.replace(fault)
        except (PenstockError, OSError) as error:
            self._fail(error)
        else:
            self._layouts[worker] = {}
            self._lease_queue.forget_time(worker)
            for lease in self._lease_queue.owed(worker):
                if lease.pass_number != self.pass_number:
                    self._take(worker, Reply(*lease.key, "dropped", None, 0, 0))
            owed = self._lease_queue.owed(worker)
            if self.pool.ready is None or worker in self.pool.ready:
                self.pool.send(worker, [*messages, *owed])
                return
            self.pool.send(worker, messages)  # it joins later: others load its leases
            for lease in owed:
                self._lease_queue.take_back(worker, lease.key)
                self.pool.send(self._lease_queue.give(lease), [lease])

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.close()
        raise error

    def _take(self, worker: int, reply: Reply) -> None:
        if reply.kind == "tried":
            self._restarts.note_trial(worker)
            return
        pending = self._pending[reply.pass_number, reply.batch]
        first, last = pending.parts[reply.part]
        self._lease_queue.take_back(worker, reply.key)
        if self._restarts.needs_replies:
            self._restarts.note_reply(worker, reply)
        if self._comparison is not None and (reply.first_samples or reply.kind == "end"):
            self._comparison.note(worker, reply.first_samples)
        self.ring.fit(reply.needed_bytes)
        layout = None
        if reply.kind == "fixed":
            number, new_layout, _, _ = reply.content
            if new_layout is not None:
                self._layouts[worker][number] = new_layout
            layout = self._layouts[worker][number]
        pending.take(worker, reply, layout)
        if reply.kind in ("fixed", "payload") and last > first:
            self._depth.note(reply.busy_ns, last - first)
            self._lease_queue.note_time(worker, reply.busy_ns / (last - first))
            if reply.in_flight:
                self._note_in_flight(reply)
            self.busy_ns += reply.busy_ns
            self.num_loaded += last - first
        if not pending.is_complete:
            return
        if pending.pass_number != self.pass_number:
            self._pending.pop((pending.pass_number, pending.number))
            self.ring.give_back(pending.slot)
        elif pending.must_be_redone:
            self._redo(pending)
        else:
            pending.is_done = True
            if reply.kind == "end":
                self._lease_queue.retire(worker)
            self._depth.adapt(reply.needed_bytes)

    def _note_in_flight(self, reply: Reply) -> None:
        """Lease as many async samples as the worker wants in flight, if their memory allows it."""
        if not self._depth.raise_in_flight(reply.in_flight, self.ring.needed_bytes):
            self._notes.setdefault(
                f"fewer than {reply.in_flight} async samples are in flight in a worker: their "
                "batches would take more than a quarter of the free memory"
            )

    def _redo(self, pending: PendingBatch) -> None:
        if not self.ring.fits(pending.slot):
            self.ring.give_back(pending.slot)
            pending.slot = self.ring.take()
        pending.make_whole()
        worker, lease = self._make_lease(pending, 0)
        self.pool.send(worker, [lease])

    # -- delivering ------------------------------------------------------------------------------

    def _ready_batch(self) -> PendingBatch | None:
        if self._in_order:
            pending = self._pending.get((self.pass_number, self._next))
            return pending if pending is not None and pending.is_done else None
        for pending in self._pending.values():
            if pending.is_done and pending.pass_number == self.pass_number:
                return pending
        return None

    def _close_batch(self, pending: PendingBatch, *, is_slot_lent: bool = False) -> None:
        del self._pending[pending.pass_number, pending.number]
        self._num_open -= 1
        if self._in_order:
            self._next = max(self._next, pending.number + 1)
        if not is_slot_lent:
            self.ring.give_back(pending.slot)

    def _deliver(self, pending: PendingBatch) -> Any:
        try:
            if pending.bad_samples:
                self._faults.record(pending.bad_samples)
            if pending.error is not None:
                raise rebuild(pending.error)
        except BaseException:
            self._close_batch(pending)
            self._lease()
            raise
        self._recorder.record_delivery(
            pending.pass_number, pending.number, pending.rows, self._worker_buffers, self._pending
        )
        self.ring.has_lent_pinned = False
        batch, is_slot_lent = pending.open(self.ring)
        state = pending.replies[0].state
        if state is not None:
            self._progress.note_stream(
                pending.worker, state, (pending.worker + 1) % self._num_workers
            )
        if pending.replies[0].has_ended:
            self._progress.note_end(pending.worker)
        self._close_batch(pending, is_slot_lent=is_slot_lent)
        self._lease()
        return batch

    def close(self) -> None:
        """Stop the workers and release the memory. Batches that the user holds stay valid."""
        self.pool.stop()
        self._recorder.remove_pool(self._worker_buffers)
        self._pending.clear()
        self._num_open, self._has_more = 0, False
        self.ring.close()
        self.is_closed = True


def _copy_index(index: Any) -> Any:
    """Return a copy, because a sampler may fill the same list or array again for the next batch."""
    if isinstance(index, torch.Tensor):
        return index.clone()
    if isinstance(index, list) and index and isinstance(index[0], (torch.Tensor, np.ndarray)):
        return [_copy_index(item) for item in index]
    return index.copy() if isinstance(index, (list, np.ndarray)) else index
