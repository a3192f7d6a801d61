"""Every automatic choice, with its value, its reason and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Source = Literal["asked", "measured", "rule"]


@dataclass(frozen=True)
class Choice:
    """One decision.

    Example:
        >>> print(Choice(2, "two cores", "rule"))
        2 (rule: two cores)
    """

    value: Any
    reason: str
    source: Source

    def __str__(self) -> str:
        return f"{self.value} ({self.source}: {self.reason})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a loader does on this machine. ``str(plan)`` is a table to read."""

    pool: Choice
    start_method: Choice
    num_workers: Choice
    prefetch_factor: Choice
    randomness: Choice

    def __str__(self) -> str:
        rows = [(item.name, getattr(self, item.name)) for item in fields(self)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {choice}" for name, choice in rows)


def choose_num_workers(asked: int | str, num_cores: int) -> Choice:
    """How many workers.

    Example:
        >>> choose_num_workers("auto", 4).value
        4
        >>> choose_num_workers(3, 64).source
        'asked'
    """
    if asked != "auto":
        return Choice(asked, "num_workers was given", "asked")
    return Choice(
        num_cores, f"num_workers='auto': one for each of the {num_cores} usable cores", "rule"
    )


def choose_pool(asked: str, num_workers: int, *, can_start_processes: bool) -> Choice:
    """Processes, threads, or no worker at all."""
    if asked != "auto":
        return Choice(asked, f"pool={asked!r} was given", "asked")
    if num_workers == 0:
        return Choice("inline", "num_workers is 0", "rule")
    if not can_start_processes:
        return Choice("thread", "a frozen application has no Python to start workers with", "rule")
    return Choice("process", "user code may hold the interpreter lock", "rule")


def choose_start_method(asked: str | None, pool: str, platform: str) -> Choice:
    """How worker processes come to be.

    Example:
        >>> choose_start_method(None, "process", "linux").value
        'nursery'
    """
    if pool != "process":
        return Choice(None, f"the {pool} pool starts no process", "rule")
    if asked in ("fork", "spawn"):
        return Choice(asked, f"multiprocessing_context={asked!r} was given", "asked")
    if platform == "linux":
        reason = "a clean process forks workers in milliseconds, whatever this one holds"
        source: Source = "asked" if asked == "forkserver" else "rule"
        return Choice("nursery", reason, source)
    return Choice("spawn", f"{platform} has no safe fork", "rule")


def choose_prefetch(asked: int | None, pool: str) -> Choice:
    """Batches under way per worker: a number, or a range that the engine moves in."""
    if pool == "inline":
        return Choice(0, "nothing is loaded ahead without workers", "rule")
    if asked is not None:
        return Choice(asked, "prefetch_factor was given", "asked")
    return Choice("2 to 16", "about 20 ms of work per worker, from measured times", "measured")
