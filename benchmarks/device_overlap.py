"""Case (g) of device.py: the share of the copy time that is hidden from the step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import penstock
from device_clock import endless, fresh, run_for, timed
from device_datasets import BATCH_SIZE, NUM_WORKERS, Stacked
from measure import Case, Contender, Pace, Target


def hidden(pace: Pace, key: str) -> Case:
    """Measure the share of the copy time during which the step does not wait.

    There are two measurements: how long the step's stream waits for a batch, and how much longer a
    step takes than on data that is already on the GPU. The second includes the memory bandwidth and
    clock speed that a copy takes from the step, which cannot be hidden. The control copies in the
    step's own stream.
    """
    every, target = "all of the copy", Target(bound=0.95)
    rows = {
        "control: copied in the step's stream": (_waited, False, None),
        "Penstock, device='cuda', by the stream's waits": (_waited, True, target),
        "Penstock, device='cuda', by the steps' lengths": (_lengthened, True, None),
    }
    return Case(
        key=key,
        title="Share of the copy time hidden behind computing, from events",
        unit="part",
        contenders=[
            Contender(name=every, turn=lambda: 1.0),
            *(
                Contender(
                    name=name,
                    turn=partial(_hidden, look, is_ours=is_ours),
                    against=(every,),
                    target=target,
                )
                for name, (look, is_ours, target) in rows.items()
            ),
        ],
    )


def _hidden(look: Callable[..., float], is_ours: bool) -> float:
    with fresh():
        host = torch.empty(BATCH_SIZE, 3, 224, 224, dtype=torch.uint8).pin_memory()
        resident = host.cuda()
        copy_s = timed(lambda: host.cuda(non_blocking=True), 200)
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

        def compute() -> None:
            for _ in range(8):
                torch.mm(matrix, matrix)

        def naive() -> torch.Tensor:
            return host.cuda(non_blocking=True)

        loader = penstock.DataLoader(
            Stacked(), batch_size=BATCH_SIZE, num_workers=min(8, NUM_WORKERS), device="cuda"
        )
        batches = endless(loader)
        fed = partial(next, batches) if is_ours else naive
        run_for(
            lambda: (fed().sum(), compute()), 1.0
        )  # warm-up: the ring grows and slots are pinned
        longer_s = look(fed, lambda: resident, compute)
        batches.close()  # type: ignore[attr-defined]
    return 1 - max(0.0, longer_s) / copy_s


def _waited(
    fed: Callable[[], Any], resident: Callable[[], Any], compute: Callable[[], None]
) -> float:
    """Return the seconds a step's stream waits per batch, beyond those for data on the GPU."""
    found = []
    for take in (fed, resident):
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(200)]  # type: ignore[no-untyped-call]
        for before, after in marks:
            before.record()
            batch = take()
            after.record()
            batch.sum()
            compute()
        torch.cuda.synchronize()
        found.append(statistics.mean(before.elapsed_time(after) for before, after in marks))
    return (found[0] - found[1]) / 1e3


def _lengthened(
    fed: Callable[[], Any], resident: Callable[[], Any], compute: Callable[[], None]
) -> float:
    """Return how many seconds longer a step takes than on data that is already on the GPU.

    Both are measured in turns, because the GPU's clock speed varies.
    """
    found = []
    for _ in range(5):
        fed_s, alone_s = (
            timed(lambda: (take().sum(), compute()), 100)  # noqa: B023
            for take in (fed, resident)
        )
        found.append(fed_s - alone_s)
    return statistics.median(found)
