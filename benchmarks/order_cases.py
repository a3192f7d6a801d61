"""Cases of order.py: time to the first batch of a huge shuffle, its memory, and its rate."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from first_indices import SHUFFLES
from measure import Case, Contender, Pace, Target

FIRST_INDICES = Path(__file__).with_name("first_indices.py")
BILLION, TEN_MILLION, MILLION = 10**9, 10**7, 10**6
# torch's sampler makes a list. A billion would need 40 GB, so it gets a hundredth of that.
ROWS = {
    "penstock, a billion": ("penstock", BILLION),
    "penstock, ten million": ("penstock", TEN_MILLION),
    "RandomSampler, ten million": ("torch", TEN_MILLION),
}
THEIRS = "RandomSampler, ten million"


def _ask(name: str, length: int) -> tuple[float, float]:
    command = [sys.executable, str(FIRST_INDICES), name, str(length)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    seconds, megabytes = shown.split()
    return float(seconds), float(megabytes)


def _rows(place: int, target: Target) -> list[Contender]:
    contenders = []
    for row, (name, length) in ROWS.items():
        ours = name == "penstock"
        contenders.append(
            Contender(
                name=row,
                turn=partial(_turn, name, length, place),
                against=(THEIRS,) if ours else (),
                target=target if row == "penstock, a billion" else None,
            )
        )
    return contenders


def _turn(name: str, length: int, place: int) -> float:
    return _ask(name, length)[place]


def first_batch(_: Pace) -> Case:
    return Case(
        key="a",
        title="until the first 64 indices",
        unit="s",
        contenders=_rows(0, Target(bound=0.1, is_ceiling=True)),
    )


def memory(_: Pace) -> Case:
    return Case(
        key="b",
        title="memory held at the first 64 indices",
        unit="MB",
        contenders=_rows(1, Target(bound=0.01, is_ceiling=True)),
    )


def rate(_: Pace) -> Case:
    return Case(
        key="c",
        title="indices of a million, taken one by one",
        unit="indices/s",
        contenders=[
            Contender(
                name="penstock",
                turn=_epoch("penstock"),
                against=("RandomSampler",),
                target=Target(bound=1.0),
            ),
            Contender(name="RandomSampler", turn=_epoch("torch")),
        ],
    )


def _epoch(name: str) -> Callable[[], float]:
    def turn() -> float:
        start_s = time.perf_counter()
        deque(SHUFFLES[name](MILLION), maxlen=0)
        return MILLION / (time.perf_counter() - start_s)

    return turn


CASES = {"a": first_batch, "b": memory, "c": rate}
