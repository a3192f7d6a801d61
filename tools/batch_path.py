"""Prints the modules that one batch passes through, in the order in which they are first called.

    python tools/batch_path.py [--device cuda]

Runs a loader with two workers, and records the calls for a batch in mid-epoch in both processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import penstock

NUM_SAMPLES, BATCH_SIZE = 256, 8
FIRST, LAST = 2 * BATCH_SIZE + 1, 4 * BATCH_SIZE + 1
"""The worker's calls between these two samples are recorded. They span two batches."""


class Calls:
    """Profiler that records the modules of the package that are called, each once."""

    def __init__(self) -> None:
        self.modules: list[str] = []

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        _, is_ours, path = frame.f_code.co_filename.replace("\\", "/").rpartition("/penstock/")
        module = path.removesuffix(".py")
        if is_ours and event == "call" and module not in self.modules:
            self.modules.append(module)


class WatchedSamples(Dataset[Any]):
    """Dataset that records the calls of its worker."""

    def __init__(self, file: str) -> None:
        self.file, self.calls, self.num_loaded = file, Calls(), 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.num_loaded += 1
        if self.num_loaded == FIRST:
            sys.setprofile(self.calls)
        elif self.num_loaded == LAST:
            sys.setprofile(None)
            Path(self.file).write_text(json.dumps(self.calls.modules), encoding="utf-8")
        return torch.zeros(3, 64, 64), index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="device to copy batches to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "worker.json"))
        dataset = WatchedSamples(file)
        loader = penstock.DataLoader(
            dataset, batch_size=BATCH_SIZE, num_workers=2, device=options.device
        )
        batches, calls = iter(loader), Calls()
        for _ in range(4):
            next(batches)
        sys.setprofile(calls)
        for _ in range(4):
            next(batches)
        sys.setprofile(None)
        for _ in batches:
            pass
        worker = json.loads(Path(file).read_text(encoding="utf-8"))
    for side, modules in (("parent", calls.modules), ("worker", worker)):
        print(f"{side}: {len(modules)}")
        for module in modules:
            print(f"  {module}")


if __name__ == "__main__":
    main()
