"""A ring of slots: batch memory that a worker writes, the user views, and the ring reuses.

A slot returns to the ring when the last view of it is gone. The ring detects this with a weak
reference to the *root* array of a delivery. Slices, ``.numpy()``, ``.detach()``, tensors saved for
backward and memoryviews all keep the root alive. A ``clone()`` does not need the slot.

Safety rules:
- The root comes from ``np.frombuffer`` on the mapping itself, because NumPy collapses ``.base``
  chains and a weak reference to a slice fires early.
- The callback can run during garbage collection while a lock is held, so it is ``deque.append``.
- A forked child must not reuse its parent's slots. Slots returned in a child are dropped.
- A child that was forked while a slot was viewed may still read the slot. The slot is parked until
  that child has exited or called exec (:mod:`penstock.engine.memory.fork_watch`).
- Memory is never unmapped explicitly.

A raw ``data_ptr()`` kept after its tensor is gone is not detected. Copy the data instead.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from penstock.engine.memory.fork_watch import Eras, ForkWatch, process_forks
from penstock.engine.memory.shared_file import Segment, SharedFile, round_up
from penstock.named_tuple import NamedTuple

PROVISIONAL_BYTES = 1 << 30
"""Capacity of a slot before the first batch. Sparse memory, so this is only address space."""
PROVISIONAL_BYTES_ON_DISK = 1 << 20
FIRST_SLOTS, MAX_SLOTS_PER_SEGMENT = 8, 128


class SlotRef(weakref.ref["np.ndarray"]):
    """A weak reference that is queued for the ring when the last view of its slot is gone.

    Its callback runs no Python code, because a Ctrl-C during the callback would be lost.
    """

    __slots__ = ("slot",)
    slot: Slot


class Slot:
    """The memory of one batch: a range of a mapped segment."""

    __slots__ = ("capacity", "era", "mapping", "pinned_bytes", "ref", "segment", "start")

    def __init__(self, segment: Segment, start: int, capacity: int, mapping: mmap.mmap) -> None:
        self.segment = segment
        self.start = start
        self.capacity = capacity
        self.mapping = mapping
        self.ref: SlotRef | None = None
        self.era = 0
        """The fork era in which the slot was lent."""
        self.pinned_bytes = 0
        """See :mod:`penstock.engine.memory.pinned_ring`."""

    def view(self, num_bytes: int) -> np.ndarray:
        """Return a new root array over the first ``num_bytes``."""
        return np.frombuffer(self.mapping, dtype=np.uint8, count=num_bytes, offset=self.start)


class ParkedSlot(NamedTuple):
    """A slot without views in this process that children forked in ``eras`` may still read."""

    slot: Slot
    eras: Eras
    num_bytes: int


class Ring:
    """All slots of one loader. Used only by the parent; workers receive offsets.

    Args:
        file: The shared file that contains the slots.
        max_held_bytes: Above this amount of memory held in views, batches are delivered as copies.
        note: Called with a message if slots cannot be allocated in the usual way.
        forks: Tracks forks of this process. Not used for private memory, which a fork copies.
    """

    def __init__(
        self,
        file: SharedFile,
        *,
        max_held_bytes: int,
        note: Callable[[str], None] = lambda text: None,
        forks: ForkWatch = process_forks,
    ) -> None:
        self.file = file
        self._note = note
        self.max_held_bytes = max_held_bytes
        self.needed_bytes = 0
        self._free: list[Slot] = []
        self._returned: deque[SlotRef] = deque()
        self._owner = os.getpid()
        self._held: dict[Slot, int] = {}
        self._held_bytes = 0
        self._forks = None if file.is_private else forks
        self._parked: list[ParkedSlot] = []
        self._parked_bytes = 0
        if self._forks is not None:
            self._forks.add_owner(self)
        self._refusal: OSError | None = None
        self.num_slots = 0
        self.has_lent_pinned = False
        """True if the slot lent last is pinned."""

    def has_room(self) -> bool:
        """Return True if there is a slot to take. Adds slots if possible.

        If no slot can be added (for example on a full disk), slots that are too small are used, and
        data that does not fit is sent through the pipe. Batches are then delivered as copies, so
        that slots return sooner. A caller with other batches in flight should wait for one of them.
        """
        self._collect()
        if self._free and self.fits(self._free[-1]):
            return True
        small = [slot for slot in self._free if not self.fits(slot)]
        if small and self._refusal is not None:
            return True
        self._free = [slot for slot in self._free if self.fits(slot)]
        self.num_slots -= len(small)  # too small now: release them
        try:
            if not self._free:
                self._add_segment()
        except OSError as error:
            self._refusal = error
            self._free = small
            self.num_slots += len(small)
        else:
            self._let_go(small)
        return bool(self._free)

    def _let_go(self, slots: list[Slot]) -> None:
        """Called with slots that have no views and are not used again."""

    def take_if_any(self) -> Slot | None:
        """Like :meth:`take`, but return None if no slot is available."""
        if self._returned or self._parked:
            self._collect()
        if self._free and self._free[-1].capacity >= self.needed_bytes:
            return self._free.pop()
        return self._free.pop() if self.has_room() else None

    def take(self) -> Slot:
        """Return an unused slot that is large enough. Adds slots if none is free.

        Raises:
            OSError: No slot is free, and there is no memory for a new one. The ring is unchanged,
                so the call can be repeated once views of batches are gone.
        """
        if not self.has_room():
            raise self._out_of_memory() from None
        return self._free.pop()  # the most recently used one: its pages are mapped and cached

    def _out_of_memory(self) -> OSError:
        error = self._refusal
        assert error is not None
        need = round_up(self.needed_bytes or PROVISIONAL_BYTES_ON_DISK) / (1 << 20)
        held = f"; batches your code holds: {len(self._held)}" if self._held else ""
        if self._parked:
            held += f"; batches your forked processes may read: {len(self._parked)}"
        return OSError(
            error.errno,
            f"no memory for another batch ({need:.3g} MiB{held}): {error.strerror}, a smaller "
            "batch_size or prefetch_factor=, or batch.clone() for batches you keep",
        )

    def _add_segment(self) -> None:
        if self.needed_bytes:
            capacity = round_up(self.needed_bytes + self.needed_bytes // 4)
        else:
            capacity = PROVISIONAL_BYTES if self.file.is_sparse else PROVISIONAL_BYTES_ON_DISK
        count = min(MAX_SLOTS_PER_SEGMENT, max(FIRST_SLOTS, self.num_slots))
        try:
            self._add_slots(capacity, count)
        except OSError as error:
            self._note(
                f"slots are allocated one at a time ({os.strerror(error.errno or 0)}) because of "
                "a limit on address space, file size or open files (ulimit -v, -f, -n), or a full "
                "disk"
            )
            self._add_slots(round_up(self.needed_bytes or PROVISIONAL_BYTES_ON_DISK), 1)

    def _add_slots(self, capacity: int, count: int) -> None:
        segment = Segment(self.file.grow(capacity * count), capacity * count)
        mapping = self.file.map(*segment)
        for place in range(count):
            self._free.append(Slot(segment, place * capacity, capacity, mapping))
        self.num_slots += count

    def give_back(self, slot: Slot) -> None:
        """Return a slot to the ring. It must not have been lent."""
        self._free.append(slot)

    def fit(self, num_bytes: int) -> None:
        """Raise the required slot size to ``num_bytes`` for slots taken later."""
        self.needed_bytes = max(self.needed_bytes, num_bytes)

    def fits(self, slot: Slot) -> bool:
        """Return True if the slot is large enough for the batches seen so far."""
        return slot.capacity >= self.needed_bytes

    def drop(self, slot: Slot) -> None:
        """Stop using a slot, because a worker keeps a tensor in it."""
        self.num_slots -= 1

    def is_crowded(self) -> bool:
        """Return True if the next batch should be a copy, because views hold too much memory."""
        self._collect()
        in_use = self._held_bytes + self._parked_bytes
        return self._refusal is not None or in_use >= self.max_held_bytes

    def lend(self, slot: Slot, num_bytes: int) -> np.ndarray:
        """Return the root array of a delivery. The slot returns when its last view is gone."""
        root = slot.view(num_bytes)
        if self._forks is not None:
            slot.era = self._forks.era()
        slot.ref = ref = SlotRef(root, self._returned.append)
        ref.slot = slot
        self._held[slot] = num_bytes
        self._held_bytes += num_bytes
        return root

    def _collect(self) -> None:
        while self._has_returned():
            slot = self._returned.popleft().slot
            is_parked = self._park_if_forked(slot)
            self._end_loan(slot)
            if not is_parked:
                self._recycle(slot)
        if self._parked and os.getpid() == self._owner:
            self._recycle_parked()

    def _recycle(self, slot: Slot) -> None:
        """Reuse a slot that no process reads."""
        self._free.append(slot)

    def _park_if_forked(self, slot: Slot) -> bool:
        """Park a slot if the process has forked since it was lent. Return True if parked."""
        era = slot.era if self._forks is None else self._forks.era()
        if era == slot.era:
            return False
        num_bytes = self._held.get(slot, 0)
        self._parked.append(ParkedSlot(slot, Eras(slot.era, era), num_bytes))
        self._parked_bytes += num_bytes
        return True

    def _recycle_parked(self) -> None:
        """Recycle parked slots whose readers have exited."""
        assert self._forks is not None
        living = self._forks.living()
        kept: list[ParkedSlot] = []
        over: list[ParkedSlot] = []
        for one in self._parked:
            (kept if any(map(one.eras.overlaps, living)) else over).append(one)
        if over:
            self._parked, self._parked_bytes = kept, sum(one.num_bytes for one in kept)
        for one in over:
            self._recycle(one.slot)

    def eras_in_use(self) -> Iterator[Eras]:
        """See :class:`penstock.engine.memory.fork_watch.SlotOwner`. Thread-safe."""
        for slot in list(self._held):
            yield Eras(slot.era, sys.maxsize)
        for one in list(self._parked):
            yield one.eras

    def _has_returned(self) -> bool:
        """Return True if a slot was returned. Never in a forked child: the parent may view it."""
        if self._returned and os.getpid() != self._owner:
            self._returned.clear()
        return bool(self._returned)

    def _end_loan(self, slot: Slot) -> None:
        slot.ref = None
        self._held_bytes -= self._held.pop(slot, 0)

    def close(self) -> None:
        """Release the slots. Views held by the user stay valid."""
        for slot in self._held:
            slot.ref = None  # the slot does not return
        self._held.clear()
        self._parked.clear()
        self._free.clear()
        self._returned.clear()
        self.file.close()
