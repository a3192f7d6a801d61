"""The blocks of an epoch in the order of use, and what follows from it.

A use is a block and the batches between which it is needed: ``(block, first, last)``. Batches are
counted from the beginning of the published epoch, on the rank that publishes it. A loader writes
its uses to a file. The downloader reads it, fetches the blocks that come next, and evicts those
whose next use is farthest away.
"""

from __future__ import annotations

import heapq
import os
from typing import NamedTuple

import numpy as np

_MAX_GAP = 4
"""Batches between two uses of a block that count as one."""
NEVER = np.iinfo(np.int64).max


def merge_uses(batches: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Return uses, in the order of their first batch, from pairs of a batch and a block.

    Example:
        >>> merge_uses(np.array([0, 1, 1, 9]), np.array([7, 7, 3, 7])).tolist()
        [[7, 0, 1], [3, 1, 1], [7, 9, 9]]
    """
    if not len(batches):
        return np.empty((0, 3), np.int64)
    order = np.lexsort((batches, blocks))
    batches, blocks = batches[order], blocks[order]
    is_new = np.ones(len(batches), bool)
    is_new[1:] = (blocks[1:] != blocks[:-1]) | (batches[1:] - batches[:-1] > _MAX_GAP)
    starts = np.flatnonzero(is_new)
    ends = np.append(starts[1:], len(batches)) - 1
    uses = np.stack([blocks[starts], batches[starts], batches[ends]], axis=1)
    return np.asarray(uses[np.argsort(uses[:, 1], kind="stable")], np.int64)


def largest_batch(batches: np.ndarray, blocks: np.ndarray, block_bytes: np.ndarray) -> int:
    """Return the number of bytes of the blocks that the largest batch needs.

    Example:
        >>> largest_batch(np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([5, 4]))
        9
    """
    if not len(batches):
        return 0
    pairs = np.unique(np.stack([batches, blocks], axis=1), axis=0)
    return int(np.bincount(pairs[:, 0], weights=block_bytes[pairs[:, 1]]).max())


def write_uses(path: str, uses: np.ndarray) -> None:
    """Write uses to a file. Readers see all of them or no file."""
    part = f"{path}.part"
    with open(part, "wb") as file:
        np.save(file, uses.astype(np.int32))
    os.replace(part, path)


def read_uses(path: str) -> np.ndarray:
    """Read uses. Returns none if the file is gone or was not written by :func:`write_uses`."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.empty((0, 3), np.int64)
    if found.ndim != 2 or found.shape[1] != 3 or found.dtype != np.int32:
        return np.empty((0, 3), np.int64)
    return np.asarray(found, np.int64)


def next_uses(uses: np.ndarray, tick: int, num_blocks: int) -> np.ndarray:
    """Return for each block how many batches away its next use is; ``NEVER`` if there is none.

    Example:
        >>> next_uses(np.array([[7, 0, 1], [3, 1, 1], [7, 9, 9]]), tick=2, num_blocks=8).tolist()[7]
        7
    """
    found = np.full(num_blocks, NEVER, np.int64)
    left = uses[uses[:, 2] >= tick][::-1]  # reversed, so that the earliest use is written last
    found[left[:, 0]] = np.maximum(left[:, 1] - tick, 0)
    return found


def choose_victims(
    distances: np.ndarray,
    touched: np.ndarray,
    block_bytes: np.ndarray,
    num_bytes: int,
) -> np.ndarray:
    """Return the cached blocks to evict, by their places in the arguments.

    Those that are never used again come first, the one touched longest ago before the others. Then
    those whose next use is farthest away.

    Args:
        distances: Batches until the next use of each cached block. -1: it is kept.
        touched: When a reader last asked for it.
        num_bytes: How many bytes are to be freed.

    Example:
        >>> distances, sizes = np.array([5, NEVER, -1, 9]), np.array([4, 4, 4, 4])
        >>> choose_victims(distances, np.zeros(4), sizes, num_bytes=8).tolist()
        [1, 3]
    """
    order = np.lexsort((touched, -distances.astype(np.float64)))
    order = order[distances[order] >= 0]
    freed = np.cumsum(block_bytes[order])
    return np.asarray(order[: int(freed.searchsorted(num_bytes)) + 1])


class PlannedFetch(NamedTuple):
    """A block to fetch now, and the blocks to evict for it. ``distance``: batches until its use."""

    block: int
    distance: int
    victims: list[int]


def plan_fetches(
    coming: np.ndarray,
    later: np.ndarray,
    is_cached: np.ndarray,
    spare: np.ndarray,
    block_bytes: np.ndarray,
    free_bytes: int,
) -> list[PlannedFetch]:
    """Return what to fetch ahead, without more downloads than the best possible eviction.

    That one evicts when a block is used, and takes the block whose next use is farthest then. Here
    the uses that come are gone through in the same way. A block is fetched as soon as its victim
    is one that is not used before.

    Args:
        coming: The next uses, in order, with distances instead of batches.
        later: For each block, the distance of its first use after those.
        is_cached: For each block, whether it is there or being fetched.
        spare: Cached blocks that can be evicted.
        free_bytes: Room in the cache.

    Example:
        >>> uses, never = np.array([[0, 0, 0], [1, 5, 5], [2, 9, 9]]), np.full(3, NEVER)
        >>> cached, spare, size = np.array([True, True, False]), np.array([0, 1]), np.ones(3)
        >>> plan_fetches(uses, never, cached, spare, size, 0)  # both are used before block 2
        []
        >>> plan_fetches(uses[1:], never, cached, spare, size, 0)
        [PlannedFetch(block=2, distance=9, victims=[0])]
    """
    uses = coming.tolist()
    nexts: dict[int, int] = {}
    following = [0] * len(uses)
    for at in reversed(range(len(uses))):
        block, first, _ = uses[at]
        following[at], nexts[block] = nexts.get(block, int(later[block])), first
    # Minus the next use, the block, and whether it can be evicted now.
    victims = [(-nexts.get(one, int(later[one])), one, True) for one in spare.tolist()]
    heapq.heapify(victims)
    in_use: list[tuple[int, int, int]] = []
    changed: dict[int, bool] = {}
    found: list[PlannedFetch] = []
    for (block, first, last), next_use in zip(uses, following, strict=True):
        while in_use and in_use[0][0] < first:
            _, used, used_again = heapq.heappop(in_use)
            heapq.heappush(victims, (-used_again, used, False))
        if not changed.get(block, bool(is_cached[block])):
            chosen, is_free = [], True
            while free_bytes < block_bytes[block]:
                if not victims or -victims[0][0] <= first:
                    return found
                _, victim, can_go = heapq.heappop(victims)
                free_bytes += int(block_bytes[victim])
                changed[victim], is_free = False, is_free and can_go
                chosen.append(victim)
            free_bytes -= int(block_bytes[block])
            changed[block] = True
            if is_free:
                found.append(PlannedFetch(block, first, chosen))
        heapq.heappush(in_use, (last, block, next_use))
    return found
