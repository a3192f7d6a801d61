"""The draws of a sample depend only on (seed, epoch, position)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.order import global_generators as generators
from penstock.order.global_generators import preserved_generators, watching_state_reads
from penstock.order.sample_randomness import NUM_OBSERVED, SampleRandomness, seed_worker
from support.datasets import assert_same, differences

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with preserved_generators():
        yield


def draw(_: Any = None) -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(100),
        np.random.rand(3),
        np.random.standard_normal(3),
        torch.rand(3),
        torch.randn(2),
    )


def silent(_: Any) -> int:
    return 0


def make(seed: int = 7, epoch: int = 2, **more: Any) -> SampleRandomness:
    randomness = SampleRandomness(seed, **more)
    randomness.begin(epoch)
    return randomness


def fresh(position: int, *, seed: int = 7, epoch: int = 2, function: Any = draw) -> Any:
    return make(seed, epoch).call(function, 0, position)


def observed() -> SampleRandomness:
    """Return a SampleRandomness that has observed enough samples without draws."""
    randomness = make()
    with watching_state_reads():
        for position in range(NUM_OBSERVED + 1):
            randomness.call(silent, 0, position)
    assert randomness.is_torch_only
    return randomness


POSITIONS = [0, 1, 2, 15, 16, 17, 63, 64, 1000, 10**6, 2**40]


@pytest.mark.parametrize(
    "order",
    [POSITIONS, POSITIONS[::-1], [16, 0, 17, 1, 1000, 2, 2**40, 15, 10**6, 64, 63]],
    ids=["forwards", "backwards", "mixed"],
)
@pytest.mark.parametrize("prepare", [make, observed])
def test_the_order_of_positions_does_not_matter(order: list[int], prepare: Any) -> None:
    randomness = prepare()
    for position in order:
        with watching_state_reads():
            randomness.snapshot()
            assert_same(randomness.call(draw, 0, position), fresh(position))


def test_the_same_position_again_draws_the_same_again() -> None:
    randomness = make()
    first = randomness.call(draw, 0, 5)
    randomness.call(draw, 0, 100)
    assert_same(randomness.call(draw, 0, 5), first)


def test_a_sample_that_draws_much_does_not_move_the_next() -> None:
    randomness = make()
    randomness.call(lambda _: [draw() for _ in range(1000)], 0, 5)
    assert_same(randomness.call(draw, 0, 6), fresh(6))


def test_without_it_a_sample_that_draws_more_moves_the_next() -> None:
    random.seed(0)
    draw()
    one = random.random()
    random.seed(0)
    draw()
    draw()
    assert one != random.random()


def test_position_epoch_and_seed_each_make_a_difference_in_every_generator() -> None:
    base = fresh(5)
    for other in (fresh(6), fresh(5, epoch=3), fresh(5, seed=8)):
        assert all(differences(a, b) for a, b in zip(base, other, strict=True))


def test_a_thousand_positions_draw_a_thousand_numbers() -> None:
    randomness = make()
    drawn = [
        randomness.call(
            lambda _: (random.random(), np.random.rand(), torch.rand(1).item()), 0, position
        )
        for position in range(1000)
    ]
    for place, least in ((0, 1000), (1, 1000), (2, 990)):  # torch's floats have only 24 bits
        assert len({values[place] for values in drawn}) >= least


def test_the_numbers_look_uniform_across_positions_and_epochs() -> None:
    for positions, epochs in ((range(2000), [0]), ([0], range(400))):
        drawn = []
        randomness = SampleRandomness(3)
        for epoch in epochs:
            randomness.begin(epoch)
            drawn += [
                randomness.call(
                    lambda _: (random.random(), np.random.rand(), torch.rand(1).item()), 0, p
                )
                for p in positions
            ]
        deviation = np.abs(np.mean(drawn, axis=0) - 0.5) * np.sqrt(12 * len(drawn))
        assert deviation.max() < 4.5  # standard deviations
        correlation = np.corrcoef(np.array(drawn).T) - np.eye(3)
        assert np.abs(correlation).max() * np.sqrt(len(drawn)) < 4.5


def test_seeds_of_64_bits_and_negative_ones_are_taken() -> None:
    values = [fresh(0, seed=seed)[0] for seed in (0, 1, -1, 2**63 - 1, -(2**63))]
    assert len(set(values)) == 5


def test_the_second_of_a_gauss_pair_does_not_leak_into_the_next_sample() -> None:
    randomness = make()
    randomness.call(lambda _: (random.gauss(0, 1), np.random.standard_normal()), 0, 0)
    assert random.getstate()[2] is not None  # control: there is something to leak
    assert np.random.get_state()[3] == 1
    for function in (lambda _: random.gauss(0, 1), lambda _: np.random.standard_normal()):
        randomness.call(function, 0, 0)
        assert randomness.call(function, 0, 1) == fresh(1, function=function)


# -- setting the generators only when necessary ----------------------------------------------------


def count_calls(function: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], list[Any]]:
    calls: list[Any] = []

    def counted(index: Any) -> Any:
        calls.append(index)
        return function(index)

    return counted, calls


def call_counted(randomness: SampleRandomness, function: Any, position: int) -> Any:
    with watching_state_reads():
        randomness.snapshot()
        return randomness.call(function, 0, position)


FIRST_DRAWS: dict[str, Callable[[Any], Any]] = {
    "random.random": lambda _: random.random(),
    "random.shuffle": lambda _: random.sample(range(100), 50),
    "random.gauss": lambda _: random.gauss(0, 1),
    "624 words exactly": lambda _: random.getrandbits(624 * 32),
    "two times 624 words": lambda _: random.getrandbits(2 * 624 * 32),
    "np.random.rand": lambda _: np.random.rand(),
    "np.random.randn": lambda _: np.random.randn(),
    "np.random.permutation": lambda _: np.random.permutation(30),
    "numpy's 624 words exactly": lambda _: np.random.bytes(624 * 4),
    "the generator object of numpy": lambda _: np.random.mtrand._rand.rand(),
    "torch.rand": lambda _: torch.rand(3),
    "torch.randn": lambda _: torch.randn(1),
    "torch's 624 words exactly": lambda _: torch.empty(624, dtype=torch.int32).random_(),
    "two times torch's 624 words": lambda _: torch.empty(1248, dtype=torch.int32).random_(),
    "the state of python": lambda _: random.getstate()[1][:5],
    "the state of numpy": lambda _: np.random.get_state()[1][:5].tolist(),
    "python, put back": lambda _: _put_back(random.getstate, random.setstate, random.random),
    "numpy, put back": lambda _: _put_back(
        np.random.get_state, np.random.set_state, np.random.rand
    ),
    "a seed of its own": lambda _: (random.seed(3), random.random(), np.random.seed(4))[1],
    "then an exception": lambda _: _raise_after(random.random()),
    "torch.initial_seed": lambda _: torch.initial_seed(),
    "torch.random.get_rng_state": lambda _: torch.random.get_rng_state()[:40].tolist(),
    "torch, put back": lambda _: _put_back(
        torch.get_rng_state, torch.set_rng_state, lambda: torch.rand(1).item()
    ),
    "torch, forked": lambda _: _drawn_in_a_fork(),
}


def _drawn_in_a_fork() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(1).item()


def _put_back(get: Any, put: Any, draw_one: Any) -> Any:
    state = get()
    value = draw_one()
    put(state)
    return value


def _raise_after(value: float) -> Any:
    raise LookupError(value)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except LookupError as error:
        return error.args


@pytest.mark.parametrize("name", FIRST_DRAWS)
def test_the_first_draw_after_a_long_silence_is_noticed_and_done_right(name: str) -> None:
    function = FIRST_DRAWS[name]
    randomness = observed()
    random.seed(99)  # earlier generator state must not matter
    np.random.seed(99)
    found = outcome(lambda: call_counted(randomness, function, 500))
    assert_same(found, outcome(lambda: fresh(500, function=function)))


@pytest.mark.parametrize("name", FIRST_DRAWS)
def test_an_unseeded_run_in_which_a_sample_draws_is_loaded_again_and_right(name: str) -> None:
    def function(index: int) -> Any:
        return FIRST_DRAWS[name](index) if index == 5 else index

    randomness = observed()
    assert randomness.is_unseeded
    torch.manual_seed(99)
    found = outcome(lambda: run_counted(randomness, function, range(8), 500)[5])
    assert_same(found, outcome(lambda: fresh(505, function=FIRST_DRAWS[name])))
    assert not randomness.is_unseeded


@pytest.mark.parametrize("name", FIRST_DRAWS)
def test_a_draw_later_in_the_first_run_is_noticed_and_done_right(name: str) -> None:
    def function(index: int) -> Any:
        return FIRST_DRAWS[name](index) if index == 40 else index

    randomness = make()
    found = outcome(lambda: run_counted(randomness, function, range(64), 500)[40])
    assert_same(found, outcome(lambda: fresh(540, function=FIRST_DRAWS[name])))
    assert not randomness.is_unseeded


def test_the_first_run_ends_unseeded_where_nothing_draws() -> None:
    randomness = make()
    assert run_counted(randomness, silent, range(64), 0) == [silent(0)] * 64
    assert randomness.is_unseeded


def run_counted(
    randomness: SampleRandomness, function: Any, indices: Any, position: int
) -> list[Any]:
    with watching_state_reads():
        return randomness.call_many(function, indices, position)


@pytest.mark.parametrize("name", FIRST_DRAWS)
def test_a_preserved_call_is_right_and_leaves_the_caller_s_generators_as_they_were(
    name: str,
) -> None:
    def function(index: int) -> Any:
        return FIRST_DRAWS[name](index) if index == 5 else index

    randomness = observed()
    expected = outcome(lambda: fresh(505, function=FIRST_DRAWS[name]))
    random.gauss(0, 1)  # caches a value, as does the next draw
    np.random.randn()
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for _ in range(2):  # unseeded, and after the switch to seeding
        assert_same(
            outcome(lambda: randomness.call_many_preserved(function, range(8), 500)[5]), expected
        )
        assert_same((random.getstate(), np.random.get_state(), torch.get_rng_state()), state)
    assert not randomness.is_unseeded


def test_an_unseeded_preserved_call_puts_back_the_cached_normals() -> None:
    randomness = observed()
    random.gauss(0, 1)
    np.random.randn()
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for _ in range(3):
        assert randomness.call_many_preserved(lambda index: index, range(8), 0) == list(range(8))
        assert_same((random.getstate(), np.random.get_state(), torch.get_rng_state()), state)
    assert randomness.is_unseeded


def test_an_unseeded_run_calls_each_sample_once_and_sets_nothing() -> None:
    randomness = observed()
    counted, calls = count_calls(silent)
    before = random.getstate(), torch.get_rng_state()
    assert run_counted(randomness, counted, range(64), 0) == [silent(0)] * 64
    assert calls == list(range(64))
    assert before[0] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())
    assert randomness.is_unseeded


def test_an_exception_in_an_unseeded_run_is_raised_after_one_call_of_each_sample() -> None:
    def fail_at_3(index: int) -> int:
        return [0, 1, 2][index]

    failing, calls = count_calls(fail_at_3)
    with pytest.raises(IndexError):
        run_counted(observed(), failing, range(8), 0)
    assert calls == [0, 1, 2, 3]


def test_a_dataset_that_draws_from_torch_is_torch_only_and_never_unseeded() -> None:
    randomness = make()
    with watching_state_reads():
        for position in range(2 * NUM_OBSERVED):
            randomness.call(lambda _: torch.rand(1), 0, position)
    assert randomness.is_torch_only
    assert not randomness.is_unseeded


@pytest.mark.parametrize("name", ["random.gauss", "np.random.randn"])
def test_a_normal_variate_that_somebody_left_cached_is_not_taken(name: str) -> None:
    randomness = observed()
    random.gauss(0, 1)
    np.random.randn()
    assert random.getstate()[2] is not None  # control: both have a cached value
    assert np.random.get_state()[3] == 1
    with preserved_generators():
        found = call_counted(randomness, FIRST_DRAWS[name], 500)
    assert_same(found, fresh(500, function=FIRST_DRAWS[name]))


def test_a_silent_sample_is_called_once_and_one_that_begins_to_draw_twice() -> None:
    randomness = observed()
    calm, calls = count_calls(silent)
    for position in range(50):
        call_counted(randomness, calm, position)
    assert len(calls) == 50
    lively, calls = count_calls(draw)
    for position in range(50):
        call_counted(randomness, lively, position)
    assert len(calls) == 51
    assert not randomness.is_torch_only


def test_torch_s_draws_need_no_second_call() -> None:
    randomness = observed()
    lively, calls = count_calls(lambda _: torch.rand(2))
    assert_same(call_counted(randomness, lively, 9), fresh(9, function=lambda _: torch.rand(2)))
    assert len(calls) == 1
    assert randomness.is_torch_only


def test_an_exception_of_a_silent_sample_is_raised_after_one_call() -> None:
    def fail(_: Any) -> None:
        raise LookupError

    randomness = observed()
    failing, calls = count_calls(fail)
    with pytest.raises(LookupError):
        call_counted(randomness, failing, 3)
    assert len(calls) == 1


def test_a_dataset_that_draws_from_the_start_is_never_called_twice() -> None:
    randomness = make()
    lively, calls = count_calls(draw)
    for position in range(3 * NUM_OBSERVED):
        randomness.call(lively, 0, position)
    assert len(calls) == 3 * NUM_OBSERVED


# -- generator state in memory ---------------------------------------------------------------------


def test_public_calls_give_the_same_bits_where_memory_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_place = [fresh(position) for position in POSITIONS]
    monkeypatch.setattr(generators, "_holds_python_state", lambda address: False)
    monkeypatch.setattr(generators, "_holds_numpy_state", lambda address: False)
    generators.python_generator.cache_clear()
    generators._numpy_generator.cache_clear()
    try:
        assert not make()._python.is_known
        assert_same([fresh(position) for position in POSITIONS], in_place)
        randomness = make()
        for position in range(3 * NUM_OBSERVED):
            randomness.call(silent, 0, position)
        assert not randomness.is_torch_only  # the state is not readable, so seeding never stops
    finally:
        generators.python_generator.cache_clear()
        generators._numpy_generator.cache_clear()


def test_python_s_generator_is_a_proper_one_after_it_was_set() -> None:
    make().set_generators(5)
    other = random.Random()
    other.setstate(random.getstate())
    assert [random.random() for _ in range(1000)] == [other.random() for _ in range(1000)]


def test_torch_s_generator_can_be_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    assert_same(make(with_torch=False).call(lambda _: torch.rand(2), 0, 5), expected)
    torch.manual_seed(1)
    assert differences(make().call(lambda _: torch.rand(2), 0, 5), expected)


def test_workers_are_seeded_as_torch_seeds_its_own() -> None:
    drawn = []
    for worker in (0, 1):
        assert seed_worker(1234, worker) == 1234 + worker
        assert torch.initial_seed() == 1234 + worker
        drawn.append(draw())
    assert all(differences(a, b) for a, b in zip(*drawn, strict=True))
