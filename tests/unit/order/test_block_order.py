"""The block order has each sample once, is random overall, and keeps neighbors together."""

from __future__ import annotations

import itertools

import pytest

from penstock import BlockOrder, SeededOrder

pytestmark = pytest.mark.legacy


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 29, 30, 31, 95, 100])
@pytest.mark.parametrize("block_size", [1, 3, 10, 200])
@pytest.mark.parametrize("num_mixed", [1, 3, 50])
def test_each_sample_is_taken_once_wherever_the_short_block_comes(
    length: int, block_size: int, num_mixed: int
) -> None:
    for seed in range(4):
        order = BlockOrder(length, block_size=block_size, num_mixed=num_mixed, seed=seed)
        listed = list(order)
        assert sorted(listed) == list(range(length))
        assert [order.index_at(position) for position in range(length)] == listed


def test_samples_that_come_together_lie_together() -> None:
    order = BlockOrder(10_000, block_size=100, num_mixed=4, seed=1)
    listed = list(order)
    for first in range(0, 10_000, 400):
        assert len({index // 100 for index in listed[first : first + 400]}) <= 4
    anywhere = list(SeededOrder(10_000, seed=1))  # the negative control
    assert len({index // 100 for index in anywhere[:400]}) > 50


def test_epochs_and_seeds_differ_and_repeat() -> None:
    order = BlockOrder(500, block_size=10, num_mixed=5, seed=1)
    first = list(order)
    order.set_epoch(1)
    assert list(order) != first
    order.set_epoch(0)
    assert list(order) == first
    assert list(BlockOrder(500, block_size=10, num_mixed=5, seed=2)) != first


def test_ranks_share_it_out_and_it_starts_anywhere() -> None:
    whole = list(BlockOrder(103, block_size=10, num_mixed=3, seed=4))
    parts = [
        list(BlockOrder(103, block_size=10, num_mixed=3, seed=4, rank=rank, world_size=3))
        for rank in range(3)
    ]
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    assert list(BlockOrder(103, block_size=10, num_mixed=3, seed=4).starting_at(50)) == whole[50:]
