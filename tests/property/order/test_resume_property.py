"""Resuming at batch k equals skipping k batches, for any length, batch size, seed and ranks."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock import DataLoader
from support.datasets import draw


class Drawn:
    """Fast samples that return their index and their drawn numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        index, number, _, array, tensor = draw(index)
        return [float(index), number, float(array[0]), float(tensor[0])]


def as_lists(batches: Any) -> list[list[Any]]:
    return [list(zip(*(f.tolist() for f in batch), strict=True)) for batch in batches]


SEEDS = st.integers(-(1 << 63), (1 << 64) - 1)


@given(
    length=st.integers(0, 40),
    rows=st.integers(1, 9),
    seed=SEEDS,
    epoch=st.integers(0, 1 << 40),
    stop=st.integers(0, 45),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_resuming_is_skipping(
    length: int, rows: int, seed: int, epoch: int, stop: int, shuffle: bool, drop_last: bool
) -> None:
    def make() -> Any:
        loader = DataLoader(Drawn(length), rows, shuffle=shuffle, seed=seed, drop_last=drop_last)
        loader.set_epoch(epoch)
        return loader

    uninterrupted, left, resumed = make(), make(), make()
    whole, following = as_lists(uninterrupted), as_lists(uninterrupted)
    assert as_lists(itertools.islice(left, stop)) == whole[:stop]
    resumed.load_state_dict(left.state_dict())
    if 0 < stop < len(whole):
        assert as_lists(resumed) == whole[stop:]
    elif stop == 0:
        assert as_lists(resumed) == whole
    assert as_lists(resumed) == following


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 3)), min_size=1, max_size=4
    ),
    length=st.integers(1, 90),
    seed=SEEDS,
)
def test_ranks_may_come_and_go_at_the_same_global_batch(
    steps: list[tuple[int, int]], length: int, seed: int
) -> None:
    def rank_loader(rank: int, world_size: int) -> Any:
        return DataLoader(
            Drawn(length),
            12 // world_size,
            shuffle=True,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )

    whole = [row for batch in as_lists(rank_loader(0, 1)) for row in batch]
    found: list[Any] = []
    state: Any = None
    for world_size, num_steps in [*steps, (1, 1000)]:
        loaders = [rank_loader(rank, world_size) for rank in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        epochs = [iter(loader) for loader in loaders]
        # Stop in the middle only after whole steps of all ranks, because the last step can be
        # uneven.
        num_left = (length - len(found)) // 12 if num_steps < 1000 else num_steps
        for _ in range(min(num_steps, num_left)):
            batches = [next(batches, None) for batches in epochs]
            for batch in batches:
                found += as_lists([batch])[0] if batch is not None else []
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states) or num_steps == 1000
        state = states[0]
        if state["epoch"] == 1:
            break
    assert found == whole
