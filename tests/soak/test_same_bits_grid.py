"""The whole grid of settings has one hash: `make soak`."""

from __future__ import annotations

import itertools
import random

import pytest

from support import stream_hash
from support.stream_hash import GOLDEN, make

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

GRID = {"inline": {}, **stream_hash.grid()}


@pytest.mark.parametrize("way", GRID)
def test_the_stream_is_the_one_written_down(way: str) -> None:
    assert stream_hash.hashed(stream_hash.whole(make(**GRID[way]))) == GOLDEN


@pytest.mark.parametrize("way", GRID)
def test_the_stream_is_the_one_written_down_when_killed_and_resumed(way: str) -> None:
    chance = random.Random(way)
    others = itertools.chain([GRID[way]], (GRID[chance.choice([*GRID])] for _ in range(1000)))
    assert stream_hash.hashed(stream_hash.interrupted(make, others, chance)) == GOLDEN
