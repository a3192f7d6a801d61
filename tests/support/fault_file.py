"""Samples with scheduled faults: a file holds one byte per sample, and each fault happens once.

    parent: Tolls.set(...)     writes the fault codes of an epoch
    worker: Tolled[i]          reads its byte, clears it, then triggers the fault

Exactly one worker triggers each fault, even if samples are loaded again. The parent can count the
remaining faults.
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
"""Upper bound of the delay before death.

It can strike another sample, a reply, or the gap between.
"""


def die_soon() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, random.SystemRandom().uniform(1e-6, ALARM_S))


CODES = {1: "SIGKILL", 2: "SIGSEGV", 3: "os._exit", 4: "SIGABRT", 5: "soon", 6: "sleep", 7: "C"}
NAMES = {name: code for code, name in CODES.items()}
DEATHS = (1, 2, 3, 4, 5)
HANGS = (6, 7)
worker_faults.FATES["soon"] = die_soon


class Tolls:
    """The file of fault codes."""

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
    """Return fault codes at random gaps.

    The codes are never close together. Two losses at one sample would make it a bad sample, and a
    delayed death strikes a few samples later.
    """
    found, index = {}, chance.randrange(mean_gap)
    while index < num_samples:
        found[index] = chance.choice(codes)
        index += chance.randint(mean_gap // 5, 2 * mean_gap - mean_gap // 5)
    return found


class Tolled(Dataset):
    """Sample i is i and drawn numbers, after a wait and its fault."""

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
