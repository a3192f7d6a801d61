"""A thousand loaders, each used for one batch and dropped, leak nothing."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import psutil
import pytest

from penstock import DataLoader
from support.datasets import Numbers

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_LOADERS = 1000
WAYS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"num_workers": 2, "pool": "thread"},
    "forkserver": {"num_workers": 2},
    "fork server, persistent": {"num_workers": 2, "persistent_workers": True},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
}
MAX_GROWTH_BYTES = 20 << 20
"""Leaking one page of the control segment per loader would cost 64 MB over a thousand loaders."""


def census() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    with open("/proc/self/maps") as lines:
        mappings = sum("penstock" in line for line in lines)
    fork_server = [
        child for child in process.children() if "fork_server_main" in " ".join(child.cmdline())
    ]
    return {
        "fds": process.num_fds(),
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "processes": len(process.children(recursive=True)),
        "segments": len(os.listdir("/dev/shm")),
        "mappings": mappings,
        "fork server fds": sum(child.num_fds() for child in fork_server),
    }


def memory() -> dict[str, int]:
    process = psutil.Process()
    return {
        str(child.pid): child.memory_full_info().uss for child in [process, *process.children()]
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_loaders_leave_nothing(way: str) -> None:
    def use(times: int) -> None:
        for number in range(times):
            loader = DataLoader(Numbers(40, (1000,)), batch_size=4, **WAYS[way])
            image, labels = next(iter(loader))
            assert labels.tolist() == [0, 1, 2, 3], number
            assert image.shape == (4, 1000)

    use(50)  # fill caches and settle the allocator
    before, memory_before = census(), memory()
    use(NUM_LOADERS)
    after, memory_after = census(), memory()
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name]}
    assert grown == {}
    for pid, num_bytes in memory_before.items():
        assert memory_after[pid] - num_bytes < MAX_GROWTH_BYTES, f"process {pid}"


def test_growth_would_be_noticed() -> None:
    before = census()
    kept = [iter(DataLoader(Numbers(8), batch_size=4, num_workers=1)) for _ in range(3)]
    after = census()
    assert after["fds"] > before["fds"]
    assert after["processes"] > before["processes"]
    assert after["mappings"] > before["mappings"]
    del kept
