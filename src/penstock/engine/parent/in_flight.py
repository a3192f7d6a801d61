"""Work in flight: batches that workers are loading, and the leases that each has not answered.

Used in the parent. Workers fill the slot of a batch. The parent only creates views of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.memory import payload
from penstock.engine.memory.batch_layout import view_batch
from penstock.engine.memory.messages import Lease, Reply
from penstock.engine.memory.ring import Ring, Slot

if TYPE_CHECKING:
    from penstock.engine.pickling.exceptions import ErrorReport

SLOW = 2.0
"""Workers that take less than this many times as long as the fastest one count as equal."""
NUM_RECENT = 3
"""The fastest of this many batches tells how long a worker takes. The first batch of a new worker,
and one that a disk held up, do not count as slow."""
FADE = 0.02
"""The recorded time of an idle slow worker falls by this fraction for every lease per worker that
the others get. After a while it gets a lease again, which shows whether it is still slow."""


class PendingBatch:
    """One batch in flight."""

    def __init__(
        self, pass_number: int, number: int, index: Any, position: int, rows: int, slot: Slot
    ) -> None:
        self.pass_number = pass_number
        self.number = number
        self.index = index
        self.position = position
        self.rows = rows
        self.slot = slot
        self.parts: list[tuple[int, int]] = []
        """First and last (exclusive) row of each part."""
        self.replies: dict[int, Reply] = {}
        self.layouts: dict[int, Any] = {}
        self.worker = -1
        """The worker that answered for the first part."""
        self.is_done = False
        self.bad_samples: list[Any] = []
        """Failures of the batch's samples."""
        self._has_error = False

    def take(self, worker: int, reply: Reply, layout: Any) -> None:
        """Record a worker's reply for a part. ``layout`` describes what it wrote into the slot."""
        self.replies[reply.part] = reply
        if layout is not None:
            self.layouts[reply.part] = layout
        if reply.part == 0:
            self.worker = worker
        if reply.kind == "error":
            self._has_error = True
        if reply.bad_samples:
            found = [*self.bad_samples, *reply.bad_samples]
            self.bad_samples = sorted(found, key=lambda sample: sample.position)

    @property
    def is_complete(self) -> bool:
        return len(self.replies) == len(self.parts)

    @property
    def kind(self) -> str:
        return self.replies[0].kind

    @property
    def must_be_redone(self) -> bool:
        """True if the batch must be loaded again as a whole.

        Its parts do not match, or they did not fit the slot.
        """
        if len(self.parts) == 1:
            return False
        kinds = {reply.kind for reply in self.replies.values()}
        if "error" in kinds:
            return False
        return kinds != {"fixed"} or len(set(self.layouts.values())) > 1

    def make_whole(self) -> None:
        """Discard all replies and load the batch again in one part."""
        self.parts, self.replies, self.layouts = [(0, self.rows)], {}, {}
        self.bad_samples = []

    @property
    def error(self) -> ErrorReport | None:
        """The error of the first part that failed."""
        for _, reply in sorted(self.replies.items()) if self._has_error else ():
            if reply.kind == "error":
                return reply.content  # type: ignore[no-any-return]
        return None

    def open(self, ring: Ring) -> tuple[Any, bool]:
        """Return the batch as the user sees it, and whether its slot stays in use."""
        if self.kind == "payload":
            return _open_payload(ring, self.slot, self.replies[0])
        contents = [self.replies[part].content for part in range(len(self.parts))]
        return _open_fixed(ring, self.slot, self.rows, self.layouts[0], contents, self.parts), True


