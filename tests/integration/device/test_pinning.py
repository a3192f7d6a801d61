"""CUDA and HIP calls that pin slots: once each, on the right GPU, and undone in time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from penstock.device import pinning
from penstock.device.pinning import SlotPinner, choose_index
from penstock.engine.memory.pinned_ring import PinnedRing
from penstock.engine.memory.ring import FIRST_SLOTS
from penstock.engine.memory.shared_file import GRAIN, SharedFile
from support import fake_gpu
from support.fake_gpu import PretendGpu

pytestmark = pytest.mark.legacy

NUM_BYTES = 4096


@pytest.fixture(params=["cuda", "hip"])
def gpu(request: pytest.FixtureRequest) -> Iterator[PretendGpu]:
    with fake_gpu.pretended(request.param) as gpu:
        yield gpu
        assert gpu.wait_until_unpinned(), "something is left pinned"
        assert not gpu.unmapped


def make_ring(pinner: SlotPinner, num_bytes: int = NUM_BYTES) -> PinnedRing:
    ring = PinnedRing(SharedFile.create(), pinner=pinner, max_held_bytes=1 << 30)
    ring.fit(num_bytes)
    return ring


def deliver(ring: PinnedRing, num_bytes: int = NUM_BYTES) -> torch.Tensor:
    return torch.frombuffer(ring.lend(ring.take(), num_bytes), dtype=torch.uint8)


def use_all(ring: PinnedRing) -> None:
    """Deliver a batch in each slot of the first segment and wait until all slots are free."""
    batches = [deliver(ring) for _ in range(FIRST_SLOTS)]
    del batches
    wait_until(lambda: ring._collect() or len(ring._free) == FIRST_SLOTS)


def wait_until(is_so: Callable[[], object], limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.001)


def test_a_slot_is_registered_once_on_the_gpu_that_was_chosen(gpu: PretendGpu) -> None:
    pinner = SlotPinner(1, print)
    ring = make_ring(pinner)
    for _ in range(50):
        deliver(ring)
        wait_until(lambda: ring._collect() or not ring._cooling)  # a step, and the GPU is done
    registered = [call for call in gpu.calls if call[0] == "register"]
    addresses = {call[2] for call in registered}
    assert len(registered) == len(addresses) <= 2 * FIRST_SLOTS
    assert gpu.devices_of("register") == {1}
    assert {call[3] for call in registered} == {GRAIN}, "what is used, not all of the slot"
    assert {call[4] for call in registered} == {1}, "portable: for every GPU"
    assert ring.has_lent_pinned
    ring.close()
    assert gpu.wait_until_unpinned()
    assert gpu.devices_of("unregister") == {1}


def test_nothing_is_asked_of_a_gpu_before_the_first_batch(gpu: PretendGpu) -> None:
    pinner = SlotPinner(None, print)
    ring = make_ring(pinner)
    ring.give_back(ring.take())
    assert gpu.calls == []
    ring.close()
    assert gpu.calls == []


def test_the_gpu_that_was_opened_is_chosen_not_number_0(
    gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_index() == 0
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index == 1)
    assert choose_index() == 1
    gpu.current = 1
    assert choose_index() == 1
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False)
    assert choose_index() == 1, "none is open: the current one"


def test_memory_is_unregistered_before_it_is_unmapped(gpu: PretendGpu) -> None:
    """The ring, pinner and views are dropped together. The process keeps pinned memory alive."""
    ring = make_ring(SlotPinner(0, print))
    deliver(ring)
    address = next(iter(gpu.registered))
    ring.close()
    del ring
    assert gpu.wait_until_unpinned()
    assert not gpu.unmapped
    gc.collect()
    wait_until(lambda: not fake_gpu.is_mapped(address, GRAIN))  # its thread releases it last


def test_a_ring_that_nobody_closes_unpins_its_slots(gpu: PretendGpu) -> None:
    """A loader without workers never closes its ring."""
    ring = make_ring(SlotPinner(0, print))
    kept = deliver(ring)
    deliver(ring)
    assert len(gpu.registered) == 2
    del ring
    gc.collect()
    wait_until(lambda: len(gpu.registered) == 1)
    assert list(gpu.registered) == [kept.data_ptr()]
    kept.fill_(7)
    del kept
    assert gpu.wait_until_unpinned()


def test_views_that_outlive_the_ring_stay_pinned_until_they_go(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    kept = [deliver(ring) for _ in range(3)]
    ring.close()
    del ring
    # Only process-wide state may hold the objects that unpin them.
    gc.collect()
    time.sleep(0.02)
    assert set(gpu.registered) == {tensor.data_ptr() for tensor in kept}
    last = kept.pop()
    kept.clear()
    wait_until(lambda: len(gpu.registered) == 1)
    assert list(gpu.registered) == [last.data_ptr()]
    del last
    assert gpu.wait_until_unpinned()


def test_slots_that_workers_had_when_they_were_stopped_are_unpinned(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    use_all(ring)
    taken = [ring.take() for _ in range(FIRST_SLOTS)]
    assert any(slot.pinned_bytes for slot in taken)
    ring.close()
    assert gpu.wait_until_unpinned()


def test_memory_stays_pinned_while_a_copy_reads_it(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    batch = deliver(ring)
    gpu.begin_copy()
    ring.close()
    del batch
    time.sleep(0.05)
    assert len(gpu.registered) == 1
    gpu.finish_all()
    assert gpu.wait_until_unpinned()


def test_slots_that_became_too_small_are_unpinned(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    use_all(ring)
    ring.fit(8 * GRAIN)
    batch = deliver(ring, 8 * GRAIN)
    wait_until(lambda: len(gpu.registered) == 1)
    assert gpu.registered == {batch.data_ptr(): 8 * GRAIN}
    del batch
    ring.close()
    assert gpu.wait_until_unpinned()


def test_a_slot_is_pinned_anew_where_batches_grow(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print), num_bytes=10 * GRAIN)
    slot, *_ = [ring.take() for _ in range(FIRST_SLOTS)]
    ring.lend(slot, NUM_BYTES)
    wait_until(lambda: ring._collect() or slot in ring._free)
    assert ring.take() is slot
    ring.lend(slot, 4 * GRAIN)
    calls = [call[0] for call in gpu.calls if call[0] in ("register", "unregister")]
    assert calls == ["register", "unregister", "register"]
    assert slot.pinned_bytes == 5 * GRAIN, "with room to grow"
    ring.close()


def test_a_refusal_is_told_once_and_batches_are_ordinary_memory(gpu: PretendGpu) -> None:
    gpu.refusal = 2
    notes: list[str] = []
    ring = make_ring(SlotPinner(0, notes.append))
    for _ in range(5):
        deliver(ring)
        assert not ring.has_lent_pinned
    prefix = "hip" if gpu.vendor == "hip" else "cuda"
    assert notes == [
        f"slots cannot be pinned ({prefix}HostRegister returned 2 (out of memory)): each batch is "
        "first copied to one of torch's pinned buffers"
    ]
    assert gpu.names().count("register") == 1
    assert gpu.names().count("forget error") == 1, "or the user's next kernel would be blamed"
    ring.close()


def test_nothing_but_captures_is_asked_while_a_graph_is_captured(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print), num_bytes=4 * GRAIN)
    deliver(ring)
    before = len(gpu.names())
    gpu.is_capturing = True
    for _ in range(3 * FIRST_SLOTS):
        deliver(ring)
    grown = ring.take()
    ring.lend(grown, 4 * GRAIN)
    ring.close()
    time.sleep(0.02)
    assert gpu.names()[before:] == []
    gpu.is_capturing = False
    other = make_ring(SlotPinner(0, print))
    deliver(other)  # the next operation unpins the rest
    other.close()
    assert gpu.wait_until_unpinned()


def test_a_slot_pinned_in_part_is_handed_out_as_a_copy(gpu: PretendGpu) -> None:
    """It cannot be pinned again while a graph is captured, and copies from such memory fail."""
    ring = make_ring(SlotPinner(0, print), num_bytes=4 * GRAIN)
    slot, *_ = [ring.take() for _ in range(FIRST_SLOTS)]
    slot.view(4 * GRAIN)[:] = 9
    ring.lend(slot, NUM_BYTES)
    wait_until(lambda: ring._collect() or slot in ring._free)
    assert ring.take() is slot
    gpu.is_capturing = True
    root = ring.lend(slot, 4 * GRAIN)
    assert not ring.has_lent_pinned
    assert root.ctypes.data != slot.view(1).ctypes.data
    assert (root == 9).all()
    gpu.is_capturing = False
    ring.close()


def test_a_slot_that_a_worker_keeps_is_unpinned_before_it_is_handed_out(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    use_all(ring)
    slots = [ring.take() for _ in range(FIRST_SLOTS)]
    slot = next(slot for slot in slots if slot.pinned_bytes)
    address = slot.view(1).ctypes.data
    assert address in gpu.registered
    ring.drop(slot)
    assert address not in gpu.registered
    ring.close()


def test_without_a_fence_slots_come_back_and_with_one_that_is_insisted_on_they_wait(
    gpu: PretendGpu,
) -> None:
    pinner = SlotPinner(0, print, is_fenced=False)
    gpu.begin_copy()
    assert pinner.fence()()
    pinner.require_fences()
    question = pinner.fence()
    assert not question()
    gpu.finish_all()
    wait_until(question)


def test_a_lost_gpu_leaves_nothing_pinned_and_raises_nothing(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    kept = deliver(ring)
    deliver(ring)
    gpu.lost = True
    deliver(ring)
    ring.close()
    del kept
    assert gpu.wait_until_unpinned()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_frees_nothing_of_its_parent_and_asks_no_gpu(gpu: PretendGpu) -> None:
    ring = make_ring(SlotPinner(0, print))
    kept = deliver(ring)
    deliver(ring)
    kept.fill_(5)
    pid = os.fork()
    if pid == 0:
        num_calls = len(gpu.calls)
        del kept
        ring.close()
        gc.collect()
        time.sleep(0.02)
        os._exit(0 if len(gpu.calls) == num_calls and len(pinning._pinned) == 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(gpu.registered) == 2
    assert (kept.numpy() == np.uint8(5)).all()
    del kept
    ring.close()
    assert gpu.wait_until_unpinned()


def test_loaders_one_after_another_leave_no_events_and_no_threads(gpu: PretendGpu) -> None:
    for _ in range(20):
        ring = make_ring(SlotPinner(0, print))
        use_all(ring)
        ring.close()
    assert gpu.wait_until_unpinned()
    assert gpu.names().count("retain") <= 1
    assert gpu.names().count("make event") <= 20
