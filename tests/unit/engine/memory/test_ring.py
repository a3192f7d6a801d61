"""A slot returns to the ring when its last view is gone, and not before."""

from __future__ import annotations

import copy
import errno
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engine.memory.ring import FIRST_SLOTS, MAX_SLOTS_PER_SEGMENT, Ring, Slot
from penstock.engine.memory.shared_file import GRAIN, SharedFile, round_up
from support import leftovers

pytestmark = pytest.mark.legacy

NUM_BYTES = 4096


def make_ring(max_held_bytes: int = 1 << 30) -> Ring:
    ring = Ring(SharedFile.create(), max_held_bytes=max_held_bytes)
    ring.fit(NUM_BYTES)
    return ring


def lend_tensor(ring: Ring) -> tuple[Slot, torch.Tensor]:
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    return slot, torch.frombuffer(root, dtype=torch.float32)


def comes_back(ring: Ring, slot: Slot) -> bool:
    """Return True if the slot is handed out again. Takes every free slot of the current segment."""
    taken = [ring.take() for _ in range(FIRST_SLOTS - 1)]
    got = any(other is slot for other in taken)
    for other in taken:
        ring.give_back(other)
    if got:
        return True
    last = ring.take()
    ring.give_back(last)
    return last is slot


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor itself": lambda t: t,
    "a slice": lambda t: t[3:5],
    "one element": lambda t: t[7],
    "a slice of a slice": lambda t: t[2:900][1:3],
    "a view of another shape": lambda t: t.view(32, 32)[3],
    "a permutation": lambda t: t.view(2, 512).t(),
    "an array": lambda t: t.numpy(),
    "a slice of an array": lambda t: t.numpy()[5:6],
    "a reinterpreted array": lambda t: t.numpy().view(np.uint8)[1:],
    "a detached tensor": lambda t: t.detach(),
    "a memoryview": lambda t: memoryview(t.numpy())[4:8],
    "a parameter": lambda t: torch.nn.Parameter(t),
    "another dtype": lambda t: t.view(torch.int32),
    "a list of one": lambda t: [t],
    "saved for backward": lambda t: (torch.ones(1024, requires_grad=True) * t).sum(),
}
FREE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda t: None,
    "a clone": lambda t: t.clone(),
    "a deep copy": lambda t: copy.deepcopy(t),
    "a sum": lambda t: t.sum(),
    "a copied array": lambda t: t.numpy().copy(),
    "bytes": lambda t: t.numpy().tobytes(),
    "another device type": lambda t: t.double(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_slot_stays_away_while_this_lives(name: str) -> None:
    ring = make_ring()
    slot, tensor = lend_tensor(ring)
    held = HOLDERS[name](tensor)
    del tensor
    assert not comes_back(ring, slot)
    del held
    assert comes_back(ring, slot)
    ring.close()


@pytest.mark.parametrize(
    "view",
    [
        lambda root: root[10:20],
        lambda root: root.view(np.float32)[3:],
        lambda root: root.reshape(64, 64)[1][2:],
        lambda root: memoryview(root)[5:],
        lambda root: np.frombuffer(root, np.int64)[1:],
    ],
    ids=["slice", "dtype", "shape", "memoryview", "frombuffer"],
)
def test_a_view_of_the_root_array_itself_holds_the_slot(view: Callable[[Any], Any]) -> None:
    """The base of a NumPy view can skip intermediate arrays, but must not skip the root."""
    ring = make_ring()
    slot = ring.take()
    held = view(ring.lend(slot, NUM_BYTES))
    assert not comes_back(ring, slot)
    del held
    assert comes_back(ring, slot)
    ring.close()


@pytest.mark.parametrize("name", FREE)
def test_a_slot_comes_back_although_this_lives(name: str) -> None:
    ring = make_ring()
    slot, tensor = lend_tensor(ring)
    held = FREE[name](tensor)
    del tensor
    assert comes_back(ring, slot)
    del held
    ring.close()


def test_a_reference_cycle_holds_the_slot_until_it_is_collected() -> None:
    ring = make_ring()
    slot, tensor = lend_tensor(ring)
    cycle: list[Any] = [tensor]
    cycle.append(cycle)
    del tensor
    assert not comes_back(ring, slot)
    del cycle
    gc.collect()
    assert comes_back(ring, slot)
    ring.close()


def test_a_slot_that_came_back_is_the_next_to_be_used() -> None:
    ring = make_ring()
    slot, tensor = lend_tensor(ring)
    del tensor
    assert ring.take() is slot
    ring.close()


def test_slots_in_use_never_overlap() -> None:
    ring = make_ring()
    held = [lend_tensor(ring)[1] for _ in range(5 * FIRST_SLOTS)]
    for number, tensor in enumerate(held):
        tensor.fill_(float(number))
    assert [tensor.unique().tolist() for tensor in held] == [[float(n)] for n in range(len(held))]
    ring.close()


def test_the_ring_grows_by_segments_and_not_by_a_descriptor_each() -> None:
    ring = make_ring()
    held = [lend_tensor(ring)[1] for _ in range(2 * MAX_SLOTS_PER_SEGMENT)]
    assert ring.num_slots >= len(held)
    assert len({tensor.data_ptr() for tensor in held}) == len(held)
    ring.close()


def test_slots_that_became_too_small_are_not_used_again() -> None:
    ring = make_ring()
    small = ring.take()
    ring.give_back(small)
    ring.fit(small.capacity + 1)
    assert not ring.fits(small)
    taken = ring.take()
    assert taken is not small
    assert taken.capacity > small.capacity
    assert ring.fits(taken)
    ring.close()


def test_a_small_need_does_not_shrink_what_is_known() -> None:
    ring = make_ring()
    ring.fit(10 * NUM_BYTES)
    ring.fit(1)
    assert ring.take().capacity >= 10 * NUM_BYTES
    ring.close()


def test_a_slot_that_a_worker_keeps_is_never_used_again() -> None:
    ring = make_ring()
    slot = ring.take()
    ring.drop(slot)
    taken = [ring.take() for _ in range(3 * FIRST_SLOTS)]
    assert all(other is not slot for other in taken)
    ring.close()


def test_the_ring_is_crowded_once_the_user_holds_the_allowed_bytes() -> None:
    ring = make_ring(max_held_bytes=3 * NUM_BYTES)
    held = []
    for _ in range(3):
        assert not ring.is_crowded()
        held.append(lend_tensor(ring)[1])
    assert ring.is_crowded()
    held.pop()
    assert not ring.is_crowded()
    ring.close()


def test_views_stay_valid_after_the_ring_is_closed() -> None:
    ring = make_ring()
    _, tensor = lend_tensor(ring)
    tensor.fill_(3.0)
    ring.close()
    del ring
    gc.collect()
    assert tensor.sum() == 3.0 * 1024


def test_a_ring_in_a_file_works_like_one_in_memory() -> None:
    ring = Ring(SharedFile.create(allow_memfd=False), max_held_bytes=1 << 30)
    slot, tensor = lend_tensor(ring)
    tensor.fill_(2.0)
    assert tensor.sum() == 2.0 * 1024
    del tensor
    assert ring.take() is slot
    ring.close()


def test_a_closed_ring_holds_no_memory_although_somebody_keeps_it() -> None:
    before = leftovers.look().mappings
    ring = make_ring()
    early, late = lend_tensor(ring)[1], lend_tensor(ring)[1]
    assert leftovers.look().mappings > before  # control: the mapping is counted
    del early
    ring.close()
    assert late.sum() == 0  # memory held by the user stays valid
    del late
    assert leftovers.look().mappings == before


# -- out of memory --------------------------------------------------------------------------------


class SmallFile(SharedFile):
    """A file on a disk with limited space."""

    room = 2 * GRAIN

    def grow(self, num_bytes: int) -> int:
        if self.num_bytes + round_up(num_bytes) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().grow(num_bytes)


def make_small_ring(notes: list[str]) -> Ring:
    return Ring(SmallFile.create(allow_memfd=False), max_held_bytes=1 << 30, note=notes.append)


def test_where_memory_cannot_be_had_there_are_fewer_slots_and_batches_are_copied() -> None:
    notes: list[str] = []
    ring = make_small_ring(notes)
    ring.fit(NUM_BYTES)
    assert not ring.is_crowded()
    taken = [ring.take(), ring.take()]
    assert "No space left" in notes[0]
    assert not ring.has_room()
    assert ring.is_crowded()
    with pytest.raises(OSError, match=r"no memory for another batch \(0\.0625 MiB\)") as caught:
        ring.take()
    assert caught.value.errno == errno.ENOSPC
    ring.give_back(taken[0])
    assert ring.has_room()
    assert ring.take() is taken[0]


def test_where_no_larger_slot_can_be_had_a_small_one_is_taken() -> None:
    ring = make_small_ring([])
    ring.fit(NUM_BYTES)
    slot = ring.take()
    ring.give_back(slot)
    ring.fit(10 * GRAIN)
    assert ring.take() is slot
    assert ring.num_slots == 1


def test_the_error_counts_what_the_user_keeps() -> None:
    ring = make_small_ring([])
    ring.fit(NUM_BYTES)
    kept = [lend_tensor(ring), lend_tensor(ring)]
    with pytest.raises(OSError, match="batches your code holds: 2"):
        ring.take()
    del kept
    gc.collect()
    assert ring.has_room()
