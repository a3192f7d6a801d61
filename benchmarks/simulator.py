"""Measures the error of the simulator for settings that it has not seen.

python benchmarks/simulator.py --save my-laptop

The simulator gets traces of runs with 1 and 2 workers, and predicts other numbers of workers, batch
sizes and prefetch depths. Each of these is then run, in turns, and the error is recorded.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from typing import Any

import psutil
import torch

import penstock
from record import describe_machine, describe_versions, save, today

LEARNT = ({"workers": 1}, {"workers": 2})
ASKED = (
    {"workers": 4},
    {"workers": 8},
    {"workers": 2, "prefetch": 1},
    {"workers": 2, "prefetch": 8},
    {"workers": 2, "batch_size": 2},
    {"workers": 2, "batch_size": 32},
    {"workers": 4, "batch_size": 16, "prefetch": 4},
)
BATCH_SIZE, STEP_S, RUN_S = 8, 0.002, 1.5
MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.30
QUIET_PERCENT = 15.0


class Job:
    """Samples that wait, compute, or both. Some take four times as long."""

    def __init__(self, wait_s: float, cpu_s: float) -> None:
        self.wait_s = wait_s
        self.cpu_s = cpu_s

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        factor = 4.0 if index % 37 == 5 else 1.0
        if self.wait_s:
            time.sleep(self.wait_s * factor)
        end_s = time.thread_time() + self.cpu_s * factor
        while time.thread_time() < end_s:
            pass
        return torch.zeros(3, 32, 32, dtype=torch.uint8)


JOBS = {
    "waiting 4 ms": Job(0.004, 0.0),
    "computing 2 ms": Job(0.0, 0.002),
    "waiting 3 ms, computing 0.5 ms": Job(0.003, 0.0005),
}


def wait_until_quiet(patience_s: float) -> None:
    """Wait until no other program uses the cores, with a time limit."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and psutil.cpu_percent(0.5) > QUIET_PERCENT:
        time.sleep(0.5)


def run_once(job: Job, setting: dict[str, int]) -> Any:
    """Return the timeline of a real run."""
    loader = penstock.DataLoader(
        job,
        batch_size=setting.get("batch_size", BATCH_SIZE),
        num_workers=setting["workers"],
        prefetch_factor=setting.get("prefetch"),
        persistent_workers=True,
    )
    batches = iter(loader)
    for _ in range(2 * setting["workers"] + 2):
        next(batches)
    loader._recorder.clear()  # start-up is not compared
    end_s = time.monotonic() + RUN_S
    # The step time is proportional to the batch size, as in the simulator.
    step_s = STEP_S * setting.get("batch_size", BATCH_SIZE) / BATCH_SIZE
    while time.monotonic() < end_s:
        time.sleep(step_s)
        next(batches)
    timeline = loader.timeline()
    loader.close()
    return timeline


def measure(job: Job, num_turns: int, patience_s: float) -> dict[str, Any]:
    """Run all settings in turns, several times, and predict each of them."""
    real: dict[str, list[float]] = {}
    predicted: dict[str, list[float]] = {}
    replays: list[float] = []
    for _ in range(num_turns):
        wait_until_quiet(patience_s)
        seen = [run_once(job, setting) for setting in LEARNT]
        # Control: predict the run that the simulator was given.
        replays += [abs(penstock.simulate(one).account.rate / one.account.rate - 1) for one in seen]
        for setting in ASKED:
            key = ", ".join(f"{name}={value}" for name, value in setting.items())
            # Only the run with 2 workers shows how cores are shared.
            rate = penstock.simulate(seen[-1], **setting).account.rate
            predicted.setdefault(key, []).append(rate)
            wait_until_quiet(patience_s)
            real.setdefault(key, []).append(run_once(job, setting).account.rate)
    rows: dict[str, Any] = {}
    for key in real:
        one, other = statistics.median(predicted[key]), statistics.median(real[key])
        rows[key] = {
            "predicted": one,
            "measured": other,
            "error": abs(one - other) / other,
            "samples": {"predicted": predicted[key], "measured": real[key]},
        }
    return {"settings": rows, "replay_errors": replays}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", help="one of the jobs")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for an idle machine"
    )
    parser.add_argument("--save", help="write results/simulator-NAME.json")
    parser.add_argument("--note", default="", help="remarks about the machine")
    options = parser.parse_args(arguments)
    cases = {}
    for name, job in JOBS.items():
        if options.only and options.only not in name:
            continue
        cases[name] = measure(job, options.turns, options.patience)
        print(f"\n{name}")
        print(f"  replayed as it was: error {statistics.median(cases[name]['replay_errors']):.1%}")
        for key, row in cases[name]["settings"].items():
            print(
                f"  {key:40} predicted {row['predicted']:8.0f}  measured {row['measured']:8.0f}"
                f"  error {row['error']:6.1%}"
            )
    errors = sorted(row["error"] for found in cases.values() for row in found["settings"].values())
    middle, worst = statistics.median(errors), errors[-1]
    print(f"\nmedian error {middle:.1%} (limit {MEDIAN_LIMIT:.0%}), worst {worst:.1%}")
    if options.save:
        content = {
            "benchmark": "simulator",
            "date": today(),
            "command": shlex.join(["python", "benchmarks/simulator.py", *arguments]),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "note": options.note,
            "learnt": LEARNT,
            "median_error": middle,
            "worst_error": worst,
            "is_met": middle <= MEDIAN_LIMIT and worst <= WORST_LIMIT,
            "cases": cases,
        }
        print(f"Saved as benchmarks/results/{save(options.save, content).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
