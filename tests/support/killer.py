"""Kills children of this process from outside, at random moments."""

from __future__ import annotations

import random
import threading
from types import TracebackType

import psutil


class Killer:
    """Context manager that kills random children, workers and fork servers alike, until exit.

    Args:
        pause_s: The shortest and the longest time between two kills.
        max_kills: Stop after this many kills. None means no limit.
        max_servers: Kill only workers after this many fork servers. None means no limit.
        spares_starting: Do not kill fork servers that have no worker yet. They import torch for
            seconds, and if each one is killed before it is ready, nothing can be loaded.
    """

    def __init__(
        self,
        seed: int,
        *,
        pause_s: tuple[float, float] = (0.02, 0.5),
        max_kills: int | None = None,
        max_servers: int | None = 2,
        spares_starting: bool = False,
    ) -> None:
        print(f"Killer(seed={seed})")  # pytest shows it when a test fails
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._max_kills = max_kills
        self._max_servers = max_servers
        self._spares_starting = spares_starting
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_killed = self.num_servers = 0
        """Number of kills, and number of fork servers among them."""

    @property
    def is_done(self) -> bool:
        return self._max_kills is not None and self.num_killed >= self._max_kills

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        process = psutil.Process()
        while not self._is_over.wait(self._chance.uniform(*self._pause_s)) and not self.is_done:
            try:
                self._kill_one(process)
            except psutil.Error:
                continue  # it had already ended

    def _kill_one(self, process: psutil.Process) -> None:
        victims = [
            one
            for one in process.children(recursive=True)
            if one.status() != psutil.STATUS_ZOMBIE
            and (not is_server(one) or self._may_kill_server(one))
        ]
        if victims:
            victim = self._chance.choice(victims)
            self.num_servers += is_server(victim)
            victim.kill()
            self.num_killed += 1

    def _may_kill_server(self, server: psutil.Process) -> bool:
        is_starting = self._spares_starting and not server.children()
        return not is_starting and (
            self._max_servers is None or self.num_servers < self._max_servers
        )


def is_server(process: psutil.Process) -> bool:
    """Return True for a fork server. Its workers have the same command line."""
    parent = process.parent()
    return parent is not None and process.cmdline() != parent.cmdline()
