"""Runs one epoch of one loader with one fault, in its own process. Prints the outcome as JSON.

python benchmarks/fault_case.py torch kill
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import penstock

NUM_BATCHES, BATCH = 125, 8
NUM_SAMPLES = NUM_BATCHES * BATCH
AT = 300
"""The sample with the fault."""
MAX_CATCHES = 200


def unpicklable() -> Exception:
    """Return an error of a class that is defined in a function, as in some libraries."""

    class Unpicklable(Exception):
        pass

    return Unpicklable("image file is truncated")


class Faulty(Dataset):
    """Sample i is i. One sample has a fault, which occurs only once if there is a marker file."""

    def __init__(self, fault: str, marker: str | None) -> None:
        self.fault = fault
        self.marker = marker

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0005)
        if index == AT and self._is_due():
            self._happen()
        return torch.tensor(index)

    def _is_due(self) -> bool:
        if self.marker is None:
            return True
        is_first = not os.path.exists(self.marker)
        Path(self.marker).touch()
        return is_first

    def _happen(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "hang":
            time.sleep(3600)
        elif self.fault == "unpicklable":
            raise unpicklable()
        else:
            raise OSError("image file is truncated")


# The fault, whether it occurs once, whether the loop catches errors, and each loader's options.
CASES: dict[str, tuple[str, bool, bool, dict[str, Any], dict[str, Any]]] = {
    "kill": ("kill", True, False, {}, {}),
    "kill, caught": ("kill", True, True, {}, {}),
    "kill, each time": ("kill", False, False, {}, {"on_error": "skip"}),
    "hang": ("hang", True, False, {}, {"sample_timeout_s": 1.0}),
    "unpicklable": ("unpicklable", False, True, {}, {}),
    "error": ("error", False, False, {}, {"on_error": "skip"}),
}


def run(name: str, case: str) -> dict[str, Any]:
    """Load one epoch. Returns the outcome."""
    fault, is_once, catches, told_torch, told_penstock = CASES[case]
    logging.getLogger("penstock").setLevel(logging.ERROR)
    marker = os.path.join(tempfile.mkdtemp(), "met") if is_once else None
    make: Any = TorchDataLoader if name == "torch" else penstock.DataLoader
    told = told_torch if name == "torch" else told_penstock
    loader = make(Faulty(fault, marker), batch_size=BATCH, num_workers=2, **told)
    seen: Counter[int] = Counter()
    num_batches, errors = 0, []
    batches = iter(loader)
    ending = "complete"
    while True:
        try:
            seen.update(next(batches).tolist())
            num_batches += 1
        except StopIteration:
            break
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            if not catches or len(errors) >= MAX_CATCHES:
                ending = "error"
                break
    return {
        "ending": ending,
        "batches": num_batches,
        "samples_missing": NUM_SAMPLES - len(seen),
        "samples_doubled": sum(count > 1 for count in seen.values()),
        "num_errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:3])), flush=True)
    os._exit(0)  # skip clean-up, in which a loader could hang
