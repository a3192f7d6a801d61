"""One hash for all settings: workers, pools, start methods, prefetch, kills, resumes.

tests/soak/test_same_bits_grid.py runs the whole grid. These tests take a minute.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from support import scripts, stream_hash
from support.datasets import Samples
from support.paths import TESTS
from support.stream_hash import GOLDEN, Augmented, make

legacy = pytest.mark.legacy

# -- the expected hash -----------------------------------------------------------------------------

QUICK = stream_hash.quick_grid()


@legacy
def test_the_stream_without_workers_is_the_one_written_down() -> None:
    assert stream_hash.hashed(stream_hash.whole(make())) == GOLDEN


@legacy
@pytest.mark.parametrize("way", QUICK)
def test_the_stream_is_the_one_written_down(way: str) -> None:
    assert stream_hash.hashed(stream_hash.whole(make(**QUICK[way]))) == GOLDEN


@legacy
@pytest.mark.parametrize("way", QUICK)
def test_the_stream_is_the_one_written_down_when_killed_and_resumed(way: str) -> None:
    others = itertools.cycle([QUICK[way], {}, QUICK[way], {"num_workers": 3}])
    pieces = stream_hash.interrupted(make, others, random.Random(way))
    assert stream_hash.hashed(pieces) == GOLDEN


def test_the_stream_under_spawn_is_the_one_written_down() -> None:
    ways = [{"num_workers": n, "multiprocessing_context": "spawn"} for n in (2, 1)]
    persistent = make(**ways[0], prefetch_factor=1, persistent_workers=True)
    assert stream_hash.hashed(stream_hash.whole(persistent)) == GOLDEN
    persistent.close()
    pieces = stream_hash.interrupted(
        make, itertools.chain([{}, ways[1]], itertools.repeat({})), random.Random(1)
    )
    assert stream_hash.hashed(pieces) == GOLDEN


def test_delays_and_a_slow_consumer_do_not_matter() -> None:
    def slow(index: int) -> torch.Tensor:
        time.sleep((index * 7919 % 13) / 2000)
        return Augmented()[index]

    def consumed(batches: Any) -> Any:
        for batch in batches:
            yield batch
            time.sleep(0.002)

    loader = make(Samples(slow, 60), num_workers=4, prefetch_factor=1)
    assert stream_hash.hashed(consumed(stream_hash.whole(loader))) == GOLDEN


def test_the_parts_of_ranks_put_together_are_the_one_written_down() -> None:
    ranks = [
        DataLoader(Augmented(56), 1, shuffle=True, seed=11, rank=rank, world_size=7)
        for rank in range(7)
    ]
    single = DataLoader(Augmented(56), 7, shuffle=True, seed=11)
    steps = (
        torch.cat(step) for _ in range(stream_hash.NUM_EPOCHS) for step in zip(*ranks, strict=True)
    )
    assert stream_hash.hashed(steps) == stream_hash.hashed(stream_hash.whole(single))


# -- a killed program ------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
sys.path[:0] = sys.argv[2:]
from support import stream_hash
from penstock import DataLoader

name, num_workers = sys.argv[1], int(os.environ.get("WORKERS", "2"))
loader = DataLoader(
    stream_hash.Augmented(), batch_size=7, shuffle=True, seed=11, num_workers=num_workers
)
seen = []
if os.path.exists(name):
    with open(name) as file:
        saved = json.load(file)
    seen = saved["seen"]
    loader.load_state_dict(saved["state"])
while loader.state_dict()["epoch"] < stream_hash.NUM_EPOCHS:
    for batch in loader:
        seen.append(batch.tolist())
        with open(name + ".new", "w") as file:
            json.dump({"state": loader.state_dict(), "seen": seen}, file)
        os.replace(name + ".new", name)
        print("batch", flush=True)
print("done", flush=True)
"""


def test_a_program_that_is_killed_and_started_again_has_the_same_stream(tmp_path: Path) -> None:
    path = [str(TESTS)]
    name, chance = str(tmp_path / "checkpoint.json"), random.Random(3)
    for _ in range(2):
        with scripts.running(PROGRAM, tmp_path, name, *path) as process:
            for _ in range(chance.randrange(1, 9)):
                scripts.read_line(process, "batch")
            process.send_signal(signal.SIGKILL)
            process.wait()
    ended = scripts.run(PROGRAM, tmp_path, name, *path, WORKERS="0")
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(Path(name).read_text())["seen"]
    assert stream_hash.hashed(torch.tensor(batch) for batch in seen) == GOLDEN


# -- controls that must differ ---------------------------------------------------------------------


def theirs(num_workers: int, dataset: Any = None) -> str:
    torch.manual_seed(0)
    loader = TorchDataLoader(
        Augmented() if dataset is None else dataset, batch_size=7, num_workers=num_workers
    )
    return stream_hash.hashed(stream_hash.whole(loader))


def test_torch_s_own_loader_fails_with_2_against_4_workers() -> None:
    assert theirs(2) != theirs(4)
    assert theirs(2) == theirs(2)  # so the number of workers makes the difference


@pytest.mark.parametrize(
    "drawn", [lambda i: time.time_ns(), lambda i: id(object()) + i], ids=["time", "id"]
)
def test_a_dataset_that_uses_the_time_or_an_address_fails(drawn: Any) -> None:
    dataset = Samples(lambda i: torch.tensor([i, drawn(i)]), 60)
    hashes = {
        stream_hash.hashed(stream_hash.whole(make(dataset, num_workers=n))) for n in (0, 1, 2)
    }
    assert len(hashes) > 1


def test_another_seed_epoch_or_batch_size_has_another_hash() -> None:
    def first(seed: int = 11, rows: int = 7, epoch: int = 0) -> str:
        loader = DataLoader(Augmented(), rows, shuffle=True, seed=seed)
        loader.set_epoch(epoch)
        return stream_hash.hashed(loader)

    assert len({first(), first(seed=12), first(rows=6), first(epoch=1)}) == 4
