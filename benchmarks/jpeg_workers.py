"""Do workers pay on a JPEG job, and does keeping them? PyTorch's loader and ours, turn by turn.

python benchmarks/jpeg_workers.py --save my-laptop

Needs Pillow. The training step is a wait: what a GPU does meanwhile takes no core.
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
"""How long a step waits: a ResNet-50 on a batch of 32 takes about that on a mid-range GPU."""
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
            times = -(-num_batches * BATCH // NUM_FILES)  # a file may come more than once
            return Photographs((paths * times)[: num_batches * BATCH])

        cases = {
            "a": lambda pace: zero_against_four(photographs(600), pace),
            "b": lambda pace: kept_against_fresh(photographs(48 if pace.window_s > 1 else 6)),
        }
        return run("jpeg_workers", QUESTION, cases, arguments)


class Training:
    """A loader and the steps between its batches."""

    def __init__(self, dataset: Photographs, kind: str, options: Options) -> None:
        self.loader = KINDS[kind](dataset, batch_size=BATCH, shuffle=True, **options)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch
            time.sleep(STEP_S)


def rate(dataset: Photographs, kind: str, options: Options, pace: Pace) -> Callable[[], float]:
    """Batches per second once it is running: starting is over by then."""

    def measure() -> float:
        timing = time_loader(
            lambda: Training(dataset, kind, options),
            warm_up_s=3 * pace.window_s,
            window_s=4 * pace.window_s,
        )
        return timing.batches_per_s

    return measure


def whole(dataset: Photographs, kind: str, options: Options) -> Callable[[], float]:
    """Batches per second over all epochs, starting of workers included."""

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
    """(a) 0 workers, and 4: as each loader starts them, and spawned, which ROCm is said to need."""
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
    title = "0 against 4 workers, once running: ratio against the same loader without"
    return Case(key="a", title=title, unit="batches/s", contenders=contenders)


def kept_against_fresh(dataset: Photographs) -> Case:
    """(b) Workers of each epoch's own, or kept; as each loader starts them, and spawned."""
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
    title = f"kept against fresh workers, {NUM_EPOCHS} epochs of {len(dataset) // BATCH} batches"
    return Case(key="b", title=title, unit="batches/s", contenders=contenders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
