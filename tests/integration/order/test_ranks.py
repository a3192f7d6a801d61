"""Ranks as real processes under torch.distributed, added and removed between global steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler

from penstock import BlockOrder, DataLoader
from penstock.errors import BadArgument
from support import scripts
from support.datasets import Draws, Numbers, snapshot
from support.paths import SITE, TESTS

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

LENGTH, GLOBAL_BATCH, SEED = 100, 12, 5  # same values as in the program below

RANKS = """
import itertools, json, multiprocessing, sys
import torch.distributed as dist
from penstock import DataLoader
from support.datasets import Draws

folder, world_size, num_steps, num_workers = sys.argv[1], *map(int, sys.argv[2:])

def run(rank):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    evaluation = DataLoader(Draws(30), batch_size=4)
    loader = DataLoader(
        Draws(100), batch_size=12 // world_size, shuffle=True, seed=5, shard=True,
        num_workers=num_workers,
    )
    with open(f"{folder}/state.json") as file:
        state = json.load(file)
    if state is not None:
        loader.load_state_dict(state)
    steps = []
    for _ in range(2 if num_steps < 0 else 1):  # the last phase ends this epoch and runs another
        for batch in itertools.islice(loader, None if num_steps < 0 else num_steps):
            mine = [field.tolist() for field in batch]
            parts = [None] * world_size
            dist.all_gather_object(parts, mine)
            steps.append([[row for part in parts for row in part[place]] for place in range(5)])
    states = [None] * world_size
    dist.all_gather_object(states, loader.state_dict())
    seen = [None] * world_size
    dist.all_gather_object(seen, [int(index) for batch in evaluation for index in batch[0]])
    dist.destroy_process_group()
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump({"steps": steps, "states": states, "seen": seen}, file)

# The ranks are forked before anything has run, so that only this process imports torch.
context = multiprocessing.get_context("fork")
ranks = [context.Process(target=run, args=(rank,)) for rank in range(world_size)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
sys.exit(any(rank.exitcode for rank in ranks))
"""


def run_ranks(
    folder: Path, state: Any, *, world_size: int, num_steps: int, num_workers: int
) -> dict[str, Any]:
    """Run ``world_size`` ranks to their end, and return the data that rank 0 gathered."""
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps(state))
    path = os.pathsep.join([str(SITE), str(TESTS), *filter(None, sys.path)])
    numbers = map(str, (world_size, num_steps, num_workers))
    ended = scripts.run(RANKS, folder, str(folder), *numbers, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """2 ranks, then 3, then 1. Each phase resumes from the state of the previous one."""
    folder, state, found = tmp_path_factory.mktemp("ranks"), None, []
    for world_size, num_steps, num_workers in ((2, 3, 1), (3, 3, 0), (1, -1, 2)):
        phase = run_ranks(
            folder / str(world_size),
            state,
            world_size=world_size,
            num_steps=num_steps,
            num_workers=num_workers,
        )
        state = phase["states"][-1]
        found.append(phase)
    return found


def uninterrupted() -> list[list[Any]]:
    loader = DataLoader(Draws(LENGTH), batch_size=GLOBAL_BATCH, shuffle=True, seed=SEED)
    return [[field.tolist() for field in snapshot(batch)] for _ in range(2) for batch in loader]


def test_two_then_three_then_one_rank_have_the_stream_of_one(phases: list[dict[str, Any]]) -> None:
    steps = [step for phase in phases for step in phase["steps"]]
    assert steps == uninterrupted()


def test_all_ranks_are_at_the_same_place_after_a_step(phases: list[dict[str, Any]]) -> None:
    for phase, position in zip(phases, (36, 72, 0), strict=True):
        assert all(state == phase["states"][0] for state in phase["states"])
        assert phase["states"][0]["position"] == position


def test_an_evaluation_loader_without_shard_sees_all_data_on_each_rank(
    phases: list[dict[str, Any]],
) -> None:
    for phase in phases:
        assert phase["seen"] == [list(range(30))] * len(phase["seen"])


def test_torch_s_own_ranks_fail_this_test() -> None:
    def stream(world_size: int) -> list[Any]:
        loaders = [
            TorchDataLoader(
                Draws(LENGTH),
                batch_size=GLOBAL_BATCH // world_size,
                sampler=DistributedSampler(range(LENGTH), world_size, rank, seed=SEED),
            )
            for rank in range(world_size)
        ]
        steps = zip(*loaders, strict=True)
        return [[int(i) for batch in step for i in batch[0]] for step in steps]

    assert stream(2) != stream(3)
    assert len({index for step in stream(3) for index in step}) == LENGTH
    assert sum(map(len, stream(3))) > LENGTH  # it also duplicates samples


# -- invalid input ---------------------------------------------------------------------------------


def rank_indices(rank: int, world_size: int, length: int, **more: Any) -> list[int]:
    loader = DataLoader(
        Numbers(length), 2, shuffle=True, seed=1, rank=rank, world_size=world_size, **more
    )
    batches = [batch[1].tolist() for batch in loader]
    assert len(loader) == len(batches)
    return [index for batch in batches for index in batch]


@pytest.mark.legacy
def test_with_more_ranks_than_samples_nothing_is_lost_and_nothing_is_doubled() -> None:
    parts = [rank_indices(rank, 5, 3) for rank in range(5)]
    assert sorted(index for part in parts for index in part) == [0, 1, 2]
    padded = [rank_indices(rank, 5, 3, padding=True) for rank in range(5)]
    assert [len(part) for part in padded] == [1] * 5
    assert [rank_indices(rank, 5, 3, drop_last=True) for rank in range(5)] == [[]] * 5


@pytest.mark.legacy
@pytest.mark.parametrize("more", [{}, {"padding": True}, {"drop_last": True}])
def test_an_empty_dataset_is_shared_out_too(more: dict[str, Any]) -> None:
    assert [rank_indices(rank, 3, 0, **more) for rank in range(3)] == [[]] * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shard": True}, "not initialized"),
        ({"rank": 0}, "must be given together"),
        ({"world_size": 2}, "must be given together"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"rank": -1, "world_size": 2}, "rank=-1"),
        ({"rank": 0, "world_size": 0}, "world_size=0"),
        ({"rank": 0, "world_size": 2, "sampler": [0, 1]}, "cannot be combined with a sampler"),
        (
            {"shard": True, "sampler": BlockOrder(8, block_size=2)},
            r"sampler=dataset.block_order\(..., rank=torch.distributed.get_rank\(\), world_size=",
        ),
        ({"rank": 0, "world_size": 2, "seed": None}, "the same seed"),
        ({"rank": 0, "world_size": 2, "padding": True, "drop_last": True}, "cannot be combined"),
        ({"seed": 1 << 64}, "64 bits"),
        ({"seed": -(1 << 63) - 1}, "64 bits"),
        ({"seed": 0.5}, "must be an integer"),
        ({"seed": "zero"}, "must be an integer"),
    ],
)
def test_ranks_and_seeds_that_make_no_sense_are_refused(
    arguments: dict[str, Any], words: str
) -> None:
    arguments = {"seed": 0, "shuffle": "sampler" not in arguments, **arguments}
    with pytest.raises(BadArgument, match=words):
        DataLoader(Numbers(8), batch_size=2, **arguments)


@pytest.mark.legacy
def test_a_negative_seed_is_the_unsigned_one_of_the_same_bits() -> None:
    epochs = [
        [batch[0].tolist() for batch in DataLoader(Draws(9), 3, shuffle=True, seed=seed)]
        for seed in (-1, (1 << 64) - 1, -2)
    ]
    assert epochs[0] == epochs[1] != epochs[2]
