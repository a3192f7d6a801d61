"""Measures the benefit of workers, and of persistent workers, when loading JPEGs.

python benchmarks/jpeg_workers.py --save my-laptop

Compares PyTorch's loader and Penstock's. Needs Pillow. The training step is a sleep, because a GPU
uses no core.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from front import run
from jpeg_images import Photographs, draw_photographs
from measure import Case, Contender, Pace
from penstock import DataLoader
from penstock.cli.loader_timing import time_loader

QUESTION = __doc__.splitlines()[0]
BATCH = 32
STEP_S = 0.06
"""Length of a step. ResNet-50 with a batch of 32 takes about this long on a mid-range GPU."""
NUM_FILES = 384
NUM_EPOCHS = 3
KINDS: dict[str, Any] = {"PyTorch": TorchDataLoader, "Penstock": DataLoader}
SPAWNED = {"num_workers": 4, "multiprocessing_context": "spawn"}

Options = Mapping[str, Any]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        paths: list[str] = []

        def photographs(num_batches: int) -> Photographs:
            if not paths:
                paths.extend(draw_photographs(Path(folder), NUM_FILES))
            times = -(-num_batches * BATCH // NUM_FILES)  # files can repeat
            return Photographs((paths * times)[: num_batches * BATCH])

        cases = {
            "a": lambda pace: zero_against_four(photographs(600), pace),
            "b": lambda pace: kept_against_fresh(photographs(48 if pace.window_s > 1 else 6)),
        }
        return run("jpeg_workers", QUESTION, cases, arguments)


class Training:
    """Iterate over a loader, with a step after each batch."""

    def __init__(self, dataset: Photographs, kind: str, options: Options) -> None:
        self.loader = KINDS[kind](dataset, batch_size=BATCH, shuffle=True, **options)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            time.sleep(STEP_S)


def rate(dataset: Photographs, kind: str, options: Options, pace: Pace) -> Callable[[], float]:
    """Return batches per second after start-up."""

    def measure() -> float:
        timing = time_loader(
            lambda: Training(dataset, kind, options),
            warm_up_s=3 * pace.window_s,
            window_s=4 * pace.window_s,
        )
        return timing.batches_per_s

    return measure


def whole(dataset: Photographs, kind: str, options: Options) -> Callable[[], float]:
    """Return batches per second over all epochs, including the start of workers."""

    def measure() -> float:
        start_s = time.perf_counter()
        training = Training(dataset, kind, options)
        num_batches = sum(1 for _ in range(NUM_EPOCHS) for _ in training)
        elapsed_s = time.perf_counter() - start_s
        if options.get("persistent_workers"):
            training.loader._iterator._shutdown_workers()
        return num_batches / elapsed_s

    return measure


def zero_against_four(dataset: Photographs, pace: Pace) -> Case:
    """(a) 0 and 4 workers, with the default start method and spawned.

    Spawning is often recommended for ROCm.
    """
    ways: dict[str, Options] = {"4 workers": {"num_workers": 4}, "4 spawned": SPAWNED}
    contenders = [
        Contender(name=f"{kind}, 0 workers", turn=rate(dataset, kind, {}, pace)) for kind in KINDS
    ]
    contenders += [
        Contender(
            name=f"{kind}, {way}",
            turn=rate(dataset, kind, options, pace),
            against=(f"{kind}, 0 workers",),
        )
        for way, options in ways.items()
        for kind in KINDS
    ]
    title = "0 and 4 workers after start-up: ratio to the same loader without workers"
    return Case(key="a", title=title, unit="batches/s", contenders=contenders)


def kept_against_fresh(dataset: Photographs) -> Case:
    """(b) New and persistent workers, with the default start method and spawned."""
    contenders = []
    for way, options in (("4 workers", {"num_workers": 4}), ("4 spawned", SPAWNED)):
        for kind in KINDS:
            fresh = f"{kind}, {way}, fresh"
            kept = {**options, "persistent_workers": True}
            contenders += [
                Contender(name=fresh, turn=whole(dataset, kind, options)),
                Contender(
                    name=f"{kind}, {way}, kept", turn=whole(dataset, kind, kept), against=(fresh,)
                ),
            ]
    title = f"persistent and new workers, {NUM_EPOCHS} epochs of {len(dataset) // BATCH} batches"
    return Case(key="b", title=title, unit="batches/s", contenders=contenders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
