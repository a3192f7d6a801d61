"""Finds the likely cause of a difference by further runs, each with one change.

the reference again          differs: no setting is the cause (time, id(), an unseeded generator)
the other setting again      differs: the order of arrival is the cause
all samples of the epoch     the same samples in a different order, or the whole stream repeated
a different hash seed        differs: the order of a set
a different seed             values change: drawn from generators that each worker seeds
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.verify.differences import first_difference
from penstock.verify.fresh_process import HASH_SEEDS
from penstock.verify.hashed_run import CannotDelay, HashedRun
from penstock.verify.hashing import as_array
from penstock.verify.settings import Setting
from penstock.verify.verdict import Cause

_SEEDED_LOADER = "from penstock import DataLoader  # DataLoader(..., seed=0)"
_CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)
_CLOCK_SCALES = (1.0, 1e3, 1e6, 1e9)
_RECENT_S = 3600.0
_LOWEST_ADDRESS, _HIGHEST_ADDRESS = 1 << 20, 1 << 48


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two runs that differ, and functions for further runs.

    Args:
        place: (Epoch, batch) of the first difference.
        values: The two values of the field that differs, if it was found.
        has_own_seed: True if the loader was given a seed, so the caller's generators do not matter.
        run: Runs a setting again, optionally with a different seed of the caller's generators.
        run_in_new_process: Runs a setting in a new process with a given hash seed.
    """

    reference: Setting
    setting: Setting
    one: HashedRun
    other: HashedRun
    place: tuple[int, int]
    values: tuple[Any, Any] | None
    has_own_seed: bool = False
    run: Callable[..., HashedRun]
    run_in_new_process: Callable[[Setting, str], HashedRun]


def find_cause(case: Case) -> Cause:
    """Return the likely cause of a difference."""
    look = _look_at_values(case.values)
    if _is_repeated(case):
        return Cause(
            code="repeated-stream",
            text="each worker gives the whole stream: the iterable does not divide it",
            cure="use torch.utils.data.get_worker_info() in __iter__ to yield only this worker's "
            "part",
        )
    if case.setting.is_fresh:
        return _cause_in_process(case, look)
    again = case.run(case.reference)
    if first_difference(case.one, again) is not None:
        return look or _cause_without_seed(case)
    if case.setting.resumed_with is not None:
        return _cause_in_resuming(case)
    return _cause_in_workers(case, look)


# -- values ----------------------------------------------------------------------------------------


def _look_at_values(values: tuple[Any, Any] | None) -> Cause | None:
    """Return a cause if the values look like timestamps or addresses."""
    numbers = [_number(value) for value in values or ()]
    if len(numbers) < 2:
        return None
    if all(number is not None and _is_time(number) for number in numbers):
        return Cause(
            code="time",
            text="the values are timestamps",
            cure="do not return clock values from a sample",
            evidence=(f"both are within an hour of now: {numbers[0]:.6g}, {numbers[1]:.6g}",),
        )
    if all(number is not None and _is_address(number) for number in numbers):
        return Cause(
            code="address",
            text="the values look like addresses: id(), or the default hash of an object",
            cure="use a number that belongs to the sample, such as its index, instead of id()",
            evidence=(f"{hex(int(numbers[0] or 0))}, {hex(int(numbers[1] or 0))}",),
        )
    return None


def _number(value: Any) -> float | None:
    array = as_array(value)
    if array is not None:
        numbers = array[1].reshape(-1)
        return float(numbers[0]) if numbers.size and numbers.dtype.kind in "iuf" else None
    return float(value) if isinstance(value, (int, float)) else None


def _is_fraction(values: tuple[Any, Any] | None) -> bool:
    """Return True if a value is not an integer, so it was probably drawn and not counted."""
    numbers = [_number(value) for value in values or ()]
    return any(number is not None and number % 1 != 0 for number in numbers)


def _is_time(number: float) -> bool:
    if not np.isfinite(number) or number <= 1.0:
        return False
    return any(
        0 <= clock() - number / scale < min(_RECENT_S, clock() / 2)
        for clock in _CLOCKS
        for scale in _CLOCK_SCALES
    )


def _is_address(number: float) -> bool:
    is_whole = number == int(number) if np.isfinite(number) else False
    return is_whole and _LOWEST_ADDRESS <= number < _HIGHEST_ADDRESS and int(number) % 8 == 0


# -- runs ------------------------------------------------------------------------------------------


def _is_repeated(case: Case) -> bool:
    ours, theirs = (Counter(run.samples(case.place[0])) for run in (case.one, case.other))
    num_workers = case.setting.arguments.get("num_workers", 0)
    is_more = bool(ours) and sum(theirs.values()) > sum(ours.values())
    return is_more and theirs == Counter({row: num * num_workers for row, num in ours.items()})


