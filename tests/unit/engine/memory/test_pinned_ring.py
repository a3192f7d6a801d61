"""A pinned slot is not reused before the GPU completes the work submitted until then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.engine.memory import pinned_ring as pinned
from penstock.engine.memory.pinned_ring import PinnedRing
from penstock.engine.memory.ring import FIRST_SLOTS, Slot
from penstock.engine.memory.shared_file import SharedFile
from penstock.errors import DeviceFailed

pytestmark = pytest.mark.legacy

NUM_BYTES = 4096


class Pinner:
    """Pins nothing and records every call. The test controls when a fence completes.

    Args:
        is_safe: False for the negative control, whose fences complete immediately.
    """

    def __init__(self, *, is_safe: bool = True) -> None:
        self.is_safe = is_safe
        self.is_busy = False
        self.can_ask = True
        self.is_willing = True
        self.pinned: dict[int, int] = {}
        self.num_fences = 0

    def may_pin(self) -> bool:
        return self.can_ask

    def pin(self, memory: np.ndarray, owner: object) -> bool:
        assert memory.ctypes.data not in self.pinned, "pinned twice"
        if self.is_willing:
            self.pinned[memory.ctypes.data] = memory.nbytes
        return self.is_willing

    def unpin(self, memory: np.ndarray) -> None:
        del self.pinned[memory.ctypes.data]

    def unpin_later(self, pieces: list[np.ndarray]) -> None:
        for memory in pieces:
            self.unpin(memory)

    def may_ask(self) -> bool:
        return self.can_ask

    def fence(self) -> Callable[[], bool]:
        assert self.can_ask, "asked during a capture"
        self.num_fences += 1
        return lambda: not (self.is_safe and self.is_busy)


def ring_of(pinner: Pinner, max_held_bytes: int = 1 << 30) -> PinnedRing:
    ring = PinnedRing(SharedFile.create(), pinner=pinner, max_held_bytes=max_held_bytes)
    ring.fit(NUM_BYTES)
    return ring


def deliver(ring: PinnedRing) -> Slot:
    """Deliver a batch that is dropped immediately, as after ``x.cuda(non_blocking=True)``."""
    slot = ring.take()
    ring.lend(slot, NUM_BYTES)
    return slot


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_slot_is_not_taken_again_before_its_fence_is_over(is_safe: bool) -> None:
    """Negative control: with a fence that is always complete, the slot is reused."""
    pinner = Pinner(is_safe=is_safe)
    pinner.is_busy = True
    ring = ring_of(pinner)
    used = {deliver(ring) for _ in range(FIRST_SLOTS)}
    again = [ring.take() for _ in range(FIRST_SLOTS)]
    assert used.isdisjoint(again) is is_safe
    pinner.is_busy = False
    ring.close()
    assert pinner.pinned == {}


def test_slots_come_back_when_the_fence_is_over() -> None:
    pinner = Pinner()
    ring = ring_of(pinner)
    pinner.is_busy = True
    used = {deliver(ring) for _ in range(FIRST_SLOTS)}
    fresh = ring.take()
    assert fresh not in used
    pinner.is_busy = False
    ring._collect()
    assert used <= set(ring._free)
    ring.close()


def test_one_fence_serves_many_slots() -> None:
    pinner = Pinner()
    ring = ring_of(pinner)
    for _ in range(100 * FIRST_SLOTS):
        deliver(ring)
    assert ring.num_slots == FIRST_SLOTS
    assert pinner.num_fences <= 100 * FIRST_SLOTS / (FIRST_SLOTS // 2)
    assert len(pinner.pinned) <= FIRST_SLOTS
    ring.close()


def test_the_ring_grows_while_the_gpu_is_busy_and_then_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinner = Pinner()
    pinner.is_busy = True
    ring = ring_of(pinner, max_held_bytes=3 * FIRST_SLOTS * NUM_BYTES)
    for _ in range(4 * FIRST_SLOTS):
        deliver(ring)
    assert ring.num_slots == 4 * FIRST_SLOTS, "twice as large, and twice again"
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        pinner.is_busy = len(naps) < 5

    monkeypatch.setattr(pinned.time, "sleep", nap)
    deliver(ring)
    assert len(naps) == 5, "it waited for the GPU"
    assert ring.num_slots == 4 * FIRST_SLOTS
    ring.close()


def test_a_gpu_that_never_gets_done_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "MAX_COOLING_S", 0.05)
    pinner = Pinner()
    pinner.is_busy = True
    ring = ring_of(pinner, max_held_bytes=1)
    for _ in range(FIRST_SLOTS):
        deliver(ring)
    with pytest.raises(DeviceFailed, match=f"copies from {FIRST_SLOTS} pinned batches"):
        ring.take()
    ring.close()
    assert pinner.pinned == {}


def test_during_a_capture_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting would block the thread that captures."""
    monkeypatch.setattr(pinned, "MAX_COOLING_S", 3600.0)
    pinner = Pinner()
    pinner.is_busy = True
    ring = ring_of(pinner, max_held_bytes=1)
    for _ in range(FIRST_SLOTS):
        deliver(ring)
    ring._collect()
    pinner.can_ask = False
    ring.give_back(ring.take())
    pinner.can_ask = True
    pinner.is_busy = False
    ring.close()
    assert pinner.pinned == {}


def test_slots_that_are_refused_come_back_without_a_fence() -> None:
    pinner = Pinner()
    pinner.is_willing, pinner.is_busy = False, True
    ring = ring_of(pinner)
    for _ in range(10 * FIRST_SLOTS):
        deliver(ring)
    assert not ring.has_lent_pinned
    assert (ring.num_slots, pinner.num_fences) == (FIRST_SLOTS, 0)
    ring.close()


def test_a_slot_whose_batch_is_held_is_neither_used_nor_unpinned() -> None:
    pinner = Pinner()
    ring = ring_of(pinner)
    held = ring.lend(ring.take(), NUM_BYTES)
    for _ in range(3 * FIRST_SLOTS):
        deliver(ring)
    address = held.ctypes.data
    ring.close()
    assert list(pinner.pinned) == [address]
    held[:] = 3
    del held
    assert pinner.pinned == {}


def test_a_crowded_ring_says_so_and_its_batches_are_copies() -> None:
    pinner = Pinner()
    ring = ring_of(pinner, max_held_bytes=2 * NUM_BYTES)
    held = [ring.lend(ring.take(), NUM_BYTES) for _ in range(2)]
    assert ring.is_crowded()
    held.pop()
    assert not ring.is_crowded()
    held.clear()
    ring.close()


def test_a_dropped_slot_is_unpinned_before_its_batch_is_handed_out() -> None:
    pinner = Pinner()
    ring = ring_of(pinner)
    for _ in range(FIRST_SLOTS):
        deliver(ring)
    slots = [ring.take() for _ in range(FIRST_SLOTS)]
    assert len(pinner.pinned) == len([slot for slot in slots if slot.pinned_bytes])
    for slot in slots:
        ring.drop(slot)
    assert pinner.pinned == {}
    assert ring.num_slots == 0
    ring.close()
