"""The cause follows from the results of further runs. Integration tests run real loaders."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.verify.causes import Case, find_cause
from penstock.verify.differences import first_difference
from penstock.verify.hashed_run import CannotDelay, HashedBatch, HashedRun
from penstock.verify.settings import Setting

pytestmark = pytest.mark.legacy

REFERENCE = Setting(name="0 workers", arguments={"num_workers": 0})
WORKERS = Setting(name="2 workers", arguments={"num_workers": 2})
FRESH = Setting(name="new process", arguments={"num_workers": 0}, is_fresh=True)
RESUMED = Setting(name="resumed", arguments={"num_workers": 2}, resumed_with={"num_workers": 3})


def run_of(*words: str) -> HashedRun:
    """Return an epoch whose batches are words and whose samples are letters."""
    batches = [
        HashedBatch(whole=word.encode(), samples=tuple(letter.encode() for letter in word))
        for word in words
    ]
    return HashedRun(epochs=[batches])


def code_of(
    one: HashedRun,
    other: HashedRun,
    setting: Setting = WORKERS,
    *,
    again: HashedRun | None = None,
    other_again: HashedRun | None = None,
    reseeded: HashedRun | None = None,
    by_hash_seed: dict[str, list[HashedRun]] | None = None,
    **facts: Any,
) -> str:
    """Return the code of the cause. Further runs give these results, or the same as before."""

    def run(which: Setting, seed: int = 0) -> HashedRun:
        if which.delays is not None:
            raise CannotDelay
        if seed:
            return reseeded or other
        return (again or one) if which.name == REFERENCE.name else (other_again or other)

    def run_in_new_process(which: Setting, hash_seed: str) -> HashedRun:
        runs = (by_hash_seed or {}).get(hash_seed)
        return runs.pop(0) if runs else one

    place = first_difference(one, other)
    assert place is not None
    case = Case(
        reference=REFERENCE,
        setting=setting,
        one=one,
        other=other,
        place=place,
        run=run,
        run_in_new_process=run_in_new_process,
        **{"values": None, **facts},
    )
    return find_cause(case).code


def test_a_stream_that_every_worker_gives_is_repeated() -> None:
    assert code_of(run_of("ab"), run_of("aa", "bb")) == "repeated-stream"


def test_the_same_samples_in_another_order() -> None:
    one, other = run_of("ab", "cd"), run_of("cd", "ab")
    assert code_of(one, other) == "worker-order"
    assert code_of(one, other, other_again=one) == "arrival-order"


def test_other_samples_in_workers() -> None:
    one, other, third = run_of("ab"), run_of("ax"), run_of("ay")
    assert code_of(one, other) == "worker-state"
    assert code_of(one, other, other_again=third) == "worker-state"
    assert code_of(one, other, reseeded=third) == "worker-seeds"
    assert code_of(one, other, has_own_seed=True, values=(0.5, 0.25)) == "worker-seeds"


def test_a_reference_that_differs_from_itself() -> None:
    one, other, third = run_of("ab"), run_of("ax"), run_of("ay")
    assert code_of(one, other, again=third) == "kept-state"
    unlike = {"1": [one, third]}
    assert code_of(one, other, again=third, by_hash_seed=unlike) == "unseeded"


def test_a_new_process() -> None:
    one, other = run_of("ab"), run_of("ba")
    assert code_of(one, other, FRESH) == "process"
    assert code_of(one, other, FRESH, by_hash_seed={"2": [other]}) == "hash-order"


def test_a_resumed_run() -> None:
    assert code_of(run_of("ab"), run_of("ac"), RESUMED) == "resume"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ((time.time(), time.time() + 0.1), "time"),
        ((time.time_ns() - 5, time.time_ns() - 9), "time"),
        ((140_000_000_000_000, 140_000_000_000_064), "address"),
        ((0.5, 0.25), "unseeded"),
        ((7, 8), "unseeded"),
    ],
)
def test_values_that_look_like_something(values: tuple[Any, Any], code: str) -> None:
    one, other, third = run_of("ab"), run_of("ax"), run_of("ay")
    by_hash_seed = {"1": [one, third]}
    assert code_of(one, other, again=third, by_hash_seed=by_hash_seed, values=values) == code
