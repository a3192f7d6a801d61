"""Cases of auto.py: six kinds of dataset, with fixed numbers of workers and with "auto".

A turn creates a new loader and runs some whole epochs. It includes the start of the workers, and
for "auto" also the trial of the first batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

import penstock
from datasets import Crumbs, Pairs, Pictures, Working, make_images_in_memory
from measure import Case, Contender, Pace, Target
from penstock.cli.loader_timing import time_loader

BATCH_SIZE = 64
FIXED = (0, 1, 2, 4, 8)
NUM_EPOCHS = 2
NUM_EPOCHS_IN_MEMORY = 20
MAX_LOSS = 1.1
TORCH: Any = torch.utils.data.DataLoader
OURS: Any = penstock.DataLoader


def _epochs(make: Callable[[], Any], num_epochs: int) -> float:
    """Return the seconds for a new loader and all its epochs."""
    start_s = time.perf_counter()
    loader = make()
    for _ in range(num_epochs):
        for _ in loader:
            pass
    return time.perf_counter() - start_s


def _kind(key: str, title: str, data: Callable[[], Any], pace: Pace) -> Case:
    dataset = data()
    num_epochs = NUM_EPOCHS_IN_MEMORY if key == "b" else NUM_EPOCHS

    def turn(num_workers: int | str) -> Callable[[], float]:
        return partial(_epochs, partial(_ours, dataset, num_workers), num_epochs)

    contenders = [Contender(name=_name(n), turn=turn(n)) for n in FIXED]
    auto = Contender(
        name="num_workers='auto'",
        turn=turn("auto"),
        against=tuple(_name(n) for n in FIXED),
        target=Target(bound=MAX_LOSS, is_ceiling=True),
    )
    return Case(key=key, title=title, unit="s", contenders=[*contenders, auto])


def _name(num_workers: int) -> str:
    return f"num_workers={num_workers}"


def _ours(dataset: Any, num_workers: int | str) -> Any:
    return OURS(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers)


def _against_torch(key: str, title: str, data: Any, target: Target | None, pace: Pace) -> Case:
    theirs, ours = "PyTorch, 2 workers", "Penstock, num_workers='auto'"
    makers = {
        theirs: partial(TORCH, data, BATCH_SIZE, num_workers=2),
        "PyTorch, 0 workers": partial(TORCH, data, BATCH_SIZE),
        ours: partial(OURS, data, BATCH_SIZE, num_workers="auto"),
    }

    def rate(make: Callable[[], Any]) -> float:
        timing = time_loader(make, warm_up_s=pace.warm_up_s, window_s=pace.window_s)
        return timing.batches_per_s

    contenders = [
        Contender(
            name=name,
            turn=partial(rate, make),
            against=() if name == theirs else (theirs,),
            target=target if name == ours else None,
        )
        for name, make in makers.items()
    ]
    return Case(key=key, title=title, unit="batches/s", contenders=contenders)


def _size(pace: Pace, seconds: float, sample_s: float) -> int:
    """Return the number of samples for which two inline epochs take about ``seconds``."""
    share = pace.window_s / Pace().window_s
    return max(2 * BATCH_SIZE, int(share * seconds / NUM_EPOCHS / sample_s))


KINDS: Mapping[str, tuple[str, Callable[[Pace], Any]]] = {
    "a": ("Tiny samples, 16 bytes", lambda pace: Crumbs(_size(pace, 2.0, 5e-6))),
    "b": (
        "Tensors in memory, 12 KB a sample",
        lambda pace: make_images_in_memory(pace.num_images_in_memory),
    ),
    "c": ("Large samples that cost little, 150 KB", lambda pace: Pictures(_size(pace, 3.0, 6e-5))),
    "d": ("Light work, 0.2 ms a sample", lambda pace: Working(_size(pace, 4.0, 2e-4), 2e-4)),
    "e": ("Heavy work, 10 ms a sample", lambda pace: Working(_size(pace, 20.0, 1e-2), 1e-2)),
    "f": (
        "Waiting for a disk or a network, 5 ms a sample",
        lambda pace: Working(_size(pace, 8.0, 5e-3), 5e-3, waits=True),
    ),
}


def _make_kind(key: str, pace: Pace) -> Case:
    title, data = KINDS[key]
    return _kind(key, title, partial(data, pace), pace)


CASES: Mapping[str, Callable[[Pace], Case]] = MappingProxyType(
    {
        **{key: partial(_make_kind, key) for key in KINDS},
        "g": partial(
            _against_torch, "g", f"{BATCH_SIZE} x two numbers", Pairs(), Target(bound=10.0)
        ),
        # No target: making the tensor takes longer than everything the loader does.
        "h": partial(_against_torch, "h", f"{BATCH_SIZE} x torch.full((4,))", Crumbs(), None),
    }
)
