"""penstock.legacy with real workers, and before torch."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch

import penstock
from penstock import legacy

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


NO_TORCH = """
import sys
from penstock.legacy import setup_rocm_multiprocessing, is_windows, print_rocm_info
import penstock
assert penstock.legacy.is_windows is is_windows
setup_rocm_multiprocessing()
print_rocm_info()
assert not {"torch", "numpy"} & set(sys.modules), "it must be possible to call these before torch"
import multiprocessing
assert multiprocessing.get_start_method() == "spawn"
"""


def test_what_wants_to_be_called_before_torch_can_be() -> None:
    command = [sys.executable, "-c", NO_TORCH]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "spawns from now on" in result.stdout
    assert "HSA_OVERRIDE_GFX_VERSION" in result.stdout
