"""Counts alarms of ``trace compare --fail-if``: false ones, and those that must be raised.

python benchmarks/alarms.py --runs 8 --seconds 4 --busy 2

Runs a loader that waits for its workers again and again, beside busy processes, in alternation with
one whose samples take 30% longer. Then it compares each run with each other one, as the command
does. Two runs of the same program must not fail, and each of the slower ones must. The benchmark
fails if the loop does not wait for the workers, because then slower samples change nothing.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np

import penstock
from penstock.trace.model import TraceModel
from penstock.trace.regression import Slowdown, measure_slowdown, measure_wait

LIMITS = (0.02, 0.05, 0.10)
NUM_VALUES = 100_000
"""Values that a sample sorts: some milliseconds of CPU time."""
MIN_WAIT = 0.5
"""The loop must wait for this share of its time, so that loading is the limit."""


class Images:
    """Samples that sort some values."""

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> np.ndarray:
        return np.sort(np.random.default_rng(index).random(self._num_values))[:16]


def record_run(seconds: float, slower: float = 0.0) -> TraceModel:
    """Train for some seconds and return the model of its trace."""
    samples = Images(int(NUM_VALUES * (1.0 + slower)))
    loader: penstock.DataLoader[np.ndarray] = penstock.DataLoader(
        samples, batch_size=4, num_workers=2, trace=True
    )
    until = time.monotonic() + seconds
    for _ in loader:
        if time.monotonic() > until:
            break
    model = loader.timeline().model
    wait = measure_wait(model)
    if wait is not None and wait.value < MIN_WAIT:
        sys.exit(f"The loop waits only {wait.value:.0%} of the time: loading is not the limit.")
    return model


def compare(pairs: Iterable[tuple[TraceModel, TraceModel]]) -> list[Slowdown]:
    found = [measure_slowdown(*pair) for pair in pairs]
    return [slowdown for slowdown in found if slowdown is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--busy", type=int, default=0, help="Busy processes beside.")
    options = parser.parse_args()
    record_run(1.0)
    models, slow = [], []
    with ExitStack() as stack:
        for _ in range(options.busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        for _ in range(options.runs):
            models.append(record_run(options.seconds))
            slow.append(record_run(options.seconds, slower=0.3))
    same = compare(itertools.permutations(models, 2))
    slower = compare(itertools.product(models, slow))
    print(f"{len(models)} runs of {options.seconds:g} s beside {options.busy} busy processes:")
    print(f"  difference: median {np.median([abs(one.share) for one in same]):.1%}")
    print(f"  noise as measured within the runs: median {np.median([s.noise for s in same]):.1%}")
    for name, found in (("same program", same), ("30% slower", slower)):
        num_busy = sum(one.is_busy for one in found)
        print(f"  {name}: {len(found)} comparisons, {num_busy} of them busy and not judged")
        for limit in LIMITS:
            num_failed = sum(one.is_above(limit) for one in found)
            print(f"    slower:{limit:.0%}  {num_failed} failed")
    missed = [one for one in slower if not one.is_busy and not one.is_above(0.05)]
    if missed or not slower:
        sys.exit(f"{len(missed)} of {len(slower)} runs that are 30% slower passed slower:5%.")


if __name__ == "__main__":
    main()
