"""In a free-threaded Python, threads are chosen while the GIL is off. ``tools/free_threaded.sh``.

Other Pythons are told that their GIL is off.
"""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import pytest

from penstock import DataLoader, rng
from penstock.engine.parent import fork_server
from penstock.machine import collect, host
from support.datasets import Samples, assert_same
from support.datasets import collect as load

pytestmark = pytest.mark.legacy


@pytest.fixture
def no_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell every module that asks that the GIL is off."""
    for module in (host, fork_server):
        monkeypatch.setattr(module, "is_gil_enabled", lambda: False)
    collect._kept_facts.cache_clear()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)


class Names(Samples):
    """Samples that are the name of the thread that loads them."""

    def __init__(self) -> None:
        super().__init__(lambda index: threading.current_thread().name, 8)


def test_workers_are_threads_without_being_asked_for(no_gil: None) -> None:
    loader = DataLoader(Names(), batch_size=None, num_workers=2)
    assert loader.plan.pool.value == "thread"
    assert all(name.startswith("penstock-worker") for name in loader)


def test_with_the_gil_they_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control. Also what happens in the epoch after a module has turned the GIL on."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    monkeypatch.setattr(host, "is_gil_enabled", lambda: True)
    monkeypatch.setattr(fork_server, "is_gil_enabled", lambda: True)
    loader = DataLoader(Names(), batch_size=None, num_workers=1)
    assert loader.plan.pool.value == "process"
    assert set(loader) == {"MainThread"}


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: rng().random()])
@pytest.mark.parametrize("num_workers", [2, "auto"])
def test_the_bits_are_those_of_no_worker(no_gil: None, draw: Any, num_workers: Any) -> None:
    def epoch(num_workers: Any) -> list[Any]:
        dataset = Samples(lambda index: (index, float(draw())), 200)
        return load(DataLoader(dataset, batch_size=4, seed=3, num_workers=num_workers))

    assert_same(epoch(num_workers), epoch(0))
