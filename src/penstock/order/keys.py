"""64-bit keys of (seed, epoch), from which orders, weights and splits are computed.

A key is splitmix64's finalizer folded over the input words. Only integers are used, so every
machine computes the same bits. The formula is part of the public interface and does not change:

    mix64(x): x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
              x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31     (all modulo 2**64)
    key = mix64(mix64(mix64(stream) ^ seed + GOLDEN) ^ epoch + GOLDEN)  (^ binds tighter than +)

``mix64`` is a bijection. Two epochs of a seed never share a key, and two seeds never share a key in
the same epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# Each use has its own stream, so that a shuffle is independent of a split with the same seed.
ORDER_STREAM = 0x6F72646572
SPLIT_STREAM = 0x73706C6974
WEIGHT_STREAM = 0x776569676874
BATCH_STREAM = 0x6261746368
BUCKET_STREAM = 0x6275636B6574
RNG_STREAM = 0x726E67
DATASET_STREAM = 0x6F776E
BAD_STREAM = 0x626164
WORKER_STREAM = 0x776F726B6572
PATCH_STREAM = 0x7061746368
COLLATE_STREAM = 0x636F6C6C617465
BLOCK_STREAM = 0x6E6561726279
MIX_STREAM = 0x6D6978747572


def mix64(word: int) -> int:
    """Mix the bits of ``word`` into 64 bits. A bijection.

    Example:
        >>> hex(mix64(GOLDEN))  # the first number of splitmix64 with seed 0
        '0xe220a8397b1dcdaf'
    """
    word &= MASK
    word = (word ^ (word >> 30)) * _FIRST & MASK
    word = (word ^ (word >> 27)) * _SECOND & MASK
    return word ^ (word >> 31)


def make_key(stream: int, seed: int, epoch: int = 0) -> int:
    """Return the 64-bit key of an epoch for one stream."""
    return mix64((mix64((mix64(stream) ^ (seed & MASK)) + GOLDEN) ^ epoch) + GOLDEN)


def splitmix64(key: int, counters: Words) -> Words:
    """Return a 64-bit number for each counter, as splitmix64 with seed ``key`` computes it.

    Each number depends only on its own counter.
    """
    words: Words = (counters + np.uint64(1)) * np.uint64(GOLDEN)
    words += np.uint64(key)
    return mix64_many(words)


def mix64_many(words: Words) -> Words:
    """:func:`mix64` of each word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words
