"""Uses of blocks, and the choice of what to evict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.order.samplers import BlockOrder
from penstock.sources.remote import use_order
from penstock.sources.remote.use_order import (
    NEVER,
    choose_victims,
    merge_uses,
    next_uses,
    plan_fetches,
)

pytestmark = [pytest.mark.legacy]


def test_uses_are_read_back_and_other_files_count_as_none(tmp_path: Path) -> None:
    uses = merge_uses(np.array([0, 1, 9]), np.array([5, 5, 5]))
    use_order.write_uses(str(tmp_path / "1-1"), uses)
    assert use_order.read_uses(str(tmp_path / "1-1")).tolist() == [[5, 0, 1], [5, 9, 9]]
    (tmp_path / "bad").write_bytes(b"\x93NUMPY garbage")
    np.save(tmp_path / "shape.npy", np.zeros(3, np.int32))
    for name in ("gone", "bad", "shape.npy"):
        assert len(use_order.read_uses(str(tmp_path / name))) == 0


def test_the_next_use_is_the_first_that_is_not_over() -> None:
    uses = merge_uses(np.array([0, 1, 20, 8]), np.array([3, 3, 3, 4]))
    assert next_uses(uses, 0, 6).tolist() == [NEVER, NEVER, NEVER, 0, 8, NEVER]
    assert next_uses(uses, 2, 6).tolist() == [NEVER, NEVER, NEVER, 18, 6, NEVER]
    assert next_uses(uses, 21, 6).tolist() == [NEVER] * 6


def test_blocks_without_a_use_go_first_the_oldest_before_the_others() -> None:
    distances = np.array([NEVER, 3, NEVER, 50])
    touched = np.array([9.0, 0.0, 1.0, 0.0])
    assert choose_victims(distances, touched, np.full(4, 10), num_bytes=30).tolist() == [2, 0, 3]
    distances[2] = -1
    assert choose_victims(distances, touched, np.full(4, 10), num_bytes=99).tolist() == [0, 3, 1]


def count_misses(order: list[int], room: int, evict) -> int:
    """Count the blocks that are fetched for ``order`` with room for ``room`` of them."""
    cached: list[int] = []
    misses = 0
    for at, block in enumerate(order):
        if block in cached:
            cached.remove(block)
        else:
            misses += 1
            if len(cached) == room:
                cached.pop(evict(cached, at))
        cached.append(block)
    return misses


def test_over_several_epochs_farthest_next_use_is_belady_s_and_beats_lru() -> None:
    num_blocks, room = 40, 20
    sequence = [
        int(block)
        for epoch in range(6)
        for block in BlockOrder(num_blocks, block_size=1, num_mixed=4, seed=1, epoch=epoch)
    ]
    uses = merge_uses(np.arange(len(sequence)) * 10, np.array(sequence))

    def farthest(cached: list[int], at: int) -> int:
        distances = next_uses(uses, at * 10, num_blocks)[cached]
        size = np.ones(len(cached), np.int64)
        return int(choose_victims(distances, np.zeros(len(cached)), size, 1)[0])

    def optimal(cached: list[int], at: int) -> int:
        rest = sequence[at:]
        nexts = [rest.index(block) if block in rest else len(rest) for block in cached]
        return nexts.index(max(nexts))

    ours = count_misses(sequence, room, farthest)
    assert ours == count_misses(sequence, room, optimal)
    assert ours < 0.8 * count_misses(sequence, room, lambda cached, at: 0)


def fetch_ahead(sequence: list[int], num_blocks: int, room: int, num_ahead: int) -> int:
    """Count what is fetched if blocks are fetched ahead as planned, one epoch known ahead."""
    uses = np.array([[block, at, at] for at, block in enumerate(sequence)])
    cached, size, num_fetched = np.zeros(num_blocks, bool), np.ones(num_blocks, np.int64), 0
    for at, block in enumerate(sequence):
        coming = uses[at : at + num_ahead] - np.array([0, at, at])
        later = next_uses(uses[at + num_ahead : at + 2 * num_blocks], at, num_blocks)
        spare = np.flatnonzero(cached)
        for fetch in plan_fetches(coming, later, cached, spare, size, room - int(cached.sum())):
            cached[fetch.victims] = False
            cached[fetch.block] = True
            num_fetched += 1
        assert cached[block], "what is used now can always be fetched"
        assert cached.sum() <= room
    return num_fetched


@pytest.mark.parametrize("num_ahead", [1, 4, 15])
def test_reading_ahead_fetches_hardly_more_than_the_best_possible(num_ahead: int) -> None:
    num_blocks, room, epochs = 40, 20, range(6)
    sequence = [
        int(block)
        for epoch in epochs
        for block in BlockOrder(num_blocks, block_size=1, num_mixed=4, seed=1, epoch=epoch)
    ]

    def optimal(cached: list[int], at: int) -> int:
        rest = sequence[at:]
        nexts = [rest.index(block) if block in rest else len(rest) for block in cached]
        return nexts.index(max(nexts))

    best = count_misses(sequence, room, optimal)
    assert best <= fetch_ahead(sequence, num_blocks, room, num_ahead) <= 1.05 * best
    assert count_misses(sequence, room, lambda cached, at: 0) > 1.2 * best


def test_the_largest_batch_counts_each_block_once() -> None:
    batches, blocks = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2])
    assert use_order.largest_batch(batches, blocks, np.array([1, 10, 100])) == 110
    assert use_order.largest_batch(batches[:0], blocks[:0], np.array([1])) == 0
