"""Faults that can happen to a worker in the middle of a sample, once or each time.

Workers can import everything here, like a user's own module.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

HOUR_S = 3600
ENDLESS = re.compile("(a|a)*b")
"""Takes 2**n steps on a string of n a's."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(7)


def abort() -> None:
    os.abort()


def hang() -> None:
    time.sleep(HOUR_S)


def hang_in_c() -> None:
    """Hang like a decoder in a loop, which holds the GIL so that no Python code runs."""
    ENDLESS.match("a" * 99)


def hang_until_disturbed() -> None:
    """Hang in C until the first signal, which is the one that requests the stack."""
    ctypes.PyDLL(None).sleep(HOUR_S)


def hang_on_a_lock() -> None:
    """Deadlock on a lock, as after a fork at the wrong moment."""
    import threading

    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def fail() -> None:
    raise OSError("image file is truncated")


DEATHS: dict[str, tuple[Callable[[], None], int]] = {
    "SIGKILL": (kill, -9),
    "SIGSEGV": (segfault, -11),
    "SIGABRT": (abort, -6),
    "os._exit": (leave, 7),
}
HANGS = {
    "sleep": hang,
    "C": hang_in_c,
    "until disturbed": hang_until_disturbed,
    "lock": hang_on_a_lock,
}
FATES = {**{name: die for name, (die, _) in DEATHS.items()}, **HANGS, "error": fail}


def meet(fate: str) -> None:
    """Trigger the fault, without a core file or stacks on the terminal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # pytest's own handler, inherited by fork
    FATES[fate]()


class Log:
    """A file to which any process can append lines. It survives the death of a process."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def add(self, line: Any) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    @property
    def lines(self) -> list[str]:
        try:
            return Path(self.path).read_text().splitlines()
        except FileNotFoundError:
            return []


def drawn(index: int) -> torch.Tensor:
    """Return the index and an augmentation's draws. Samples draw unequal amounts."""
    for _ in range(index % 3):
        random.random(), np.random.rand(), torch.rand(1)
    return torch.tensor(
        [index, random.getrandbits(60), int(np.random.randint(1 << 30)), int(torch.randint(99, ()))]
    )


class Fateful(Dataset):
    """Sample i is i and drawn numbers. ``fates[i]`` happens when it is loaded.

    Args:
        log: Records the faults. Each happens ``times`` times, in any process.
    """

    def __init__(
        self,
        fates: dict[int, str] | None = None,
        log: Log | None = None,
        *,
        length: int = 48,
        times: int = 1,
    ) -> None:
        self.fates = fates or {}
        self.log = log
        self.length = length
        self.times = times

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = drawn(index)  # before the fault, so that leaked state shows in later samples
        self.meet(index)
        return sample

    def meet(self, index: int) -> None:
        fate = self.fates.get(index)
        if fate is None or self.log is None:
            return
        if self.log.lines.count(str(index)) < self.times:
            self.log.add(index)
            meet(fate)


class FatefulBatches(Fateful):
    """The same dataset with ``__getitems__``. Indexing single samples fails."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("__getitems__ should have been used")

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        samples = [drawn(index) for index in indices]
        for index in indices:
            self.meet(index)
        return samples


class FatefulStream(IterableDataset):
    """Numbers from 0 on. Each worker yields its own share."""

    def __init__(
        self, fates: dict[int, str] | None = None, log: Log | None = None, *, length: int = 40
    ) -> None:
        self.fate = Fateful(fates, log, length=length)
        self.length = length

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            self.fate.meet(number)
            yield torch.tensor([number, random.getrandbits(60)])


class ResumableStream(IterableDataset):
    """The same stream with its own state. ``seen`` records each number that is made."""

    def __init__(self, fates: dict[int, str], log: Log, seen: Log, *, length: int = 40) -> None:
        self.fate = Fateful(fates, log, length=length)
        self.seen = seen
        self.length = length
        self.place = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.place * step < self.length:
            number = first + self.place * step
            self.fate.meet(number)
            self.seen.add(number)
            self.place += 1
            yield torch.tensor(number)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
