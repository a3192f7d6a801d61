"""The global generators: their state in memory, restoring it, and detecting reads."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.order import global_generators as generators
from penstock.order.global_generators import (
    numpy_generator,
    preserved_generators,
    python_generator,
    state_reads,
    torch_generator,
    watching_state_reads,
)
from support.datasets import assert_same, differences

pytestmark = pytest.mark.legacy


def states() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def test_the_functions_that_were_watched_are_the_originals_again() -> None:
    originals = random.getstate, np.random.get_state
    with watching_state_reads():
        assert random.getstate is not originals[0]
    assert (random.getstate, np.random.get_state) == originals


def test_memory_is_known_on_this_interpreter() -> None:
    assert python_generator().is_known
    assert numpy_generator().is_known
    assert torch_generator().is_known


def test_the_check_notices_memory_that_is_something_else() -> None:
    address = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
    assert generators._holds_python_state(address)
    assert not generators._holds_python_state(address + 4)
    bits = np.random.mtrand._rand._bit_generator
    assert generators._holds_numpy_state(bits.ctypes.state_address)
    assert not generators._holds_numpy_state(bits.ctypes.state_address + 4)


def test_torch_s_state_is_not_used_where_it_is_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert generators._torch_offset.__wrapped__() == generators._torch_offset()
    monkeypatch.setattr(generators, "_TORCH_STATE_BYTES", 5055)
    assert generators._torch_offset.__wrapped__() is None
    monkeypatch.setattr(generators, "_torch_offset", lambda: 8)
    assert not generators.TorchGenerator(torch.default_generator).is_known


USES: dict[str, Callable[[], Any]] = {
    "a draw": lambda: torch.rand(1),
    "a full cycle": lambda: torch.randint(2, (624,), dtype=torch.int32),
    "a normal variate": lambda: torch.randn((), dtype=torch.float64),
    "a cached normal variate": lambda: torch.randn((), dtype=torch.float64),
    "a permutation": lambda: torch.randperm(9),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(5)),
    "another seed": lambda: torch.manual_seed(1),
    "another state": lambda: torch.set_rng_state(torch.Generator().manual_seed(9).get_state()),
}


@pytest.mark.parametrize("is_known", [True, False])
def test_every_use_of_torch_s_generator_is_seen(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setattr(generators, "_torch_offset", lambda: None)
    found = generators.TorchGenerator(torch.default_generator)
    assert found.is_known is is_known
    torch.manual_seed(0)
    for name, use in USES.items():
        before = found.marks()
        torch.get_rng_state(), torch.rand(3, generator=torch.Generator())
        assert found.marks() == before, name  # control: no use of it
        use()
        assert found.marks() != before, name


def test_the_check_leaves_the_generator_as_it_was() -> None:
    state = random.getstate()
    generators._holds_python_state(id(random._inst) + object.__basicsize__)  # type: ignore[attr-defined]
    assert random.getstate() == state
    before = torch.get_rng_state()
    generators._torch_offset.__wrapped__()
    assert torch.equal(torch.get_rng_state(), before)


RESEEDS: dict[str, Callable[[int], Any]] = {
    "random": random.seed,
    "numpy": np.random.seed,
    "numpy, an array": lambda seed: np.random.seed([seed, 5]),
    "torch": torch.manual_seed,
}


@pytest.mark.parametrize("name", RESEEDS)
def test_kept_states_are_those_of_the_last_seed_even_if_nothing_was_drawn(name: str) -> None:
    kept = generators.KeptStates()
    for seed in (1, 2, 1):
        RESEEDS[name](seed)
        expected = states()
        kept.keep()
        kept.restore(has_moved=False)
        assert_same(states(), expected)
        kept.keep()
        random.random(), np.random.rand(), torch.rand(1)
        with pytest.raises(AssertionError):  # control: they have moved
            assert_same(states(), expected)
        kept.restore(has_moved=True)
        assert_same(states(), expected)


@pytest.mark.parametrize("use", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_kept_states_are_copied_only_after_a_use(use: Callable[[], Any]) -> None:
    kept = generators.KeptStates()

    def copy() -> Any:
        kept.keep()
        kept.restore(has_moved=False)
        return kept._of_torch

    for _ in range(3):  # cached normal variates are looked for first
        copy()
    unused = copy()
    assert copy() is unused
    use()
    assert copy() is not unused


def test_preserved_generators_come_back_also_after_an_exception() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    before = states()

    def disturb_and_raise() -> None:
        with preserved_generators():
            random.seed(5)
            np.random.seed(5)
            torch.manual_seed(5)
            assert differences(states(), before)  # control: inside they differ
            raise KeyError

    with pytest.raises(KeyError):
        disturb_and_raise()
    assert_same(states(), before)


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (random, "getstate", (True, False)),
        (np.random, "get_state", (True, False)),
        (torch, "initial_seed", (False, True)),
        (torch.random, "get_rng_state", (False, True)),
        (random, "getrandbits", (False, False)),  # control: it draws, and does not read
    ],
)
def test_a_read_of_a_state_is_seen_while_somebody_watches(
    module: Any, name: str, expected: tuple[bool, bool]
) -> None:
    def read() -> None:
        getattr(module, name)(*([8] if name == "getrandbits" else []))

    before = state_reads.of_globals, state_reads.of_torch
    read()
    assert (state_reads.of_globals, state_reads.of_torch) == before  # control: not watched
    with watching_state_reads(), watching_state_reads():
        read()
    seen = state_reads.of_globals != before[0], state_reads.of_torch != before[1]
    assert seen == expected


def test_a_thread_sees_its_own_read_whatever_other_threads_read_meanwhile() -> None:
    num_missed = []

    def read_often() -> None:
        missed = 0
        for _ in range(500):
            before = state_reads.of_globals
            random.getstate()
            missed += state_reads.of_globals == before
        num_missed.append(missed)

    threads = [threading.Thread(target=read_often) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with watching_state_reads():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert num_missed == [0, 0, 0, 0]


def test_a_function_that_the_user_replaced_is_watched_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own() -> str:
        return "mine"

    with watching_state_reads():
        pass  # the functions are found now
    monkeypatch.setattr(random, "getstate", own)
    before = state_reads.of_globals
    with watching_state_reads():
        assert random.getstate is not own  # control: it is replaced meanwhile
        assert random.getstate() == "mine"  # type: ignore[comparison-overlap]
    assert state_reads.of_globals != before
    assert random.getstate is own
