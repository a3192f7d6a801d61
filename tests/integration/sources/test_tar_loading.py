"""Archives with real workers: same bits, resumed epochs, bad samples, and archives that change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import Damaged
from support.resumed_epochs import CASES, Case, deliver_resumed, lost_and_doubled
from support.tar_archives import npy, sample_files, write_shards, write_tar

COUNTS = [17, 0, 40, 3]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))


def take(batch: Any) -> list[tuple[Any, ...]]:
    return list(zip(batch["cls"].tolist(), map(tuple, batch["x.npy"].tolist()), strict=True))


def expected(count: int) -> list[tuple[Any, ...]]:
    return [(number, (number,) * 12) for number in range(count)]


@pytest.mark.legacy
def test_batches_are_the_same_for_any_workers(tmp_path: Path) -> None:
    dataset = penstock.open_dataset(write_shards(tmp_path, COUNTS), columns=["x.npy", "cls"])
    epochs = []
    for keywords in ({}, {"num_workers": 2}, {"num_workers": 2, "pool": "thread"}):
        order = dataset.block_order(seed=4, num_mixed=2)
        loader = penstock.DataLoader(dataset, batch_size=7, sampler=order, seed=4, **keywords)
        epochs.append([sample for batch in loader for sample in take(batch)])
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(epochs[0]) == expected(sum(COUNTS))
    assert epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("case", [CASES[3], CASES[5]], ids=str)
def test_no_sample_is_lost_or_doubled_after_a_resume(tmp_path: Path, case: Case) -> None:
    dataset = penstock.open_dataset(write_shards(tmp_path, COUNTS), columns=["cls", "x.npy"])
    delivered = deliver_resumed(dataset, case, take, seed=2)
    assert lost_and_doubled(delivered, expected(sum(COUNTS))) == (0, 0)
    assert lost_and_doubled(delivered[1:], expected(sum(COUNTS))) == (1, 0)  # control


@pytest.mark.legacy
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_is_skipped_and_named_and_moves_no_other(
    tmp_path: Path, num_workers: int
) -> None:
    files = sample_files(0, 30)
    files[3 * 11] = ("000011.x.npy", npy(np.zeros(12, np.int32))[:-5])
    path = write_tar(tmp_path / "a.tar", files)
    dataset = penstock.open_dataset(path, columns=["cls", "x.npy"])
    loader = penstock.DataLoader(
        dataset, batch_size=6, num_workers=num_workers, on_error="skip", seed=0
    )
    batches = [batch["cls"].tolist() for batch in loader]
    assert batches == [
        [number for number in range(first, first + 6) if number != 11] for first in range(0, 30, 6)
    ]
    (bad,) = loader.bad_samples
    assert bad.index == 11
    assert "field 'x.npy' of sample 11 cannot be decoded" in bad.error


@pytest.mark.parametrize("change", ["replaced", "rewritten", "truncated"])
def test_an_archive_that_changes_under_the_workers_stops_the_epoch(
    tmp_path: Path, change: str
) -> None:
    (path,) = write_shards(tmp_path, [400], width=1000)
    dataset = penstock.open_dataset(path, columns=["cls"])
    loader = penstock.DataLoader(
        dataset, batch_size=4, num_workers=2, shuffle=True, seed=0, prefetch_factor=1
    )
    batches = iter(loader)
    delivered = next(batches)["cls"].tolist()
    new = write_tar(tmp_path / "new", sample_files(1000, 1400, width=1000))
    if change == "replaced":
        os.replace(new, path)
    elif change == "rewritten":
        Path(path).write_bytes(new.read_bytes())
    else:
        os.truncate(path, 1000)

    def drain() -> None:
        for batch in batches:
            delivered.extend(batch["cls"].tolist())

    with pytest.raises(Damaged, match="has changed since the dataset was opened"):
        drain()
    assert len(delivered) < 400
    assert all(number < 400 for number in delivered)
    if change != "truncated":
        assert min(penstock.open_dataset(path)[n]["cls"] for n in range(400)) == 1000  # control


def test_samples_that_workers_read_can_be_changed(tmp_path: Path) -> None:
    dataset = penstock.open_dataset(
        write_shards(tmp_path, [30]),
        columns=["x.npy"],
        transforms={"x.npy": lambda values: torch.from_numpy(values).mul_(2)},
    )
    for _ in range(2):
        loader = penstock.DataLoader(dataset, batch_size=10, num_workers=2)
        found = torch.cat([batch["x.npy"][:, 0] for batch in loader])
        assert found.tolist() == [2 * number for number in range(30)]
