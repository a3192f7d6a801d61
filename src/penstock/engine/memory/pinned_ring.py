"""A ring of pinned slots: the GPU copies straight out of them, and is waited for.

    last view gone --> resting --(fence)--> cooling --(fence is over)--> free --> a worker

The views of a slot may be gone while a copy that the user asked for still reads it. So a slot rests
until a fence, which stands after everything asked of the GPU so far, is over. One fence serves all
slots that rest. Who pins, and what a fence is, the caller says: see :class:`Pinner`.
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
"""How long a ring that may not grow any more waits for the GPU before it gives up."""


class Pinner(Protocol):
    """Page-locks memory, and knows when no GPU reads it any more."""

    def may_pin(self) -> bool:
        """May memory be pinned and unpinned now? Not while a graph is captured."""

    def pin(self, memory: np.ndarray, owner: object) -> bool:
        """Page-lock it; False where that is not to be had. Keeps ``owner`` until it is undone."""

    def unpin(self, memory: np.ndarray) -> None:
        """Undo :meth:`pin`; nothing reads the memory."""

    def unpin_later(self, pieces: list[np.ndarray]) -> None:
        """Undo it once nothing reads them any more. May be called inside garbage collection."""

    def may_ask(self) -> bool:
        """May the GPU be asked anything now? Not while a graph is captured."""

    def fence(self) -> Callable[[], bool]:
        """A question to ask again and again: are all copies until this call complete?"""


class PinnedRing(Ring):
    """As :class:`Ring`, over pinned memory.

    Args:
        pinner: Does the pinning. Slots that it refuses are handed out as they are.
    """

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
        if 0 < slot.pinned_bytes < num_bytes:  # in part only: no GPU copies from such memory
            copied: np.ndarray = slot.view(num_bytes).copy()
            self.give_back(slot)
            return copied
        return super().lend(slot, num_bytes)

    def _pin(self, slot: Slot, num_bytes: int) -> None:
        """Pin what is used, not the whole of a provisional slot; more where batches grow.

        1.5 microseconds a page: 4 ms for 10 MB (H200 host, pages of 4 KiB).
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
        """At once: it was free a moment ago, so no GPU reads it."""
        self._pinner.unpin(slot.view(slot.pinned_bytes))
        self._pinned.discard(slot)
        slot.pinned_bytes = 0

    def has_room(self) -> bool:
        self._collect()
        if not self._free and self._cooling and self._is_large() and self._pinner.may_ask():
            self._wait()
        return super().has_room()

    def _is_large(self) -> bool:
        return self.num_slots * self.needed_bytes > self._max_held_bytes

    def _wait(self) -> None:
        """The ring has grown enough: wait for the GPU."""
        until_s = time.monotonic() + MAX_COOLING_S
        while not self._free and self._cooling:
            if time.monotonic() > until_s:
                raise DeviceFailed(
                    f"the GPU has not finished its work within {MAX_COOLING_S:.0f} s, and copies "
                    f"from {self.num_slots} pinned batches may still be under way",
                    likely="a kernel that hangs, or another process that holds the GPU",
                    remedy="nvidia-smi (rocm-smi) to see who uses it",
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
                self._unpin(slot)  # before the batch in it is handed out, as ordinary memory
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
        """Unpin what is not viewed once the GPU is done with it, the rest with its last view.

        What workers had when they were stopped is unpinned like what was free.
        """
        self._is_closed = True
        self._returned.on_return = self._unpin_later  # from now on the last view unpins
        while self._returned:
            self._end_loan(self._returned.popleft().slot)
        self._resting, self._cooling = [], deque()
        held = {slot: slot.ref for slot in self._held}
        super().close()
        for slot, ref in held.items():
            if ref is not None and ref() is not None:
                slot.ref = ref  # the pinner keeps the slot, and so this, until it is unpinned
        self._unpin_later(*[slot for slot in list(self._pinned) if slot.ref is None])

    def __del__(self) -> None:
        if not self._is_closed and not sys.is_finalizing():
            self.close()


class _ReturnQueue(deque[SlotRef]):
    """Slots whose last view is gone; ``on_return`` takes them once the ring has closed."""

    on_return: Callable[[Slot], None] | None = None

    def append(self, ref: SlotRef) -> None:
        if self.on_return is None:
            super().append(ref)
        else:
            self.on_return(ref.slot)
