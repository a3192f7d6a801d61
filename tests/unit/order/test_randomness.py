"""Before each sample the generators hold a state that its position alone decides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from specimens import differences

from penstock.order import randomness
from penstock.order.randomness import SampleRandomness, preserved_generators

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    with preserved_generators():
        yield


def draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(100),
        np.random.rand(3),
        np.random.standard_normal(3),
        torch.rand(3),
        torch.randn(2),
    )


def draws(before: SampleRandomness, positions: Any, num_left: int = 1) -> dict[int, Any]:
    found = {}
    for position in positions:
        before(position, num_left)
        found[position] = draw()
    return found


REFERENCE_POSITIONS = [0, 1, 2, 15, 16, 17, 40, 1000, 10**6, 2**40]


def fresh(position: int, *, seed: int = 7, epoch: int = 2) -> Any:
    return draws(SampleRandomness(seed, epoch), [position])[position]


@pytest.mark.parametrize(
    "order",
    [
        REFERENCE_POSITIONS,
        REFERENCE_POSITIONS[::-1],
        [16, 0, 17, 1, 1000, 2, 2**40, 15, 10**6, 40],
    ],
    ids=["forwards", "backwards", "mixed"],
)
@pytest.mark.parametrize("num_left", [1, 5, 1000])
def test_the_order_of_positions_does_not_matter(order: list[int], num_left: int) -> None:
    found = draws(SampleRandomness(7, 2), order, num_left)
    assert not differences(found, {position: fresh(position) for position in order})


def test_a_run_prepared_ahead_gives_the_same_as_one_by_one() -> None:
    before = SampleRandomness(7, 2)
    before.expect(10, 1000)
    assert not differences(draws(before, range(10, 60), 50), {n: fresh(n) for n in range(10, 60)})


def test_the_same_position_again_gives_the_same_again() -> None:
    before = SampleRandomness(7, 2)
    first = draws(before, [5])
    draws(before, [6, 100])
    assert not differences(draws(before, [5]), first)


def test_a_draw_too_many_in_one_sample_does_not_move_the_next() -> None:
    before = SampleRandomness(7, 2)
    before(5, 10)
    for _ in range(1000):
        draw()
    assert not differences(draws(before, [6])[6], fresh(6))


def test_without_setting_the_generators_a_draw_too_many_moves_the_next() -> None:
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
        same = [bool(not differences(a, b)) for a, b in zip(base, other, strict=True)]
        assert not any(same)


def test_a_thousand_positions_have_a_thousand_states() -> None:
    before = SampleRandomness(0, 0)
    seen: tuple[set[Any], ...] = (set(), set(), set())
    for position in range(1000):
        before(position, 1000 - position)
        for values, value in zip(
            seen, (random.random(), np.random.rand(), torch.rand(1).item()), strict=True
        ):
            values.add(value)
    assert [len(values) for values in seen] == [1000, 1000, pytest.approx(1000, abs=2)]


def test_the_draws_look_uniform_across_positions() -> None:
    before = SampleRandomness(3, 0)
    means = np.zeros(3)
    for position in range(2000):
        before(position, 2000 - position)
        means += [random.random(), np.random.rand(), torch.rand(1).item()]
    assert np.abs(means / 2000 - 0.5).max() < 0.03  # 4.6 standard deviations


def test_seeds_of_64_bits_and_negative_ones_are_taken() -> None:
    values = [fresh(0, seed=seed)[0] for seed in (0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1)]
    assert len(set(values)) >= 5  # -1 and 2**64 - 1 are the same 64 bits


def test_the_second_half_of_a_gauss_pair_does_not_leak_into_the_next_sample() -> None:
    before = SampleRandomness(7, 2)
    before(0)
    random.gauss(0, 1)  # leaves the second of the pair in the generator
    assert random.getstate()[2] is not None  # control: there is something to leak
    before(1)
    leaked = random.gauss(0, 1)
    before(1)
    assert leaked == random.gauss(0, 1)
    np.random.standard_normal()
    before(1)
    first = np.random.standard_normal()
    before(1)
    assert first == np.random.standard_normal()


def test_in_place_and_setstate_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place = draws(SampleRandomness(7, 2), REFERENCE_POSITIONS)
    monkeypatch.setattr(randomness, "_has_known_layout", lambda address: False)
    randomness._python_writer.cache_clear()
    try:
        slow = SampleRandomness(7, 2)
        assert slow._write_python.__name__ == "by_setstate"
        assert not differences(draws(slow, REFERENCE_POSITIONS), in_place)
    finally:
        randomness._python_writer.cache_clear()


def test_the_fast_way_is_taken_on_this_interpreter() -> None:
    assert SampleRandomness(7, 2)._write_python.__name__ == "in_place"


def test_the_layout_check_notices_memory_that_is_something_else() -> None:
    address = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
    assert randomness._has_known_layout(address)
    assert not randomness._has_known_layout(address + 4)


def test_the_layout_check_leaves_the_generator_as_it_was() -> None:
    state = random.getstate()
    randomness._has_known_layout(id(random._inst) + object.__basicsize__)  # type: ignore[attr-defined]
    assert random.getstate() == state


def test_python_s_generator_is_a_proper_one_after_it_was_set() -> None:
    SampleRandomness(7, 2)(5)
    other = random.Random()
    other.setstate(random.getstate())
    assert [random.random() for _ in range(1000)] == [other.random() for _ in range(1000)]


def test_torch_s_generator_can_be_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    SampleRandomness(7, 2, with_torch=False)(5)
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(1)
    SampleRandomness(7, 2)(5)  # control
    assert not torch.equal(torch.rand(2), expected)


def test_preserved_generators_come_back_also_after_an_exception() -> None:
    def state() -> Any:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    random.gauss(0, 1)
    before = state()
    with pytest.raises(KeyError), preserved_generators():
        SampleRandomness(7, 2)(5)
        draw()
        assert differences(state(), before)  # control: inside they differ
        raise KeyError
    assert not differences(state(), before)


def test_workers_are_seeded_as_torch_seeds_its_own() -> None:
    seeds = {}
    for worker in (0, 1):
        seeds[worker] = randomness.seed_worker(1234, worker), draw()
        assert torch.initial_seed() == 1234 + worker
    assert seeds[0][0] == 1234
    assert seeds[1][0] == 1235
    for one, other in itertools.pairwise([seeds[0][1], seeds[1][1]]):
        assert differences(one, other)
