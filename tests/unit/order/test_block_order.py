"""The block order has each sample once, is random overall, and keeps neighbors together."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from penstock import BlockOrder, SeededOrder
from penstock.errors import BadArgument

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


# Blocks of different sizes


@pytest.mark.parametrize(
    ("length", "block_size", "num_mixed", "seed", "checksum"),
    [(95, 10, 3, 1, 4176034143), (10_000, 256, 16, 7, 937758344), (31, 4, 2, 0, 2580153679)],
)
def test_even_blocks_keep_the_order_that_they_have_always_had(
    length: int, block_size: int, num_mixed: int, seed: int, checksum: int
) -> None:
    order = BlockOrder(length, block_size=block_size, num_mixed=num_mixed, seed=seed)
    assert zlib.crc32(np.array(list(order), "<i8").tobytes()) == checksum
    starts = [*range(0, length, block_size), length]
    same = BlockOrder(length, block_starts=starts, num_mixed=num_mixed, seed=seed)
    assert list(same) == list(order)
    other = BlockOrder(length, block_starts=[0, 1, *starts[1:]], num_mixed=num_mixed, seed=seed)
    assert list(other) != list(order)  # control


@pytest.mark.parametrize("num_mixed", [1, 2, 3, 100])
def test_blocks_of_different_sizes_give_each_sample_once(num_mixed: int) -> None:
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(1, 40, 30)
        starts = np.cumsum([0, *sizes])
        order = BlockOrder(starts[-1], block_starts=starts, num_mixed=num_mixed, seed=seed)
        listed = list(order)
        assert sorted(listed) == list(range(starts[-1]))
        assert [order.index_at(position) for position in range(0, len(listed), 7)] == listed[::7]
        assert list(order.starting_at(50)) == listed[50:]
        parts = [
            list(BlockOrder(starts[-1], block_starts=starts, seed=seed, rank=rank, world_size=3))
            for rank in range(3)
        ]
        assert sorted(itertools.chain(*parts)) == sorted(listed)


def test_at_most_num_mixed_blocks_are_needed_at_a_time() -> None:
    starts = np.cumsum([0, *np.random.default_rng(0).integers(1, 40, 100)])
    for num_mixed in (1, 4):
        order = BlockOrder(starts[-1], block_starts=starts, num_mixed=num_mixed, seed=1)
        blocks = np.searchsorted(starts, list(order), side="right") - 1
        spans = [np.flatnonzero(blocks == block)[[0, -1]] for block in range(100)]
        for place in range(len(blocks)):
            assert sum(first <= place <= last for first, last in spans) <= num_mixed
    anywhere = np.searchsorted(starts, list(SeededOrder(int(starts[-1]), seed=1)), side="right") - 1
    assert len(set(anywhere[:100].tolist())) > 40  # control


def test_an_empty_dataset_has_an_empty_order() -> None:
    assert list(BlockOrder(0, block_starts=[0])) == []


@pytest.mark.parametrize("starts", [[], [1, 3], [0, 3, 2], [0, 2, 2], [0.0, 3.0], [[0, 3]]])
def test_block_starts_that_are_no_starts_are_refused(starts: list[int]) -> None:
    with pytest.raises(BadArgument, match="block_starts must be integers"):
        BlockOrder(3, block_starts=starts)


def test_block_starts_of_another_length_are_refused() -> None:
    with pytest.raises(BadArgument, match="ends with 4, but there are 3"):
        BlockOrder(3, block_starts=[0, 2, 4])