class LeaseQueue:
    """The leases that each worker has not answered yet, in the order it processes them.

    Args:
        in_turn: Assign leases to the workers in strict rotation (per-worker randomness, iterable
            datasets). Otherwise, the worker with the least work is next.
        ready: The workers that can take leases, if not all of them. See
            :class:`penstock.engine.parent.pools.Pool`. These are of several machines. The one that
            will be done first is next, because batches are delivered in order: a slow machine with
            its full share would hold up all others.
    """

    def __init__(
        self, num_workers: int, *, in_turn: bool, ready: Collection[int] | None = None
    ) -> None:
        self._ready = range(num_workers) if ready is None else ready
        self._has_machines = ready is not None
        self._loads = [0] * num_workers
        self._sample_ns = [0.0] * num_workers
        """Time that each worker takes for a sample. 0: not known."""
        self._recent_ns = [deque[float](maxlen=NUM_RECENT) for _ in range(num_workers)]
        self._owed: list[dict[tuple[int, int, int], Lease]] = [{} for _ in range(num_workers)]
        self._in_turn = in_turn
        self.begin()

    def begin(self, first: int = 0) -> None:
        """Start an epoch. All workers are active again, starting with worker ``first``."""
        self._is_active = [True] * len(self._loads)
        self._last = first - 1

    def give(self, lease: Lease, limit: int | None = None) -> int:
        """Assign a lease and return its worker. Skips workers with ``limit`` or more samples."""
        worker = self._choose(limit, lease.num_samples)
        self._owed[worker][lease[:3]] = lease
        self._loads[worker] += lease.num_samples
        return worker

    def take_back(self, worker: int, key: tuple[int, int, int]) -> None:
        """Remove a lease that a worker has answered."""
        self._loads[worker] -= self._owed[worker].pop(key).num_samples

    def note_time(self, worker: int, sample_ns: float) -> None:
        """Record how long a worker took for a sample."""
        if self._has_machines:
            self._recent_ns[worker].append(sample_ns)
            self._sample_ns[worker] = min(self._recent_ns[worker])

    def forget_time(self, worker: int) -> None:
        """Forget how long a worker takes. A new one may be on another machine."""
        self._sample_ns[worker] = 0.0
        self._recent_ns[worker].clear()

    def owed(self, worker: int) -> list[Lease]:
        """Return the leases that a worker has not answered. It is working on the first."""
        return list(self._owed[worker].values())

    def amend(self, worker: int, lease: Lease) -> None:
        """Replace the lease that has the same key."""
        self._owed[worker][lease.key] = lease

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def has_owed(self) -> bool:
        return any(self._owed)

    def retire(self, worker: int) -> None:
        """Give a worker no more leases in this epoch."""
        self._is_active[worker] = False

    @property
    def has_active(self) -> bool:
        return any(self._is_active)

    def _choose(self, limit: int | None, num_samples: int) -> int:
        num_workers = len(self._loads)
        if not self._in_turn:
            if self._has_machines:
                return self._choose_first_done(num_samples)
            return min(self._ready, key=self._loads.__getitem__)
        for _ in range(num_workers):
            self._last = (self._last + 1) % num_workers
            if self._is_active[self._last] and (limit is None or self._loads[self._last] < limit):
                return self._last
        return self._is_active.index(True)

    def _choose_first_done(self, num_samples: int) -> int:
        """Return the worker that will have loaded the samples first."""
        times = self._sample_ns
        fastest_ns = min((times[one] for one in self._ready if times[one]), default=1.0)
        slow = {one: times[one] for one in self._ready if times[one] >= SLOW * fastest_ns}

        def done_ns(worker: int) -> float:
            return (self._loads[worker] + num_samples) * slow.get(worker, fastest_ns)

        chosen = min(self._ready, key=done_ns)
        for worker in slow:
            if worker != chosen and not self._loads[worker]:
                times[worker] *= 1 - FADE / len(self._ready)
        return chosen


def _open_payload(ring: Ring, slot: Slot, reply: Reply) -> tuple[Any, bool]:
    """Return a batch that collate_fn made, and whether its slot stays in use."""
    written: payload.PayloadLocation = reply.content
    if written.inline is not None:
        return payload.read(written, None), reply.is_slot_lost
    root = _memory_of(ring, slot, written.num_bytes, is_slot_lost=reply.is_slot_lost)
    return payload.read(written, root), True


def _open_fixed(
    ring: Ring,
    slot: Slot,
    rows: int,
    layout: Any,
    contents: list[Any],
    parts: list[tuple[int, int]],
) -> Any:
    """Return a batch of the default collate, assembled from the parts that workers filled.

    Args:
        contents: Contents of the "fixed" replies.
        parts: First and last (exclusive) row of each part.
    """
    _, num_bytes = layout.offsets(rows)
    counts = [content[2] for content in contents]
    filled = sum(counts)
    objects = contents[0][3]
    for content in contents[1:]:
        objects = [left + right for left, right in zip(objects, content[3], strict=True)]
    if filled < rows:
        first_rows = [first for first, _ in parts]
        _close_gaps(slot.view(num_bytes), layout, rows, first_rows, counts)
    root = _memory_of(ring, slot, num_bytes)
    return view_batch(layout, root, rows, filled, objects)


def _close_gaps(
    memory: np.ndarray, layout: Any, rows: int, first_rows: list[int], counts: list[int]
) -> None:
    """Move parts up over rows of samples that were skipped, so that the rows are contiguous."""
    offsets, _ = layout.offsets(rows)
    for leaf, offset in zip(layout.leaves, offsets, strict=True):
        size, end = leaf.item_bytes, 0
        for first, count in zip(first_rows, counts, strict=True):
            source = offset + first * size
            target = offset + end * size
            if source != target:
                memory[target : target + count * size] = memory[source : source + count * size]
            end += count


def _memory_of(ring: Ring, slot: Slot, num_bytes: int, *, is_slot_lost: bool = False) -> np.ndarray:
    """Return the slot's bytes for a delivery: lent, or copied if the user holds many already."""
    if is_slot_lost:
        ring.drop(slot)
        return slot.view(num_bytes)
    if ring.is_crowded():
        copied: np.ndarray = slot.view(num_bytes).copy()
        ring.give_back(slot)
        return copied
    return ring.lend(slot, num_bytes)
