"""A ring of pinned slots, which the GPU copies from directly.

    last view gone --> resting --(fence)--> cooling --(fence passed)--> free --> a worker

When the last view of a slot is gone, an asynchronous copy to the GPU may still be reading it. The
slot is reused only after a fence has passed. The fence comes after all GPU work queued so far, and
one fence covers all resting slots. The caller provides pinning and fences: see :class:`Pinner`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from penstock.engine.memory.fork_watch import ForkWatch, process_forks
from penstock.engine.memory.ring import Ring, Slot, SlotRef
from penstock.engine.memory.shared_file import SharedFile, round_up
from penstock.errors import DeviceFailed

MAX_COOLING_S = 120.0
"""How long a ring at its maximum size waits for the GPU before it raises an error."""


class Pinner(Protocol):
    """Page-locks memory and creates fences for GPU copies."""

    def may_pin(self) -> bool:
        """Return True if memory can be pinned and unpinned now. False during graph capture."""

    def pin(self, memory: np.ndarray, owner: object) -> bool:
        """Page-lock ``memory``. Return False on failure. Keeps ``owner`` alive until unpinned."""

    def unpin(self, memory: np.ndarray) -> None:
        """Undo :meth:`pin`. Nothing is reading the memory."""

    def unpin_later(self, pieces: list[np.ndarray]) -> None:
        """Unpin once nothing reads the pieces. Can be called during garbage collection."""

    def may_ask(self) -> bool:
        """Return True if the GPU can be queried now. False during graph capture."""

    def fence(self) -> Callable[[], bool]:
        """Return a function to poll. It returns True once all copies queued so far are complete."""


class PinnedRing(Ring):
    """A :class:`Ring` over pinned memory.

    Args:
        pinner: Pins the slots. Slots that cannot be pinned are handed out unpinned.
    """

    _is_closed = True  # until there is something to close: Ctrl-C can interrupt __init__

    def __init__(
        self,
        file: SharedFile,
        *,
        pinner: Pinner,
        max_held_bytes: int,
        note: Callable[[str], None] = lambda text: None,
        forks: ForkWatch = process_forks,
    ) -> None:
        super().__init__(file, max_held_bytes=max_held_bytes, note=note, forks=forks)
        self._pinner = pinner
        self._returned: _ReturnQueue = _ReturnQueue()
        self._pinned: set[Slot] = set()
        self._resting: list[Slot] = []
        self._cooling: deque[tuple[Callable[[], bool], list[Slot]]] = deque()
        self._is_closed = False

    def lend(self, slot: Slot, num_bytes: int) -> np.ndarray:
        if slot.pinned_bytes < num_bytes and self._pinner.may_pin():
            self._pin(slot, num_bytes)
        self.has_lent_pinned = slot.pinned_bytes >= num_bytes
        if 0 < slot.pinned_bytes < num_bytes:  # partly pinned: a GPU cannot copy from it
            copied: np.ndarray = slot.view(num_bytes).copy()
            self.give_back(slot)
            return copied
        return super().lend(slot, num_bytes)

    def _pin(self, slot: Slot, num_bytes: int) -> None:
        """Pin the used part of a slot, with 25 % extra if batches have grown.

        A provisional slot is much larger than a batch. Pinning costs 1.5 microseconds per page:
        4 ms for 10 MB (H200 host, pages of 4 KiB).
        """
        wanted = num_bytes
        if slot.pinned_bytes:
            self._unpin(slot)
            wanted += num_bytes // 4
        wanted = min(slot.capacity, round_up(wanted))
        if self._pinner.pin(slot.view(wanted), slot):
            slot.pinned_bytes = wanted
            self._pinned.add(slot)

    def _unpin(self, slot: Slot) -> None:
        """Unpin immediately. The slot was just free, so no GPU is reading it."""
        self._pinner.unpin(slot.view(slot.pinned_bytes))
        self._pinned.discard(slot)
        slot.pinned_bytes = 0

    def has_room(self) -> bool:
        self._collect()
        if not self._free and self._cooling and self._is_large() and self._pinner.may_ask():
            self._wait()
        return super().has_room()

    def _is_large(self) -> bool:
        return self.num_slots * self.needed_bytes > self.max_held_bytes

    def _wait(self) -> None:
        """Wait for the GPU until a slot is free, because the ring must not grow further."""
        until_s = time.monotonic() + MAX_COOLING_S
        while not self._free and self._cooling:
            if time.monotonic() > until_s:
                raise DeviceFailed(
                    f"the GPU did not finish its work within {MAX_COOLING_S:.0f} s, and copies "
                    f"from {self.num_slots} pinned batches may still be running",
                    likely="a kernel hangs, or another process blocks the GPU",
                    remedy="nvidia-smi (or rocm-smi) to list the processes that use the GPU",
                )
            time.sleep(50e-6)
            self._collect()

    def _recycle(self, slot: Slot) -> None:
        (self._resting if slot.pinned_bytes else self._free).append(slot)

    def _collect(self) -> None:
        super()._collect()
        if not (self._resting or self._cooling) or not self._pinner.may_ask():
            return
        if self._resting and (not self._free or 2 * len(self._resting) >= self.num_slots):
            self._cooling.append((self._pinner.fence(), self._resting))
            self._resting = []
        while self._cooling and self._cooling[0][0]():
            self._free += self._cooling.popleft()[1]

    def drop(self, slot: Slot) -> None:
        if slot.pinned_bytes:
            if self._pinner.may_pin():
                self._unpin(slot)  # its batch is handed out as ordinary memory
            else:
                self._unpin_later(slot)
        super().drop(slot)

    def _let_go(self, slots: list[Slot]) -> None:
        self._unpin_later(*slots)

    def _unpin_later(self, *slots: Slot) -> None:
        pinned = [slot for slot in slots if slot in self._pinned]
        self._pinned.difference_update(pinned)
        if pinned:
            self._pinner.unpin_later([slot.view(slot.pinned_bytes) for slot in pinned])

    def close(self) -> None:
        """Unpin all slots: unused ones when the GPU is done, viewed ones with their last view.

        Slots that were assigned to workers count as unused.
        """
        self._is_closed = True
        self._returned.on_return = self._unpin_later  # the last view of a slot unpins it
        while self._returned:
            self._end_loan(self._returned.popleft().slot)
        self._resting, self._cooling = [], deque()
        held = {slot: slot.ref for slot in self._held}
        super().close()
        for slot, ref in held.items():
            if ref is not None and ref() is not None:
                # The pinner keeps the slot, and with it the ref, until the slot is unpinned.
                slot.ref = ref
        self._unpin_later(*[slot for slot in list(self._pinned) if slot.ref is None])

    def __del__(self) -> None:
        if not self._is_closed and not sys.is_finalizing():
            self.close()


class _ReturnQueue(deque[SlotRef]):
    """Slots whose last view is gone. Once the ring is closed, ``on_return`` receives them."""

    on_return: Callable[[Slot], None] | None = None

    def append(self, ref: SlotRef) -> None:
        if self.on_return is None:
            super().append(ref)
        else:
            self.on_return(ref.slot)
