"""Samples with a toll: a file of one byte per sample says what happens there, once.

    parent: Tolls.set(...)     writes the codes of an epoch
    worker: Tolled[i]          reads its byte; a code is put out before it is paid

So each is paid by exactly one worker, whatever is loaded again, and the parent can count the rest.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from support import worker_faults

ALARM_S = 0.004
"""Death at a random moment within this time: in another sample, in a reply, between two."""


def die_soon() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, random.SystemRandom().uniform(1e-6, ALARM_S))


CODES = {1: "SIGKILL", 2: "SIGSEGV", 3: "os._exit", 4: "SIGABRT", 5: "soon", 6: "sleep", 7: "C"}
NAMES = {name: code for code, name in CODES.items()}
DEATHS = (1, 2, 3, 4, 5)
HANGS = (6, 7)
worker_faults.FATES["soon"] = die_soon


class Tolls:
    """The file."""

    def __init__(self, path: Path, num_samples: int) -> None:
        self.path = str(path)
        self.num_samples = num_samples
        self.set({})

    def set(self, codes: dict[int, int]) -> None:
        content = bytearray(self.num_samples)
        for index, code in codes.items():
            content[index] = code
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, content, 0)
        os.close(fd)

    def unpaid(self) -> int:
        return sum(byte != 0 for byte in Path(self.path).read_bytes())

    def take(self, index: int) -> str | None:
        fd = os.open(self.path, os.O_RDWR)
        try:
            code = os.pread(fd, 1, index)[0]
            if code:
                os.pwrite(fd, b"\0", index)
            return CODES.get(code)
        finally:
            os.close(fd)


def spread(chance: random.Random, num_samples: int, mean_gap: int, codes: Any) -> dict[int, int]:
    """Codes at random gaps. Never close together: two losses at one sample would be its own doing,
    and a death that comes soon strikes a few samples later."""
    found, index = {}, chance.randrange(mean_gap)
    while index < num_samples:
        found[index] = chance.choice(codes)
        index += chance.randint(mean_gap // 5, 2 * mean_gap - mean_gap // 5)
    return found


class Tolled(Dataset):
    """Sample i is i and drawn numbers, after a wait and its toll."""

    def __init__(self, tolls: Tolls, *, wait_s: float) -> None:
        self.tolls = tolls
        self.wait_s = wait_s

    def __len__(self) -> int:
        return self.tolls.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        sample = worker_faults.drawn(index)
        toll = self.tolls.take(index)
        if toll is not None:
            worker_faults.meet(toll)
        return sample
