"""Do workers pay on a JPEG job, and does keeping them? PyTorch's loader and ours, turn by turn.

python benchmarks/jpeg_workers.py --save my-laptop

Needs Pillow. A turn is a new loader and three epochs of it, starting of workers included. The
training step is a wait: what a GPU does meanwhile takes no core.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from front import run
from jpeg_images import Photographs, draw_photographs
from measure import Case, Contender, Pace
from penstock import DataLoader

QUESTION = __doc__.splitlines()[0]
BATCH = 32
STEP_S = 0.06
"""How long a step waits: a ResNet-50 on a batch of 32 takes about that on a mid-range GPU."""
NUM_EPOCHS = 3
KINDS: dict[str, Any] = {"PyTorch": TorchDataLoader, "Penstock": DataLoader}
SPAWNED = {"num_workers": 4, "multiprocessing_context": "spawn"}

Options = Mapping[str, Any]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        photographs: list[Photographs] = []

        def dataset(pace: Pace) -> Photographs:
            if not photographs:
                count = BATCH * (12 if pace.window_s > 1 else 3)
                photographs.append(Photographs(draw_photographs(Path(folder), count)))
            return photographs[0]

        cases = {
            "a": lambda pace: zero_against_four(dataset(pace)),
            "b": lambda pace: kept_against_fresh(dataset(pace)),
        }
        return run("jpeg_workers", QUESTION, cases, arguments)


def turn(dataset: Photographs, kind: str, options: Options) -> Callable[[], float]:
    """Batches per second, over all epochs."""

    def measure() -> float:
        num_batches, start_s = 0, time.perf_counter()
        loader = KINDS[kind](dataset, batch_size=BATCH, shuffle=True, **options)
        for _ in range(NUM_EPOCHS):
            for _ in loader:
                time.sleep(STEP_S)
                num_batches += 1
        elapsed_s = time.perf_counter() - start_s
        if options.get("persistent_workers"):
            loader._iterator._shutdown_workers()
        return num_batches / elapsed_s

    return measure


def zero_against_four(dataset: Photographs) -> Case:
    """(a) What the seed calls before and after: 0 workers, and 4 as it recommends them."""
    ways: dict[str, Options] = {
        "4 workers": {"num_workers": 4},
        "4 workers, spawn, kept": {**SPAWNED, "persistent_workers": True},
    }
    contenders = [
        Contender(name=f"{kind}, 0 workers", turn=turn(dataset, kind, {})) for kind in KINDS
    ]
    contenders += [
        Contender(
            name=f"{kind}, {way}",
            turn=turn(dataset, kind, options),
            against=(f"{kind}, 0 workers",),
        )
        for way, options in ways.items()
        for kind in KINDS
    ]
    title = "0 against 4 workers: against the same loader without"
    return Case(key="a", title=title, unit="batches/s", contenders=contenders)


def kept_against_fresh(dataset: Photographs) -> Case:
    """(b) Workers of each epoch's own, or kept; as each loader starts them, and spawned."""
    contenders = []
    for way, options in (("4 workers", {"num_workers": 4}), ("4 spawned", SPAWNED)):
        for kind in KINDS:
            fresh = f"{kind}, {way}, fresh"
            kept = {**options, "persistent_workers": True}
            contenders += [
                Contender(name=fresh, turn=turn(dataset, kind, options)),
                Contender(
                    name=f"{kind}, {way}, kept", turn=turn(dataset, kind, kept), against=(fresh,)
                ),
            ]
    title = "kept against fresh workers: against the same loader with fresh ones"
    return Case(key="b", title=title, unit="batches/s", contenders=contenders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
