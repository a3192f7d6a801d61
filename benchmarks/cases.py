"""Cases of loader.py, each with its contenders and target ratios."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import TensorDataset

import penstock
from datasets import Crumbs, Pictures, make_images_in_memory
from measure import Case, Contender, Pace, Target
from penstock.cli.loader_timing import time_loader

BATCH_SIZE = 64
NUM_WORKERS = 2
TORCH: Any = torch.utils.data.DataLoader
OURS: Any = penstock.DataLoader

Maker = Callable[[], Any]
"""Creates a loader."""


def transport(pace: Pace) -> Case:
    """(a) Large samples that take almost no time to make."""
    data = Pictures()
    keywords: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": NUM_WORKERS}
    makers = {
        "PyTorch": partial(TORCH, data, **keywords),
        "Penstock, randomness='sample'": partial(OURS, data, **keywords),
        "Penstock, randomness='worker'": partial(OURS, data, **keywords, randomness="worker"),
    }
    theirs, *ours = makers
    sample_gb = data[0].numel() / 1e9
    return Case(
        key="a",
        title=f"Transport: {BATCH_SIZE} x 150 KB uint8, {NUM_WORKERS} workers",
        unit="GB/s",
        contenders=[
            *_enter(
                makers,
                pace,
                scale=BATCH_SIZE * sample_gb,
                against=dict.fromkeys(ours, (theirs,)),
                targets=dict.fromkeys(ours, Target(bound=4.0, goal=6.0)),
            ),
            Contender(
                name=f"No loader, {NUM_WORKERS} processes",
                turn=lambda: _copy_floor(pace) * sample_gb,
                against=(theirs,),
            ),
        ],
    )


def tiny_samples(pace: Pace) -> Case:
    """(b) Samples of 16 bytes, with and without workers."""
    data = Crumbs()
    makers: dict[str, Maker] = {}
    against: dict[str, tuple[str, ...]] = {}
    for count in (NUM_WORKERS, 0):
        keywords: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": count}
        theirs = f"PyTorch, {count} workers"
        makers[theirs] = partial(TORCH, data, **keywords)
        for randomness in ("worker", "sample"):
            ours = f"Penstock, {count} workers, randomness={randomness!r}"
            makers[ours] = partial(OURS, data, **keywords, randomness=randomness)
            against[ours] = (theirs,)
    return Case(
        key="b",
        title=f"Tiny samples: {BATCH_SIZE} x 16 bytes",
        unit="batches/s",
        contenders=_enter(
            makers,
            pace,
            against=against,
            targets={
                f"Penstock, {NUM_WORKERS} workers, randomness='worker'": Target(bound=3.0),
                f"Penstock, {NUM_WORKERS} workers, randomness='sample'": Target(bound=2.0),
            },
        ),
    )


def first_batch(pace: Pace) -> Case:
    """(c) Time from creating the loader to its first batch, in a fresh process each time."""
    del pace
    theirs = "PyTorch, spawn"
    arguments = {
        theirs: "torch-spawn",
        "Penstock, cold": "penstock-cold",
        "Penstock, warm fork server": "penstock-warm",
    }
    if sys.platform != "win32":
        arguments["PyTorch, fork"] = "torch-fork"
    targets = {
        "Penstock, cold": Target(bound=0.6, is_ceiling=True),
        "Penstock, warm fork server": Target(bound=0.1, is_ceiling=True),
    }
    return Case(
        key="c",
        title="First batch: 4 workers, a fresh process each time",
        unit="s",
        contenders=[
            Contender(
                name=name,
                turn=_in_fresh_process(argument),
                against=() if name == theirs else (theirs,),
                target=targets.get(name),
            )
            for name, argument in arguments.items()
        ],
    )


def in_memory(pace: Pace) -> Case:
    """(d) A shuffled TensorDataset, compared with PyTorch's best number of workers."""
    num_samples, batch_size = pace.num_images_in_memory, 256
    images = make_images_in_memory(num_samples)
    labelled = TensorDataset(*images.tensors, torch.arange(num_samples))

    def maker(kind: Any, num_workers: int, data: TensorDataset = images) -> Maker:
        return partial(
            kind,
            data,
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,  # because epochs are short
        )

    theirs = {f"PyTorch, workers: {count}": maker(TORCH, count) for count in (0, 1, 2)}
    ours = {f"Penstock, workers: {count}": maker(OURS, count) for count in (0, 2)}
    rate = partial(_enter, pace=pace, scale=batch_size)
    return Case(
        key="d",
        title=f"In memory: TensorDataset of {num_samples:,} x 3x64x64 uint8, shuffled, "
        f"batch {batch_size}",
        unit="samples/s",
        contenders=[
            *rate(
                {**theirs, **ours},
                against=dict.fromkeys(ours, tuple(theirs)),
                targets={"Penstock, workers: 0": Target(bound=4.0)},
            ),
            *rate(
                {
                    "PyTorch, workers: 0, with labels": maker(TORCH, 0, labelled),
                    "Penstock, workers: 0, with labels": maker(OURS, 0, labelled),
                },
                against={
                    "Penstock, workers: 0, with labels": ("PyTorch, workers: 0, with labels",)
                },
            ),
        ],
    )


CASES = {"a": transport, "b": tiny_samples, "c": first_batch, "d": in_memory}


def _enter(
    makers: Mapping[str, Maker],
    pace: Pace,
    *,
    scale: float = 1.0,
    against: Mapping[str, tuple[str, ...]],
    targets: Mapping[str, Target] = MappingProxyType({}),
) -> list[Contender]:
    """Return contenders that are rated by batches per second times ``scale``."""
    _require_agreement(makers)
    return [
        Contender(
            name=name,
            turn=_rate(make, pace, scale),
            against=against.get(name, ()),
            target=targets.get(name),
        )
        for name, make in makers.items()
    ]


def _rate(make: Maker, pace: Pace, scale: float) -> Callable[[], float]:
    def turn() -> float:
        timing = time_loader(make, warm_up_s=pace.warm_up_s, window_s=pace.window_s)
        return timing.batches_per_s * scale

    return turn


def _require_agreement(makers: Mapping[str, Maker]) -> None:
    """Check that all contenders deliver the same first three batches."""
    expected: list[Any] = []
    for name, make in makers.items():
        torch.manual_seed(0)  # determines the order of a shuffled epoch
        batches = iter(make())
        got = [next(batches) for _ in range(3)]
        expected = expected or got
        if not _is_same(got, expected):
            raise RuntimeError(f"{name} and {next(iter(makers))} deliver different data")


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(_is_same(*pair) for pair in zip(one, other, strict=True))


def _copy_floor(pace: Pace) -> float:
    """Return the samples per second of copy_floor.py in one process for each worker, together."""
    script = Path(__file__).parent / "copy_floor.py"
    command = [sys.executable, str(script), str(pace.window_s)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        processes = []
        for _ in range(NUM_WORKERS):
            process = stack.enter_context(subprocess.Popen(command, **pipes))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            process.stdout.readline()
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(float(process.communicate(timeout=300)[0]) for process in processes)


def _in_fresh_process(argument: str) -> Callable[[], float]:
    script = Path(__file__).parent / "first_batch.py"

    def turn() -> float:
        done = subprocess.run(
            [sys.executable, str(script), argument], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            raise RuntimeError(f"first_batch.py {argument} failed:\n{done.stderr}")
        return float(done.stdout)

    return turn
