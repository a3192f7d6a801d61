"""Mixtures in real workers, on several ranks, and resumed in the middle of an epoch."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import DataLoader
from support.datasets import Draws

pytestmark = pytest.mark.legacy

GLOBAL_BATCH = 12


class Shifted:
    """Samples that tell their source and what they drew."""

    def __init__(self, source: int, length: int, bad: int | None = None) -> None:
        self.source, self.draws, self.bad = source, Draws(length), bad

    def __len__(self) -> int:
        return len(self.draws)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"sample {index} of source {self.source} is truncated")
        return self.source, index, *self.draws[index][1:]


def make(rank: int = 0, world_size: int = 1, num_workers: int = 0, **options: Any) -> Any:
    sources = [(Shifted(0, 50), 0.6), (Shifted(1, 7), 0.1), (Shifted(2, 30), 0.3)]
    mixture = penstock.mix(sources, length=100, weights_at={130: [1, 1, 0]}, names=["a", "b", "c"])
    options = {"batch_size": GLOBAL_BATCH // world_size, "shuffle": True, "seed": 5, **options}
    if world_size > 1:
        options.update(rank=rank, world_size=world_size)
    return DataLoader(mixture, num_workers=num_workers, **options)


def as_rows(batch: Any) -> list[Any]:
    return [tuple(map(repr, row)) for row in zip(*(f.tolist() for f in batch), strict=True)]


def epochs(loader: Any, num_epochs: int = 2) -> list[Any]:
    return [as_rows(batch) for _ in range(num_epochs) for batch in loader]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_give_the_same_bits_as_none(num_workers: int) -> None:
    assert epochs(make(num_workers=num_workers)) == epochs(make())


def test_another_seed_gives_other_samples() -> None:
    assert epochs(make(seed=6)) != epochs(make())


def joined(parts: list[list[Any]]) -> list[Any]:
    """Return the global batches of several ranks, each in order."""
    steps = itertools.zip_longest(*parts, fillvalue=[])
    return [[row for part in step for row in part] for step in steps]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("num_done", [1, 3, 7])
def test_a_run_resumes_on_another_number_of_ranks_and_workers(
    before: int, after: int, num_done: int
) -> None:
    expected = epochs(make(), 2)
    parts, states = [], []
    for rank in range(before):
        loader = make(rank, before, num_workers=rank % 2)
        parts.append([as_rows(batch) for batch in itertools.islice(loader, num_done)])
        states.append(json.dumps(loader.state_dict()))
    assert len({*states}) == 1
    assert joined(parts) == expected[:num_done]
    rest = []
    for rank in range(after):
        loader = make(rank, after, num_workers=2 - rank % 2)
        loader.load_state_dict(json.loads(states[0]))
        rest.append(epochs(loader))
    assert joined(rest) == expected[num_done:]


def test_a_bad_sample_moves_no_other_one_and_is_counted_for_its_source() -> None:
    def load(bad: int | None) -> Any:
        sources = [(Shifted(0, 50), 2), (Shifted(1, 20, bad), 1)]
        mixture = penstock.mix(sources, names=["web", "books"], max_bad=[0, 1])
        return DataLoader(
            mixture, batch_size=6, shuffle=True, seed=1, num_workers=2, on_error="skip"
        )

    loader = load(bad=3)
    found, whole = epochs(loader, 1), epochs(load(bad=None), 1)
    kept = [row for batch in found for row in batch]
    lost = [row for batch in whole for row in batch if row not in kept]
    assert [row[:2] for row in lost] == [("1", "3")]
    assert [(bad.index, loader.dataset.locate(bad.index)) for bad in loader.bad_samples] == [
        (53, (1, 3))
    ]


def test_statistics_count_sources_over_all_ranks() -> None:
    loaders = [make(rank, 3, num_workers=1) for rank in range(3)]
    seen = [row for loader in loaders for batch in epochs(loader, 1) for row in batch]
    expected = {name: sum(row[0] == str(at) for row in seen) for at, name in enumerate("abc")}
    assert all(loader.metrics().sources == expected for loader in loaders)


def keep(samples: list[Any]) -> list[Any]:
    return samples


def write_tar(path: Path, name: str, num_samples: int) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(num_samples):
            content = f"{name} {number}".encode()
            member = tarfile.TarInfo(f"{number:05}.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("num_mixed", [None, 2])
def test_archives_and_datasets_in_memory_are_mixed(tmp_path: Path, num_mixed: int | None) -> None:
    write_tar(tmp_path / "web.tar", "web", 60)
    books = [{"txt": f"books {number}"} for number in range(25)]

    def load(num_workers: int) -> list[str]:
        web = penstock.open_dataset(tmp_path / "web.tar")
        mixture = penstock.mix([(web, 3), (books, 1)], stop="all", num_mixed=num_mixed)
        loader = DataLoader(
            mixture,
            batch_size=8,
            shuffle=True,
            seed=0,
            num_workers=num_workers,
            collate_fn=keep,
        )
        return [sample["txt"] for batch in loader for sample in batch]

    found = load(2)
    assert found == load(0)
    everything = [f"web {one}" for one in range(60)] + [f"books {one}" for one in range(25)]
    assert {*found} == {*everything}
    num_web = sum(text.startswith("web") for text in found)
    assert abs(num_web - 0.75 * len(found)) < 8


def test_ten_thousand_sources_reach_the_workers() -> None:
    def load(num_workers: int) -> list[int]:
        sources = [(range(number, number + 3), 1 + number % 5) for number in range(10_000)]
        mixture = penstock.mix(sources, length=512)
        loader = DataLoader(mixture, 64, shuffle=True, seed=0, num_workers=num_workers)
        return [number for batch in loader for number in batch.tolist()]

    assert load(2) == load(0)
