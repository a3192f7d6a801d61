"""penstock.rng(), the generator of the sample that is being loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import rng
from penstock.order.global_generators import preserved_generators, watching_state_reads
from penstock.order.sample_randomness import NUM_OBSERVED, SampleRandomness, UnexpectedDraw

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with preserved_generators():
        yield


def ask(_: Any = None) -> float:
    return float(rng().random())


def silent(_: Any) -> float:
    return 0.0


def fresh(position: int, function: Any = ask, *, seed: int = 7, epoch: int = 0) -> Any:
    randomness = SampleRandomness(seed)
    randomness.begin(epoch)
    return randomness.call(function, 0, position)


def observed(*, num_samples: int = NUM_OBSERVED, function: Any = silent) -> SampleRandomness:
    randomness = SampleRandomness(7)
    with watching_state_reads():
        for position in range(num_samples):
            randomness.call(function, 0, position)
    return randomness


def test_it_is_a_function_of_seed_epoch_and_position() -> None:
    base = fresh(5)
    assert base == fresh(5)
    assert len({base, fresh(6), fresh(5, seed=8), fresh(5, epoch=1)}) == 4


def test_positions_in_any_order_draw_what_each_alone_draws() -> None:
    randomness = SampleRandomness(7)
    for position in (3, 0, 2**40, 3, 1):
        assert randomness.call(ask, 0, position) == fresh(position)


def test_asked_twice_in_a_sample_it_goes_on() -> None:
    first, second = fresh(5, lambda _: (ask(), ask()))
    assert first != second
    assert (first, second) == tuple(fresh(5, lambda _: rng().random(2).tolist()))


def test_half_of_a_word_left_over_does_not_reach_the_next_sample() -> None:
    randomness = SampleRandomness(7)
    half = lambda _: int(rng().integers(0, 2**32, dtype=np.uint32))  # noqa: E731
    randomness.call(half, 0, 0)
    assert randomness.call(half, 0, 1) == fresh(1, half)


def test_a_dataset_that_only_asks_is_unseeded_and_its_samples_are_told_apart() -> None:
    randomness = observed(function=ask)
    assert randomness.is_unseeded  # the global generators have not moved
    with watching_state_reads():
        found = randomness.call_many(lambda _: ask(), range(8), 100)
    assert found == [fresh(100 + place) for place in range(8)]
    assert randomness.is_unseeded


def test_samples_of_a_thousand_positions_differ_and_look_uniform() -> None:
    randomness = SampleRandomness(3)
    drawn = [randomness.call(ask, 0, position) for position in range(2000)]
    assert len(set(drawn)) == 2000
    assert abs(np.mean(drawn) - 0.5) * np.sqrt(12 * 2000) < 4.5
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) * np.sqrt(2000) < 4.5


def test_the_first_to_ask_in_an_unseeded_run_gets_the_run_loaded_again() -> None:
    randomness = observed()
    assert randomness.is_unseeded
    calls: list[int] = []

    def late(index: int) -> float:
        calls.append(index)
        return ask() if index == 5 else 0.0

    with watching_state_reads():
        found = randomness.call_many(late, range(8), 100)
    assert found == [*[0.0] * 5, fresh(105), 0.0, 0.0]
    assert calls == [*range(8), *range(8)]
    assert randomness.is_unseeded  # samples are distinguished from here on
    with watching_state_reads():  # the next run is correct immediately
        assert randomness.call_many(late, range(8), 200)[5] == fresh(205)
    assert len(calls) == 24


def test_a_run_that_is_begun_and_ended_by_hand_says_so() -> None:
    randomness = observed()
    with watching_state_reads():
        randomness.begin_unseeded()
        ask()
        with pytest.raises(UnexpectedDraw):
            randomness.end_unseeded()
        assert randomness.call(ask, 0, 9) == fresh(9)


def test_a_sample_that_asks_and_fails_in_a_torch_only_call_can_be_loaded_again() -> None:
    def fail(_: Any) -> None:
        raise LookupError(ask())

    found = []
    for randomness in (observed(), SampleRandomness(7)):
        with pytest.raises(LookupError) as caught:
            randomness.call(fail, 0, 50)
        found.append(caught.value.args[0])
    assert found == [fresh(50)] * 2


def test_a_loader_inside_a_sample_does_not_take_the_outer_one_s_place() -> None:
    inner = SampleRandomness(99)

    def nested(_: Any) -> tuple[float, float]:
        return inner.call(ask, 0, 3), ask()

    assert fresh(5, nested) == (fresh(3, seed=99), fresh(5))


def test_threads_have_generators_of_their_own() -> None:
    found: dict[int, list[float]] = {}
    barrier = threading.Barrier(4)

    def load(position: int) -> None:
        def sample(_: Any) -> list[float]:
            barrier.wait(timeout=240)
            return [ask() for _ in range(200)]

        randomness = SampleRandomness(7)
        found[position] = randomness.call(sample, 0, position)

    threads = [threading.Thread(target=load, args=(position,)) for position in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for position in range(4):
        assert found[position] == fresh(position, lambda _: [ask() for _ in range(200)])


def test_outside_of_samples_numpy_s_global_generator_decides() -> None:
    np.random.seed(4)
    first, second = ask(), ask()
    np.random.seed(4)
    assert (ask(), ask()) == (first, second)
    assert first != second
    np.random.seed(5)
    assert ask() != first
    fresh(5)
    np.random.seed(4)
    assert ask() == first  # also after samples were loaded


def test_it_is_a_public_name() -> None:
    assert penstock.rng is rng
