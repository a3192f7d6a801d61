"""A shuffle that reads the disk in pieces: blocks of neighbours at random, mixed with some others.

    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13      blocks of block_size samples
    block 2, block 0   |   block 3, block 1    in random order, num_mixed of them at a time
    9 2 11 0 8 3 1 10  |   5 12 4 13 7 6       the samples of those, shuffled

A disk (or a network) reads whole blocks, num_mixed are in memory at a time, and each position is
still a function of (seed, epoch): no buffer is filled, and any place is computed alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.options import check_count
from penstock.order.keys import BLOCK_STREAM, make_key, mix64
from penstock.order.permutation import Permutation, checked_places
from penstock.order.samplers import Order


class BlockOrder(Order):
    """Each index once, in an order that is random at large and near at hand on the disk.

    Args:
        length: How many samples the dataset has, or the dataset itself.
        block_size: Neighbours that are read together.
        num_mixed: Blocks whose samples are shuffled among each other.
        seed, epoch, batch_size, rank, world_size, drop_last, padding: As in
            :class:`penstock.SeededOrder`.

    Example:
        >>> order = BlockOrder(14, block_size=4, num_mixed=2, seed=0)
        >>> sorted(order) == list(range(14))
        True
        >>> sorted({index // 4 for index in list(order)[:6]})  # from two blocks only
        [0, 2]
    """

    def __init__(
        self,
        length: Any,
        *,
        block_size: int = 256,
        num_mixed: int = 16,
        seed: int = 0,
        epoch: int = 0,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        padding: bool = False,
    ) -> None:
        self.block_size = check_count("block_size", block_size, 1)
        self.num_mixed = check_count("num_mixed", num_mixed, 1)
        super().__init__(
            len(length) if hasattr(length, "__len__") else length,
            seed=seed,
            epoch=epoch,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            padding=padding,
        )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._key = make_key(BLOCK_STREAM, self.seed, self.epoch)
        num_blocks = -(-self.length // self.block_size)
        self._blocks = Permutation(num_blocks, self._key)
        # Only the last block can be short; from its group on, all begin earlier by what it lacks.
        self._lack = num_blocks * self.block_size - self.length
        place = self._blocks.position_of(num_blocks - 1) if num_blocks else 0
        self._short_group, self._short_place = divmod(place, self.num_mixed)
        self._inner: dict[int, Permutation] = {}

    def at(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        places = checked_places(positions, self.length).astype(np.int64).reshape(-1)
        group_rows = self.block_size * self.num_mixed
        groups = places // group_rows
        starts = groups * group_rows - np.where(groups > self._short_group, self._lack, 0)
        # A group after the short one begins earlier than its number says.
        late = places >= (groups + 1) * group_rows - np.where(
            groups >= self._short_group, self._lack, 0
        )
        groups = groups + late
        starts = groups * group_rows - np.where(groups > self._short_group, self._lack, 0)
        found = np.empty(len(places), np.int64)
        for group in np.unique(groups).tolist():
            mine = groups == group
            found[mine] = self._in_group(group, places[mine] - starts[mine])
        return found.reshape(np.shape(positions))

    def _in_group(self, group: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        first = group * self.num_mixed
        num_blocks = min(self.num_mixed, self._blocks.length - first)
        rows = num_blocks * self.block_size
        is_short = group == self._short_group
        rows -= self._lack if is_short else 0
        shuffle = self._inner.get(group)
        if shuffle is None:
            self._inner = {group: Permutation(rows, mix64(self._key ^ mix64(group + 1)))}
            shuffle = self._inner[group]
        inner = shuffle.at(places)
        if is_short:  # the rows behind the short block are nearer by what it lacks
            end = (self._short_place + 1) * self.block_size - self._lack
            inner = np.where(inner >= end, inner + self._lack, inner)
        blocks = self._blocks.at(first + inner // self.block_size)
        return blocks * self.block_size + inner % self.block_size
