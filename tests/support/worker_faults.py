"""What can happen to a worker in the middle of a sample, once or each time.

Everything here is importable by workers, as a user's own module would be.
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
"""Against a row of a's it tries 2 to the power of their number ways."""


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
    """A decoder that loops: it holds the interpreter's lock, and no Python runs any more."""
    ENDLESS.match("a" * 99)


def hang_until_disturbed() -> None:
    """In C, too, but the first signal ends the wait: the one that asks for the stack."""
    ctypes.PyDLL(None).sleep(HOUR_S)


def hang_on_a_lock() -> None:
    """What a fork in the wrong moment leaves behind."""
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
    """Let it happen, without a core file beside the tests or stacks on the terminal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()  # pytest's own, inherited by fork
    FATES[fate]()


class Log:
    """Lines that any process adds to one file: what happened, across deaths."""

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
    """A number and what an augmentation draws beside it, unequally much."""
    for _ in range(index % 3):
        random.random(), np.random.rand(), torch.rand(1)
    return torch.tensor(
        [index, random.getrandbits(60), int(np.random.randint(1 << 30)), int(torch.randint(99, ()))]
    )


class Fateful(Dataset):
    """Sample i is i and drawn numbers; ``fates[i]`` happens when it is loaded.

    Args:
        log: Which fates were met. Each is met ``times`` times, whoever loads the sample.
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
        sample = drawn(index)  # before the fate: a state that leaks would show in what comes next
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
    """The same with ``__getitems__``: looping over samples would fail."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("__getitems__ should have been used")

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        samples = [drawn(index) for index in indices]
        for index in indices:
            self.meet(index)
        return samples


class FatefulStream(IterableDataset):
    """Numbers from 0 on; each worker gives those that are its own."""

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
    """The same, with a state of its own; ``seen`` notes each number that is made."""

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