def _cause_in_hashes(case: Case) -> Cause | None:
    """Return a cause if processes differ only because of their hash seed."""
    try:
        first, second = (case.run_in_new_process(case.reference, seed) for seed in HASH_SEEDS)
        if first_difference(first, second) is None:
            return None
        again = case.run_in_new_process(case.reference, HASH_SEEDS[0])
    except Exception:
        return None  # the factory cannot run in a new process
    if first_difference(first, again) is not None:
        return None
    seeds = " and ".join(HASH_SEEDS)
    return Cause(
        code="hash-order",
        text="the order of a set (or of a dictionary made from one) depends on the hash seed",
        cure="sorted(...), or PYTHONHASHSEED=0 python train.py",
        evidence=(
            f"two processes with PYTHONHASHSEED {seeds} differ; with the same value they do not",
        ),
    )


def _cause_without_seed(case: Case) -> Cause:
    """Return the cause if the reference differs from itself: kept state, or no seed."""
    said = f"{case.reference.name}, run again, differs from itself"
    if _are_new_processes_alike(case):
        return Cause(
            code="kept-state",
            text="the dataset keeps state from one run to the next",
            cure="do not change attributes in __getitem__",
            evidence=(said, "two new processes are equal"),
        )
    return Cause(
        code="unseeded",
        text="the values do not depend on any seed: an unseeded generator "
        "(np.random.default_rng() in a sample, os.urandom), time, or id()",
        cure="use penstock.rng() in __getitem__",
        evidence=(said,),
    )


def _are_new_processes_alike(case: Case) -> bool:
    try:
        first, second = (case.run_in_new_process(case.reference, HASH_SEEDS[0]) for _ in range(2))
    except Exception:
        return False  # the factory cannot run in a new process
    return first_difference(first, second) is None


def _cause_in_process(case: Case, look: Cause | None) -> Cause:
    """Return the cause if a new process differs: its hash seed, or something else in it."""
    return (
        _cause_in_hashes(case)
        or look
        or Cause(
            code="process",
            text="it depends on the process: its environment, its id, or what ran in it before",
            evidence=("a new process with the same arguments differs",),
        )
    )


def _cause_in_resuming(case: Case) -> Cause:
    epoch = case.place[0]
    ours, theirs = (Counter(run.samples(epoch)) for run in (case.one, case.other))
    num_lost, num_doubled = sum((ours - theirs).values()), sum((theirs - ours).values())
    said = (
        f"of {sum(ours.values())} samples, {num_lost} are missing and {num_doubled} are different"
    )
    return Cause(
        code="resume",
        text="state_dict() does not restore the position, the order or the randomness",
        cure=_SEEDED_LOADER,
        evidence=(said,),
    )


def _cause_in_workers(case: Case, look: Cause | None) -> Cause:
    epoch = case.place[0]
    is_stable = _is_stable(case)
    said = f"{case.setting.name}, run again, " + (
        "is equal to itself" if is_stable else "differs from itself"
    )
    if Counter(case.one.samples(epoch)) == Counter(case.other.samples(epoch)):
        same = "the epoch has the same samples in a different order"
        if is_stable:
            return Cause(
                code="worker-order",
                text="the order depends on the number of workers: each loads its part of the "
                "stream",
                cure="use a dataset with __getitem__, or always the same number of workers",
                evidence=(same, said),
            )
        return Cause(
            code="arrival-order",
            text="batches are delivered in the order of arrival, which varies",
            cure="in_order=True",
            evidence=(same, said),
        )
    if look is not None:
        return look
    if not is_stable:
        return Cause(
            code="worker-state",
            text="the values depend on which worker loads a sample, and when: the dataset keeps "
            "state",
            cure="do not change attributes in __getitem__",
            evidence=(said,),
        )
    found = None if _is_fraction(case.values) else _cause_in_hashes(case)
    return found or _seeds_or_state(case, said)


def _is_stable(case: Case) -> bool:
    """Return True if the other setting is equal to itself, even when samples take unequal times."""
    for delays in (None, "samples", "consumer", "samples"):
        try:
            again = case.run(replace(case.setting, delays=delays or case.setting.delays))
        except CannotDelay:
            continue
        if first_difference(case.other, again) is not None:
            return False
    return True


def _seeds_or_state(case: Case, said: str) -> Cause:
    reseeded = case.run(case.setting, seed=1)
    follows_seed = first_difference(case.other, reseeded) is not None
    if follows_seed or (case.has_own_seed and _is_fraction(case.values)):
        seen = (
            "a different seed gives different values" if follows_seed else "values are not integers"
        )
        return Cause(
            code="worker-seeds",
            text="random numbers are drawn from generators that each worker seeds itself",
            cure=_SEEDED_LOADER,
            evidence=(said, seen),
        )
    return Cause(
        code="worker-state",
        text="values depend on the worker (its id, or a counter in it), not on a seed",
        cure="do not change attributes in __getitem__, and do not use the worker id in a sample",
        evidence=(said, "a different seed changes nothing"),
    )
