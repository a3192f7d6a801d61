"""penstock.legacy with real workers, and imported before torch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import legacy
from support import scripts

pytestmark = pytest.mark.legacy


class Draws:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, random.random()


def epoch(**arguments: Any) -> list[Any]:
    loader = legacy.create_dataloader(Draws(), batch_size=4, shuffle=True, **arguments)
    assert isinstance(loader, penstock.DataLoader)
    assert isinstance(loader, torch.utils.data.DataLoader)
    return [(indices.tolist(), noise.tolist()) for indices, noise in loader]


def test_a_seed_gives_the_same_epoch_with_any_number_of_workers() -> None:
    assert epoch(seed=42) == epoch(seed=42, num_workers=2)
    assert epoch(seed=42) != epoch(seed=43)


TRAINING = """
import sys
from penstock.legacy import setup_rocm_multiprocessing, patch_dataloader, print_rocm_info
import penstock
setup_rocm_multiprocessing()
print_rocm_info()
assert penstock.legacy.print_rocm_info is print_rocm_info
assert not {"torch", "numpy"} & set(sys.modules), "it must be possible to call these before torch"

import multiprocessing
from torch.utils.data import DataLoader
assert multiprocessing.get_start_method() == "spawn"
patch_dataloader()

class Squares:
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i * i

print([batch.tolist() for batch in DataLoader(Squares(), batch_size=4, num_workers=2)])
"""


def test_a_script_for_rocm_runs_as_it_stands_and_needs_no_guard(tmp_path: Path) -> None:
    result = scripts.run(TRAINING, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "uses 'spawn' from now on" in result.stdout
    assert "HSA_OVERRIDE_GFX_VERSION" in result.stdout
    assert "[[0, 1, 4, 9], [16, 25, 36, 49]]" in result.stdout
