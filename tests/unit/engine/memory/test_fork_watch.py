"""A slot is not reused while a forked child may still read it.

Copies of the pipe's write end play the children. Tests with real children are in
tests/faults/engine/memory/test_forked_children.py.
"""

from __future__ import annotations

import errno
import functools
import os
import types
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.memory import fork_watch
from penstock.engine.memory.fork_watch import MAX_PIPES, ForkWatch
from penstock.engine.memory.pinned_ring import PinnedRing
from penstock.engine.memory.ring import FIRST_SLOTS, Ring, Slot
from penstock.engine.memory.shared_file import PrivateFile, SharedFile

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]

NUM_BYTES = 4096


class Child:
    """A forked child as the pipe sees it: one more holder of its write end."""

    def __init__(self, watch: ForkWatch) -> None:
        watch.note_fork()
        self._fd = os.dup(watch._pipes[-1].write_fd)

    def end(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@pytest.fixture
def watch() -> Iterator[ForkWatch]:
    watch = ForkWatch()
    yield watch
    for pipe in watch._pipes:
        pipe.close()


@pytest.fixture
def ring(watch: ForkWatch) -> Iterator[Ring]:
    ring = make_ring(watch)
    yield ring
    ring.close()


def make_ring(watch: ForkWatch, max_held_bytes: int = 1 << 30) -> Ring:
    ring = Ring(SharedFile.create(), max_held_bytes=max_held_bytes, forks=watch)
    ring.fit(NUM_BYTES)
    return ring


def free_slots(ring: Ring) -> list[Slot]:
    """Return all slots that the ring hands out before it creates new ones."""
    taken = [ring.take()]
    while ring._free:
        taken.append(ring.take())
    for slot in taken:
        ring.give_back(slot)
    return taken


def test_a_slot_that_was_lent_before_a_fork_waits_for_the_child(
    watch: ForkWatch, ring: Ring
) -> None:
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(watch)
    del root
    assert slot not in free_slots(ring)
    assert slot not in free_slots(ring)
    child.end()
    assert slot in free_slots(ring)


def test_without_a_fork_a_slot_waits_for_nobody(ring: Ring) -> None:
    slot = ring.take()
    ring.lend(slot, NUM_BYTES)
    assert slot in free_slots(ring)


def test_a_slot_that_was_lent_after_the_fork_waits_for_nobody(watch: ForkWatch, ring: Ring) -> None:
    child = Child(watch)
    slot = ring.take()
    ring.lend(slot, NUM_BYTES)
    assert slot in free_slots(ring)
    child.end()


def test_a_slot_that_came_back_before_the_fork_waits_for_nobody(
    watch: ForkWatch, ring: Ring
) -> None:
    slot = ring.take()
    ring.lend(slot, NUM_BYTES)
    assert slot in free_slots(ring)
    child = Child(watch)
    assert slot in free_slots(ring)
    child.end()


def test_a_slot_waits_for_every_child_that_was_forked_while_it_was_viewed(
    watch: ForkWatch, ring: Ring
) -> None:
    slots, roots, children = [], [], []
    for _ in range(3):
        slots.append(ring.take())
        roots.append(ring.lend(slots[-1], NUM_BYTES))
        children.append(Child(watch))
    roots.clear()
    assert not set(slots) & set(free_slots(ring))
    children[2].end()  # it saw all three slots; slots 0 and 1 still wait for the others
    assert set(slots) & set(free_slots(ring)) == {slots[2]}
    children[0].end()
    assert set(slots) & set(free_slots(ring)) == {slots[2]}
    children[1].end()
    assert set(slots) <= set(free_slots(ring))


def test_several_forks_without_a_batch_in_between_share_a_pipe(
    watch: ForkWatch, ring: Ring
) -> None:
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    children = [Child(watch) for _ in range(50)]
    del root
    assert slot not in free_slots(ring)
    assert len(watch.fds) == 3
    for child in children:
        assert slot not in free_slots(ring)
        child.end()
    assert slot in free_slots(ring)
    assert len(watch.fds) == 2


def test_a_fork_in_every_step_takes_few_slots_and_descriptors(watch: ForkWatch, ring: Ring) -> None:
    long_lived = None
    for step in range(5000):
        slot = ring.take()
        root = ring.lend(slot, NUM_BYTES)
        child = Child(watch)
        if step == 1000:
            long_lived, kept, child = child, slot, Child(watch)
        del root
        child.end()
        assert slot is not None
        assert len(watch.fds) <= 5
    assert ring.num_slots == FIRST_SLOTS
    assert kept not in free_slots(ring)
    assert long_lived is not None
    long_lived.end()
    assert kept in free_slots(ring)


def test_children_that_live_for_many_steps_keep_slots_and_descriptors_bounded(
    watch: ForkWatch, ring: Ring
) -> None:
    children: list[Child] = []
    most_parked = 0
    for _ in range(1000):
        root = ring.lend(ring.take(), NUM_BYTES)
        children.append(Child(watch))
        if len(children) > 100:
            children.pop(0).end()
        del root
        most_parked = max(most_parked, len(ring._parked))
        assert len(watch.fds) <= MAX_PIPES + 3
    assert most_parked >= 100  # control: slots are parked
    assert most_parked <= 400
    for child in children:
        child.end()
    free_slots(ring)
    assert ring._parked == []


def test_more_long_lived_children_than_pipes_end_in_copies_and_not_in_reuse(
    watch: ForkWatch,
) -> None:
    ring = make_ring(watch, max_held_bytes=100 * NUM_BYTES)
    viewed: set[Slot] = set()
    children = []
    while not ring.is_crowded():
        slot = ring.take()
        assert slot not in viewed
        viewed.add(slot)
        root = ring.lend(slot, NUM_BYTES)
        children.append(Child(watch))
        del root
    assert len(viewed) == 100
    assert len(watch.fds) <= MAX_PIPES + 3
    assert not viewed & set(free_slots(ring))
    for child in children:
        child.end()
    assert not ring.is_crowded()
    assert viewed <= set(free_slots(ring))
    ring.close()


def test_pipes_that_no_slot_waits_for_are_closed(watch: ForkWatch, ring: Ring) -> None:
    children = []
    for _ in range(10):
        root = ring.lend(ring.take(), NUM_BYTES)
        children.append(Child(watch))
        del root
        free_slots(ring)
    assert len(watch.fds) == 2 + 10
    ring.close()
    other = make_ring(watch)
    assert len(watch.fds) == 2
    other.close()
    for child in children:
        child.end()


def test_the_pipe_stays_open_for_the_ring_of_another_loader(watch: ForkWatch, ring: Ring) -> None:
    other = make_ring(watch)
    slot = other.take()
    root = other.lend(slot, NUM_BYTES)
    child = Child(watch)
    for _ in range(3):  # this ring sees the forks first and has no slot that waits for them
        ring.lend(ring.take(), NUM_BYTES)
        watch.note_fork()
    del root
    assert slot not in free_slots(other)
    child.end()
    assert slot in free_slots(other)
    other.close()


def no_descriptors(*_: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_without_descriptors_a_slot_is_not_used_again_until_there_are_some(
    watch: ForkWatch, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(watch)
    with monkeypatch.context() as patched:
        patched.setattr(fork_watch.os, "pipe", no_descriptors)
        del root
        assert slot not in free_slots(ring)
        child.end()
        assert slot not in free_slots(ring)  # undetectable without a pipe
    assert slot in free_slots(ring)


def test_without_descriptors_from_the_start_a_slot_is_never_used_again(
    watch: ForkWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SharedFile.create()
    with monkeypatch.context() as patched:
        patched.setattr(fork_watch.os, "pipe", no_descriptors)
        ring = Ring(file, max_held_bytes=1 << 30, forks=watch)
    ring.fit(NUM_BYTES)
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    watch.note_fork()
    del root
    assert slot not in free_slots(ring)
    later = ring.take()
    root = ring.lend(later, NUM_BYTES)
    child = Child(watch)  # descriptors are available again
    del root
    child.end()
    assert slot not in free_slots(ring)
    assert later in free_slots(ring)
    ring.close()


@pytest.mark.parametrize("name", ["pipe", "close"])
def test_an_interrupt_in_the_middle_loses_no_fork(
    name: str, watch: ForkWatch, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: Any) -> Any:
        if name == "close":
            close(*given)
        raise KeyboardInterrupt

    close = os.close
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(watch)
    with monkeypatch.context() as patched:
        patched.setattr(fork_watch.os, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            ring.lend(ring.take(), NUM_BYTES)
    del root
    assert slot not in free_slots(ring)
    child.end()
    assert slot in free_slots(ring)


def test_the_hook_runs_no_python(watch: ForkWatch) -> None:
    hook = watch.note_fork
    assert type(hook) is functools.partial
    assert type(hook.func) is types.BuiltinMethodType


def test_private_memory_is_not_watched(watch: ForkWatch) -> None:
    ring = Ring(PrivateFile(), max_held_bytes=1 << 30, forks=watch)
    ring.fit(NUM_BYTES)
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    watch.note_fork()
    del root
    assert slot in free_slots(ring)
    assert watch.fds == []
    ring.close()


class PretendPinner:
    """Pins anything. Its fences complete when ``is_done`` is set."""

    def __init__(self) -> None:
        self.is_done = False

    def may_pin(self) -> bool:
        return True

    def pin(self, memory: Any, owner: object) -> bool:
        return True

    def unpin(self, memory: Any) -> None:
        pass

    def unpin_later(self, pieces: list[Any]) -> None:
        pass

    def may_ask(self) -> bool:
        return True

    def fence(self) -> Any:
        return lambda: self.is_done


def test_a_pinned_slot_waits_for_the_child_and_then_for_the_gpu(watch: ForkWatch) -> None:
    pinner = PretendPinner()
    ring = PinnedRing(SharedFile.create(), pinner=pinner, max_held_bytes=1 << 30, forks=watch)
    ring.fit(NUM_BYTES)
    slot = ring.take()
    root = ring.lend(slot, NUM_BYTES)
    child = Child(watch)
    del root
    pinner.is_done = True
    assert slot not in all_slots(ring)
    child.end()
    pinner.is_done = False
    assert slot not in all_slots(ring)
    pinner.is_done = True
    assert slot in all_slots(ring)
    ring.close()


def all_slots(ring: Ring) -> list[Slot]:
    """Take every free slot, so that the ring checks its resting slots."""
    taken = [ring.take()]
    while ring._free:
        taken.append(ring.take())
    ring._collect()
    taken += ring._free
    for slot in taken:
        if slot not in ring._free:
            ring.give_back(slot)
    return taken
