"""Counts false alarms: ``trace compare --fail-if`` on runs of the same program.

python benchmarks/alarms.py --runs 12 --busy 2

Runs a loader that waits for its workers, again and again, beside busy processes. Then it compares
each run with each other one, in both orders, as the command does.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np

import penstock
from penstock.trace.model import TraceModel
from penstock.trace.regression import measure_slowdown

LIMITS = (0.02, 0.05, 0.10)


class Images:
    """Samples that take about a millisecond of CPU time."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> np.ndarray:
        return np.sort(np.random.default_rng(index).random(12_000))[:16]


def record_run(seconds: float) -> TraceModel:
    """Train for some seconds and return the model of its trace."""
    loader: penstock.DataLoader[np.ndarray] = penstock.DataLoader(
        Images(), batch_size=16, num_workers=2, trace=True
    )
    until = time.monotonic() + seconds
    for _ in loader:
        time.sleep(0.002)
        if time.monotonic() > until:
            break
    return loader.timeline().model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--busy", type=int, default=0, help="Busy processes beside.")
    options = parser.parse_args()
    record_run(1.0)
    with ExitStack() as stack:
        for _ in range(options.busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        models = [record_run(options.seconds) for _ in range(options.runs)]
    pairs = [measure_slowdown(*pair) for pair in itertools.permutations(models, 2)]
    found = [slowdown for slowdown in pairs if slowdown is not None]
    sizes = [abs(slowdown.share) for slowdown in found]
    noises = [slowdown.noise for slowdown in found]
    print(f"{len(models)} runs of {options.seconds:g} s beside {options.busy} busy processes:")
    print(f"  difference: median {np.median(sizes):.1%}, at most {max(sizes):.1%}")
    print(f"  noise as measured within the runs: median {np.median(noises):.1%}")
    for limit in LIMITS:
        num_alarms = sum(slowdown.is_above(limit) for slowdown in found)
        print(f"  slower:{limit:.0%}  {num_alarms} false alarms of {len(found)} comparisons")


if __name__ == "__main__":
    main()
