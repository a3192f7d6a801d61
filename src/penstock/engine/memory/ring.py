"""A ring of slots: batch memory that is written once, viewed by the user, and used again.

A slot goes back to the ring when the last view of it is gone. That moment is seen through a weak
reference on the *root* array of a delivery: slices, ``.numpy()``, ``.detach()``, tensors saved for
backward and memoryviews all keep the root alive; ``clone()`` does not need to.

Rules that keep this safe (each one was broken once in a prototype):
- the root comes from ``np.frombuffer`` on the mapping itself, because NumPy collapses ``.base``
  chains and a weak reference on a slice fires early;
- the callback may run inside garbage collection while a lock is held: it is a deque's own append;
- a forked child must not use its parent's slots again: what comes back there is dropped;
- a child that was forked while a slot was viewed may still read it: the slot is parked until that
  child has ended or called exec (:mod:`penstock.engine.memory.fork_watch`);
- nothing is ever unmapped by hand.

A raw ``data_ptr()`` kept after its tensor is gone cannot be seen: copy it.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from penstock.engine.memory.fork_watch import Eras, ForkWatch, process_forks
from penstock.engine.memory.shared_file import SharedFile, round_up

PROVISIONAL_BYTES = 1 << 30
"""Room of a slot before the first batch is known, where memory is sparse: address space only."""
PROVISIONAL_BYTES_ON_DISK = 1 << 20
FIRST_SLOTS, MAX_SLOTS_PER_SEGMENT = 8, 128


class Segment(NamedTuple):
    """A piece of the shared file that holds several slots: one mapping, one descriptor."""

    offset: int
    num_bytes: int


class SlotRef(weakref.ref["np.ndarray"]):
    """Goes to the ring when the last view of its slot is gone.

    No Python runs then: a Ctrl-C that comes in such a moment would be swallowed.
    """

    __slots__ = ("slot",)
    slot: Slot


class Slot:
    """The memory of one batch: a place in a segment, mapped here."""

    __slots__ = ("capacity", "era", "mapping", "pinned_bytes", "ref", "segment", "start")

    def __init__(self, segment: Segment, start: int, capacity: int, mapping: mmap.mmap) -> None:
        self.segment = segment
        self.start = start
        self.capacity = capacity
        self.mapping = mapping
        self.ref: SlotRef | None = None
        self.era = 0
        """When it was lent, counted in forks."""
        self.pinned_bytes = 0
        """See :mod:`penstock.engine.memory.pinned_ring`."""

    def view(self, num_bytes: int) -> np.ndarray:
        """A fresh root array over the first ``num_bytes``."""
        return np.frombuffer(self.mapping, dtype=np.uint8, count=num_bytes, offset=self.start)


class ParkedSlot(NamedTuple):
    """A slot that nobody views here, but children that were forked in ``eras`` may."""

    slot: Slot
    eras: Eras
    num_bytes: int


class Ring:
    """All slots of one loader. Used by the parent only; workers get places.

    Args:
        file: The shared file that the slots are cut from.
        max_held_bytes: How much memory the user may hold in views before deliveries become copies.
        note: Takes a note when memory is not to be had as usual.
        forks: The forks of this process. Private memory is copied by a fork, and needs no watch.
    """

    def __init__(
        self,
        file: SharedFile,
        *,
        max_held_bytes: int,
        note: Callable[[str], None] = lambda text: None,
        forks: ForkWatch = process_forks,
    ) -> None:
        self._file = file
        self._note = note
        self._max_held_bytes = max_held_bytes
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
        """Is what was lent last in pinned memory?"""

    def has_room(self) -> bool:
        """Is there a slot to take? One is made if it can be.

        Where it cannot (a full disk), a slot that is too small must do: what does not fit it comes
        through the pipe. And batches are delivered as copies from then on, so that slots come back:
        a caller that has others under way should wait for one of those.
        """
        self._collect()
        if self._free and self.fits(self._free[-1]):
            return True
        small = [slot for slot in self._free if not self.fits(slot)]
        if small and self._refusal is not None:
            return True
        self._free = [slot for slot in self._free if self.fits(slot)]
        self.num_slots -= len(small)  # too small by now: let them go
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
        """These are not used again. Nobody views them."""

    def take_if_any(self) -> Slot | None:
        """As :meth:`take`, but None where there is none."""
        if self._returned or self._parked:
            self._collect()
        if self._free and self._free[-1].capacity >= self.needed_bytes:
            return self._free.pop()
        return self._free.pop() if self.has_room() else None

    def take(self) -> Slot:
        """A slot that is not viewed and is large enough: a free one, or a new one.

        Raises:
            OSError: There is none, and no memory to make one. Nothing has changed: it may be tried
                again when views of batches are gone.
        """
        if not self.has_room():
            raise self._out_of_memory() from None
        return self._free.pop()  # the last one used: its pages are mapped and in the cache

    def _out_of_memory(self) -> OSError:
        error = self._refusal
        assert error is not None
        need = round_up(self.needed_bytes or PROVISIONAL_BYTES_ON_DISK) / (1 << 20)
        held = f", beside {len(self._held)} that you keep" if self._held else ""
        if self._parked:
            held += f" and {len(self._parked)} that processes which you forked may read"
        return OSError(
            error.errno,
            f"no memory for another batch ({need:.3g} MiB{held}): {error.strerror}, a smaller "
            "batch_size or prefetch_factor=, or batch.clone() for batches to keep",
        )

    def _add_segment(self) -> None:
        if self.needed_bytes:
            capacity = round_up(self.needed_bytes + self.needed_bytes // 4)
        else:
            capacity = PROVISIONAL_BYTES if self._file.is_sparse else PROVISIONAL_BYTES_ON_DISK
        count = min(MAX_SLOTS_PER_SEGMENT, max(FIRST_SLOTS, self.num_slots))
        try:
            self._add_slots(capacity, count)
        except OSError as error:
            self._note(
                f"slots are made one at a time ({os.strerror(error.errno or 0)}): a limit on "
                "address space, file size or open files (ulimit -v, -f, -n), or a full disk"
            )
            self._add_slots(round_up(self.needed_bytes or PROVISIONAL_BYTES_ON_DISK), 1)

    def _add_slots(self, capacity: int, count: int) -> None:
        segment = Segment(self._file.grow(capacity * count), capacity * count)
        mapping = self._file.map(*segment)
        for place in range(count):
            self._free.append(Slot(segment, place * capacity, capacity, mapping))
        self.num_slots += count

    def give_back(self, slot: Slot) -> None:
        """Return a slot of which no view was handed out."""
        self._free.append(slot)

    def fit(self, num_bytes: int) -> None:
        """Learn that batches need this much: slots taken from now on are large enough."""
        self.needed_bytes = max(self.needed_bytes, num_bytes)

    def fits(self, slot: Slot) -> bool:
        """Is the slot large enough for what batches are known to need?"""
        return slot.capacity >= self.needed_bytes

    def drop(self, slot: Slot) -> None:
        """Never use a slot again: a worker keeps a tensor that lies in it."""
        self.num_slots -= 1

    def is_crowded(self) -> bool:
        """Does the user hold too many views, so that the next batch should be a copy?"""
        self._collect()
        in_use = self._held_bytes + self._parked_bytes
        return self._refusal is not None or in_use >= self._max_held_bytes

    def lend(self, slot: Slot, num_bytes: int) -> np.ndarray:
        """The root array of a delivery; the slot comes back when its last view is gone."""
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
        """Nothing on this machine's CPUs reads the slot any more."""
        self._free.append(slot)

    def _park_if_forked(self, slot: Slot) -> bool:
        """Set a slot aside if there was a fork since it was lent."""
        era = slot.era if self._forks is None else self._forks.era()
        if era == slot.era:
            return False
        num_bytes = self._held.get(slot, 0)
        self._parked.append(ParkedSlot(slot, Eras(slot.era, era), num_bytes))
        self._parked_bytes += num_bytes
        return True

    def _recycle_parked(self) -> None:
        """Use slots again whose readers have ended."""
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
        """See :class:`penstock.engine.memory.fork_watch.SlotOwner`. Called from any thread."""
        for slot in list(self._held):
            yield Eras(slot.era, sys.maxsize)
        for one in list(self._parked):
            yield one.eras

    def _has_returned(self) -> bool:
        """Is there a slot to take back? Not in a forked child: its parent may still view it."""
        if self._returned and os.getpid() != self._owner:
            self._returned.clear()
        return bool(self._returned)

    def _end_loan(self, slot: Slot) -> None:
        slot.ref = None
        self._held_bytes -= self._held.pop(slot, 0)

    def close(self) -> None:
        """Forget the slots. Views that the user still holds stay valid."""
        for slot in self._held:
            slot.ref = None  # it does not come back any more
        self._held.clear()
        self._parked.clear()
        self._free.clear()
        self._returned.clear()
        self._file.close()
