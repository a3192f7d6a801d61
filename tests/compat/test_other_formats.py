"""Sets written by pyarrow, datasets, streaming, litdata and pylance, read by their index.

Each is equal to what the library's own reader returns. Shuffled, with workers, ranks and a resume,
no sample is lost and none is read twice. The libraries' own loaders are the controls: where they
lose or repeat samples, a test shows it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from support.format_sets import FORMAT_CASES, NUM_SAMPLES, FormatCase

pytestmark = [
    pytest.mark.formats,
    pytest.mark.filterwarnings("ignore"),  # of the libraries, in the code under control
]
BATCH = 8
CHUNK_OF_ORDER = 40


class Written:
    """A set of one format on disk."""

    def __init__(self, name: str, case: FormatCase, folder: Any) -> None:
        self.name, self.case, self.folder = name, case, folder
        case.write(folder)

    def open(self, **options: Any) -> Any:
        return penstock.open_dataset(self.folder / self.case.path, **options)


@pytest.fixture(scope="module", params=FORMAT_CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    case = FORMAT_CASES[request.param]
    pytest.importorskip(case.library)
    made = Written(request.param, case, tmp_path_factory.mktemp(request.param))
    made.open()[0]  # starts the threads of libraries, before a test counts descriptors
    case.read(made.folder)
    return made


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """Return arrays and tensors as lists, to compare values."""
    return {
        name: np.asarray(value).tolist() if name == "x" else value for name, value in sample.items()
    }


def test_samples_are_those_of_the_library_s_own_reader(written: Written) -> None:
    data = written.open()
    expected = [plain(sample) for sample in written.case.read(written.folder)]
    assert len(data) == len(expected) == NUM_SAMPLES
    assert [plain(data[n]) for n in range(NUM_SAMPLES)] == expected
    order = random.Random(1).sample(range(NUM_SAMPLES), NUM_SAMPLES)
    assert [plain(one) for one in data.__getitems__(order)] == [expected[n] for n in order]
    assert [plain(one) for one in data.__getitems__(order)] != expected


def test_the_block_order_needs_few_blocks_at_a_time(written: Written) -> None:
    data = written.open(columns=["id"])
    order = list(data.block_order(seed=3, num_mixed=2))
    assert sorted(order) == list(range(NUM_SAMPLES))
    starts = data.block_starts
    first = starts.searchsorted(order[:CHUNK_OF_ORDER], side="right")
    assert len(set(first.tolist())) <= 2
    shuffled = starts.searchsorted(list(penstock.SeededOrder(data, seed=3)), side="right")
    assert len(set(shuffled[:CHUNK_OF_ORDER].tolist())) > 2


def make_loader(
    written: Written, num_workers: int, rank: int, world_size: int, is_blocks: bool
) -> Any:
    data = written.open(columns=["id", "x"])
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": num_workers}
    ranks = {"rank": rank, "world_size": world_size, "seed": 5}
    if is_blocks:
        order = data.block_order(num_mixed=2, batch_size=BATCH, **ranks)
        return penstock.DataLoader(data, sampler=order, **options)
    return penstock.DataLoader(data, shuffle=True, **options, **ranks)


def read_ids(batches: Any, count: int | None = None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(batches):
        ids = batch["id"].tolist()
        expected = [np.asarray(np.arange(6).reshape(2, 3) * one).tolist() for one in ids]
        assert torch.as_tensor(batch["x"]).tolist() == expected
        found += ids
        if number + 1 == count:
            break
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "world_size", "is_blocks"),
    [(0, 3, True), (1, 2, False), (2, 3, True), (3, 1, False), (4, 1, True)],
)
def test_no_sample_is_lost_or_doubled_by_workers_ranks_and_a_resume(
    written: Written, num_workers: int, world_size: int, is_blocks: bool
) -> None:
    points = random.Random(f"{written.name} {num_workers} {world_size}")
    seen: list[int] = []
    for rank in range(world_size):
        point = points.randrange(1, NUM_SAMPLES // world_size // BATCH)
        loader = make_loader(written, num_workers, rank, world_size, is_blocks)
        batches = iter(loader)
        seen += read_ids(batches, point)
        state = loader.state_dict()
        del batches, loader
        other = make_loader(written, (num_workers + 1) % 2, rank, world_size, is_blocks)
        other.load_state_dict(state)
        seen += read_ids(other)
    assert Counter(seen) == Counter(range(NUM_SAMPLES))
    assert seen != sorted(seen)


# -- controls --------------------------------------------------------------------------------------


def test_a_resumed_stream_of_datasets_loses_and_repeats_samples() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"id": list(range(100))})

    def stream() -> Any:
        return made.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=20)

    first = stream()
    batches = iter(first)
    seen = [next(batches)["id"] for _ in range(37)]
    other = stream()
    other.load_state_dict(first.state_dict())
    seen += [sample["id"] for sample in other]
    counts = Counter(seen)
    assert set(range(100)) - set(counts)  # lost
    if int(datasets.__version__.split(".")[0]) >= 5:  # datasets 4 only loses
        assert max(counts.values()) > 1  # repeated


RANKS = """
import collections, os, shutil, sys
import torch.distributed as dist
dist.init_process_group("gloo")
which, path = sys.argv[1:]
if which == "mds":
    from streaming import StreamingDataLoader, StreamingDataset
    data = StreamingDataset(local=path, shuffle=True, batch_size=8)
else:
    from litdata import StreamingDataLoader, StreamingDataset
    data = StreamingDataset(path, shuffle=True)
loader = StreamingDataLoader(data, batch_size=8, num_workers=0)
mine = [n for batch in loader for n in batch["id"].tolist()]
parts = [None] * dist.get_world_size()
dist.all_gather_object(parts, mine)
if dist.get_rank() == 0:
    counts = collections.Counter(sum(parts, []))
    print("LOST", 230 - len(counts), "REPEATED", sum(counts.values()) - len(counts), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "message"), [("mds", "LOST 0 REPEATED"), ("litdata", "LOST")])
def test_three_ranks_of_other_loaders_repeat_or_lose_samples(
    tmp_path: Any, name: str, message: str
) -> None:
    case = FORMAT_CASES[name]
    pytest.importorskip(case.library)
    case.write(tmp_path)
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=3", str(script), name, str(tmp_path / case.path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        try:
            output, _ = run.communicate(timeout=280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    (told,) = [line for line in output.splitlines() if line.startswith("LOST")]
    assert told.startswith(message)
    assert told != "LOST 0 REPEATED 0"


@pytest.fixture(scope="module")
def lance_set(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a Lance dataset that was opened once, so that Lance's threads have started."""
    lance = pytest.importorskip("lance")
    case = FORMAT_CASES["lance"]
    folder = tmp_path_factory.mktemp("lance")
    case.write(folder)
    lance.dataset(str(folder / case.path)).take([0])
    return folder / case.path


def test_the_stream_of_lance_has_no_state_to_resume_from(lance_set: Any) -> None:
    lance_torch = pytest.importorskip("lance.torch.data")
    stream = lance_torch.LanceDataset(str(lance_set), batch_size=BATCH)
    assert not hasattr(stream, "state_dict")
    data = penstock.open_dataset(lance_set, columns=["id"])
    loader = penstock.DataLoader(data, batch_size=BATCH, shuffle=True, seed=1)
    next(iter(loader))
    assert loader.state_dict()
