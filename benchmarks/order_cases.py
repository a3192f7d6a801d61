"""Cases of order.py: first batch, memory and rate of a huge shuffle, and indices of a mixture."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import penstock
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
MANY = "10,000 sources"


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


def mixtures(_: Pace) -> Case:
    return Case(
        key="d",
        title="time of 256 indices of a mixture",
        unit="us",
        contenders=[
            Contender(name=MANY, turn=_batches(10_000), against=("one dataset", "2 sources")),
            Contender(name="2 sources", turn=_batches(2), against=("one dataset",)),
            Contender(name="one dataset", turn=_batches(0)),
        ],
    )


def _batches(num_sources: int) -> Callable[[], float]:
    order: Any = penstock.SeededOrder(MILLION, seed=0, batch_size=256)
    if num_sources:
        lengths = range(MILLION // num_sources)
        sources = [(lengths, 1 + number % 13) for number in range(num_sources)]
        mixture = penstock.mix(sources, length=MILLION)
        order = mixture.order(shuffle=True, seed=0, batch_size=256)

    def turn() -> float:
        start_s = time.process_time()
        deque(itertools.islice(iter(order), 65_536), maxlen=0)
        return (time.process_time() - start_s) / 256 * 1e6

    return turn


CASES = {"a": first_batch, "b": memory, "c": rate, "d": mixtures}
